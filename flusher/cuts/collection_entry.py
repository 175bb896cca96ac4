"""Collections as the shard state knows them, told the way a manifest tells them, and back. No I/O."""

import base64

import pyarrow as pa

from flusher.manifest import CollectionEntry, PartitionEntry
from interceptors.shard.catalog import CollectionInfo, PartitionInfo
from wal.errors import Corrupt


def collection_entries(infos: tuple[CollectionInfo, ...], *, since_tick: int) -> tuple[CollectionEntry, ...]:
    """Return what lived at some time after `since_tick`, collections and partitions alike, in the order of their ids."""
    return tuple(_entry(info, since_tick) for info in infos if not _gone(info.dropped_tick, since_tick))


def arrow_schema(info: CollectionInfo) -> pa.Schema:
    """Return the Arrow schema of a collection. Raises `Corrupt` when it is none."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(info.schema))
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"the schema of collection {info.name} does not decode: {error}") from error


def collection_info(entry: CollectionEntry) -> CollectionInfo:
    """Return a collection as the shard state had it when the manifest was made."""
    return CollectionInfo(
        id=entry.collection_id,
        name=entry.name,
        schema=base64.b64decode(entry.schema),
        schema_version=entry.schema_version,
        primary_key=entry.primary_key,
        vchannels=entry.vchannels,
        partitions=tuple(
            PartitionInfo(each.partition_id, each.name, entry.created_tick, each.dropped_tick)
            for each in entry.partitions
        ),
        created_tick=entry.created_tick,
        dropped_tick=entry.dropped_tick,
    )


def _entry(info: CollectionInfo, since_tick: int) -> CollectionEntry:
    return CollectionEntry(
        collection_id=info.id,
        name=info.name,
        schema=base64.b64encode(info.schema).decode(),
        schema_version=info.schema_version,
        primary_key=info.primary_key,
        partitions=tuple(
            PartitionEntry(partition_id=each.id, name=each.name, dropped_tick=each.dropped_tick)
            for each in info.partitions
            if not _gone(each.dropped_tick, since_tick)
        ),
        vchannels=info.vchannels,
        created_tick=info.created_tick,
        dropped_tick=info.dropped_tick,
    )


def _gone(dropped_tick: int, since_tick: int) -> bool:
    return 0 < dropped_tick <= since_tick
