"""How a log store lies in RocksDB: what an operator may choose, what RocksDB is told, and the keys.

RocksDB's own settings are chosen with figures in `docs/adr/0004-log-layout-on-rocksdb.md`.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
from rocksdict import DBCompressionType, DBRecoveryMode, Options

from wal.files import open_files_max

Durability = Literal["fsync", "os"]

DATABASE_NAME = "log"
"""The database's directory in the node directory."""
META_FAMILY = "default"
ENTRY_FAMILY = "entries"
"""Entries have a column family of their own: their tables then never overlap those of the state
map, and move down the levels without being rewritten."""

_SETTINGS = Path(__file__).parent / "settings"
"""An options file of RocksDB's own, with what no option changes: for some of it rocksdict has no
call.
"""

OPEN_TABLES_MAX = 256
"""RocksDB would keep every table open, and a log of days has thousands: more than a process may
open by default.
"""
OPEN_TABLES_SHARE = 4
"""One part in so many of what the process may open: a backup is verified beside the open log, and
programs have sockets.
"""
WAITING_MEMTABLES_MAX = 2
"""This many full memtables may wait to be written; with one more to spare, no single write has to
wait for them.
"""


class RocksOptions(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="rocksdb",
):
    """Limits and durability of a RocksDB log store.

    `durability` is `fsync` (an append is acknowledged once synced) or `os` (once handed to the
    operating system, which loses up to `sync_interval_ms` of it in a power cut, never a hole).
    `queue_bytes_max` bounds appends that wait for the disk. Appends are refused while the disk has
    less than `free_bytes_min` left, or less than twice RocksDB's own log; 0 refuses nothing. See
    `wal.rocks.space`. RocksDB's log is at most about two memtables, four on a slow disk: so much a
    start has to replay, with the interpreter lock held.
    """

    kind: ClassVar[str] = "rocksdb"
    durability: Durability = "fsync"
    sync_interval_ms: int = 100
    queue_bytes_max: int = 64 << 20
    free_bytes_min: int = 256 << 20
    memtable_bytes: int = 8 << 20


def open_tables_max(open_files: int | None) -> int:
    """Return how many tables RocksDB may keep open in a process that may have `open_files`; it
    takes 20 at least.
    """
    return (
        OPEN_TABLES_MAX
        if open_files is None
        else min(OPEN_TABLES_MAX, open_files // OPEN_TABLES_SHARE)
    )


def database_options(
    options: RocksOptions, *, recovery: DBRecoveryMode, create: bool = False
) -> Options:
    """Return the settings that the database as a whole is opened with."""
    database, _ = Options.load_latest(str(_SETTINGS))
    _tune(database, options)
    database.create_if_missing(create)
    database.create_missing_column_families(create)
    database.set_wal_recovery_mode(recovery)
    database.set_max_open_files(open_tables_max(open_files_max()))
    database.set_max_total_wal_size(2 * options.memtable_bytes)
    return database


def families(options: RocksOptions) -> dict[str, Options]:
    """Return the column families beside the default one."""
    # always: rocksdict's own notes on keys do not survive a power cut
    entries = Options(raw_mode=True)
    _tune(entries, options)
    return {ENTRY_FAMILY: entries}


def _tune(family: Options, options: RocksOptions) -> None:
    # Room for replaying all of the log: RocksDB writes what is full to a table there and then, and
    # nobody else runs. Whoever opens the database for writing sets the size of the options once
    # that is done.
    family.set_write_buffer_size((WAITING_MEMTABLES_MAX + 2) * options.memtable_bytes)
    family.set_max_write_buffer_number(WAITING_MEMTABLES_MAX + 1)
    family.set_compression_type(DBCompressionType.none())


# Keys are bytes, big endian, so that they sort as their numbers do. Column family `default`:
# `s<name>` facts about the store, `t<name>` log id of a pchannel, `f<log id>` first position kept,
# `m<key>` the state map. Column family `entries`: `<log id><last position>`. Log ids are numbers,
# so no log's keys are a prefix of another's, whatever a pchannel is called.

FORMAT_KEY = b"sformat"
NODE_ID_KEY = b"snode_id"
TERM_KEY = b"sterm"
DURABILITY_KEY = b"sdurability"
"""What an acknowledgement meant in the last term; absent means `fsync`."""
META_VERSION_KEY = b"smeta_version"
"""Counts the changes of the state map, so that a lost one is missed like a lost entry."""

LOG_ID_PREFIX = b"t"
FIRST_POSITION_PREFIX = b"f"
META_PREFIX = b"m"

_ENTRY_KEY = struct.Struct(">IQ")
_LOG_ID = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")

entry_key: Callable[[int, int], bytes] = _ENTRY_KEY.pack
"""The key of the entry of a log id whose last message has a position; a seek to any position it
holds finds it.
"""
split_entry_key: Callable[[bytes], tuple[int, int]] = _ENTRY_KEY.unpack
"""The log id and the last position in an entry's key."""
encode_log_id: Callable[[int], bytes] = _LOG_ID.pack
encode_number: Callable[[int], bytes] = _NUMBER.pack


def decode_log_id(data: bytes) -> int:
    """Return the log id `encode_log_id` wrote."""
    return int(_LOG_ID.unpack(data)[0])


def decode_number(data: bytes) -> int:
    """Return the number `encode_number` wrote."""
    return int(_NUMBER.unpack(data)[0])


def log_id_key(name: str) -> bytes:
    """Return the key that holds the id of the log called `name`."""
    return LOG_ID_PREFIX + name.encode()


def first_position_key(log_id: int) -> bytes:
    """Return the key that holds the first position kept of a log; absent until it is truncated."""
    return FIRST_POSITION_PREFIX + encode_log_id(log_id)


def meta_key(key: str) -> bytes:
    """Return the key of an item of the state map."""
    return META_PREFIX + key.encode()
