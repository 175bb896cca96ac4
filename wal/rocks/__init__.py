"""The log store on RocksDB; `store.py` is the door, `docs/adr/0004-log-layout-on-rocksdb.md` the
reasons.
"""
