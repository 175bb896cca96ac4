"""Whether a database may be written again: what it holds, compared with itself and with the floor.

In: surveys of the database as RocksDB opens it read-only in two recovery modes, and the floor. Out: nothing, or `Corrupt`
with the place. Pure but for `survey`, which reads. RocksDB itself opens a damaged or missing log file without an error.

- Point-in-time recovery stops at the first damaged record, skip-any goes on behind it. If the second finds more, a record in
  the middle is damaged: rot, since a torn tail of one batch has nothing behind it.
- A floor past what was found means that acknowledged records are gone: a log file is missing or short.
"""

from collections.abc import Mapping

import msgspec
from rocksdict import Rdict

from wal.errors import Corrupt, UnsupportedFormat
from wal.rocks.floor import Floor
from wal.rocks.keys import (
    DURABILITY_KEY,
    FORMAT_KEY,
    LOG_ID_PREFIX,
    META_VERSION_KEY,
    NODE_ID_KEY,
    TERM_KEY,
    decode_log_id,
    decode_number,
)
from wal.rocks.options import ENTRY_FAMILY
from wal.rocks.range_read import last_position

STORE_FORMAT = 1
"""Layout of the keys; a newer one is refused, never guessed at."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a database holds: log ids by name, the last position of each log by id, and the facts about the store."""

    node_id: str
    term: int
    meta_version: int
    log_ids: Mapping[str, int]
    last_positions: Mapping[int, int]
    synced_each_batch: bool = True
    """Whether the last term synced each batch before the next: then at most one record of RocksDB's log was unsynced."""


def survey(database: Rdict) -> Survey:
    """Look at the end of every log, without reading any entry. Raises `UnsupportedFormat` for another layout."""
    _check_format(database)
    log_ids = {
        key[len(LOG_ID_PREFIX) :].decode(): decode_log_id(value)
        for key, value in scan_prefix(database, LOG_ID_PREFIX).items()
    }
    entries = database.get_column_family(ENTRY_FAMILY)
    return Survey(
        node_id=_fact(database, NODE_ID_KEY).decode(),
        term=decode_number(_fact(database, TERM_KEY)),
        meta_version=decode_number(_fact(database, META_VERSION_KEY)),
        log_ids=log_ids,
        last_positions={log_id: last_position(entries, log_id) for log_id in log_ids.values()},
        synced_each_batch=database.get(DURABILITY_KEY) != b"os",
    )


def judge(found: Survey, behind_damage: Survey, floor: Floor, *, place: str) -> None:
    """Raise `Corrupt` when `found` lacks something that was there.

    `found` is what point-in-time recovery reaches, `behind_damage` what skip-any recovery reaches. Under durability `os`
    many records may be unsynced, and a disk writes their pages in any order: what is behind damage then proves nothing,
    and the floor alone, which is synced with each sync of the log, says what must be there.
    """
    if found.node_id != floor.node_id:
        raise Corrupt(f"{place} belongs to node {found.node_id} and the floor file beside it to node {floor.node_id}")
    names = {log_id: name for name, log_id in behind_damage.log_ids.items()}
    for log_id, position in behind_damage.last_positions.items() if found.synced_each_batch else ():
        _require(found.last_positions.get(log_id, 0), position, f"{place}: log {names[log_id]!r}", _DAMAGED)
    for log_id, position in floor.positions.items():
        _require(found.last_positions.get(log_id, 0), position, f"{place}: log {names.get(log_id, log_id)!r}", _MISSING)
    if found.synced_each_batch:
        _require(found.meta_version, behind_damage.meta_version, f"{place}: the state map", _DAMAGED)
    _require(found.meta_version, floor.meta_version, f"{place}: the state map", _MISSING)


_DAMAGED = "is damaged after {found}; entries behind the damage reach {wanted}"
_MISSING = "ends at {found} and {wanted} was acknowledged: a file of the database is missing, short or damaged"


def _require(found: int, wanted: int, what: str, verdict: str) -> None:
    if found < wanted:
        raise Corrupt(f"{what} {verdict.format(found=found, wanted=wanted)} — restore the node directory from a backup")


def scan_prefix(family: Rdict, prefix: bytes) -> dict[bytes, bytes]:
    """Return all records of a family whose keys start with `prefix`, in key order."""
    iterator = family.iter()
    iterator.seek(prefix)
    records: dict[bytes, bytes] = {}
    while iterator.valid():
        key = iterator.key()
        if not key.startswith(prefix):
            return records
        records[key] = iterator.value()
        iterator.next()
    iterator.status()  # without this a damaged block looks like the end
    return records


def _check_format(database: Rdict) -> None:
    version = decode_number(_fact(database, FORMAT_KEY))
    if version != STORE_FORMAT:
        raise UnsupportedFormat(
            f"the node directory has format {version} and this release reads {STORE_FORMAT} — "
            "open it with the release that wrote it, or a newer one"
        )


def _fact(database: Rdict, key: bytes) -> bytes:
    value = database.get(key)
    if value is None:
        raise Corrupt(f"the database lacks its record {key!r} — restore the node directory from a backup")
    assert isinstance(value, bytes)
    return value
