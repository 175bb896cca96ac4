"""The layout of a log store in RocksDB: the operator's options, RocksDB's settings, and the keys.

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
"""An options file in RocksDB's format with the fixed settings: rocksdict has no call for some of
them.
"""

OPEN_TABLES_MAX = 256
"""RocksDB would keep every table open, and a log of days has thousands: more than a process may
open by default.
"""
OPEN_TABLES_SHARE = 4
"""RocksDB may use one in this many of the process's file descriptors: a backup is verified beside
the open log, and programs have sockets.
"""
WAITING_MEMTABLES_MAX = 2
"""This many full memtables may wait to be written to tables. RocksDB is allowed one more, so that
no single write has to wait for them.
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
    less than `free_bytes_min` left, or less than twice RocksDB's own log; with 0 none is refused.
    See `wal.rocks.space`. RocksDB's log is at most about two memtables, four on a slow disk; a
    start replays it with the interpreter lock held.
    """

    kind: ClassVar[str] = "rocksdb"
    durability: Durability = "fsync"
    sync_interval_ms: int = 100
    queue_bytes_max: int = 64 << 20
    free_bytes_min: int = 256 << 20
    memtable_bytes: int = 8 << 20


def open_tables_max(open_files: int | None) -> int:
    """Return how many tables RocksDB may keep open in a process that may open `open_files` files;
    RocksDB needs at least 20.
    """
    return (
        OPEN_TABLES_MAX
        if open_files is None
        else min(OPEN_TABLES_MAX, open_files // OPEN_TABLES_SHARE)
    )


def database_options(
    options: RocksOptions, *, recovery: DBRecoveryMode, create: bool = False
) -> Options:
    """Return the settings of the database as a whole."""
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
    # always raw mode: rocksdict's own record of key types does not survive a power cut
    entries = Options(raw_mode=True)
    _tune(entries, options)
    return {ENTRY_FAMILY: entries}


def _tune(family: Options, options: RocksOptions) -> None:
    # Large enough to replay all of RocksDB's log: otherwise RocksDB writes full memtables to tables
    # during the replay, with the interpreter lock held. `wal.rocks.recovery` sets the size of the
    # options once the database is open for writing.
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
"""The durability of the last term; absent means `fsync`."""
META_VERSION_KEY = b"smeta_version"
"""Counts the changes of the state map, so that a lost change is detected like a lost entry."""

LOG_ID_PREFIX = b"t"
FIRST_POSITION_PREFIX = b"f"
META_PREFIX = b"m"

_ENTRY_KEY = struct.Struct(">IQ")
_LOG_ID = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")

entry_key: Callable[[int, int], bytes] = _ENTRY_KEY.pack
"""Return the key of an entry from its log id and the position of its last message. A seek to any
position that the entry holds finds it.
"""
split_entry_key: Callable[[bytes], tuple[int, int]] = _ENTRY_KEY.unpack
"""Return the log id and the last position in an entry's key."""
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
    """Return the key that holds the first kept position of a log; absent until the log is
    truncated.
    """
    return FIRST_POSITION_PREFIX + encode_log_id(log_id)


def meta_key(key: str) -> bytes:
    """Return the key of an item of the state map."""
    return META_PREFIX + key.encode()
