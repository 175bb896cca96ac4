"""The log: message model, ids, ticks, errors, log stores, live tail and the WAL adaptor."""
