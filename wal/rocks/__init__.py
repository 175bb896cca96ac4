"""The log store on RocksDB. Start at `store.py`; `docs/adr/0004-log-layout-on-rocksdb.md` has the
reasons.
"""
