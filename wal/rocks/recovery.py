"""Recovery of a database after a crash: whether it may be written again, and which part of its end
is torn. Blocks.

RocksDB opens a database with a damaged or missing log file without an error. So this module surveys
the database in two recovery modes and compares the result with the floor, after checking RocksDB's
own files before RocksDB reads them.
"""

import mmap
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
from rocksdict import Rdict, WriteBatch

from wal.codec import crc32c
from wal.errors import Corrupt, StreamingNodeError, UnsupportedFormat
from wal.files import DIRECTORY_MODE, not_regular, open_binary, read_regular, sync_directory
from wal.rocks.database import classified, open_rocksdb
from wal.rocks.floor import Floor
from wal.rocks.layout import (
    DURABILITY_KEY,
    ENTRY_FAMILY,
    FORMAT_KEY,
    LOG_ID_PREFIX,
    META_VERSION_KEY,
    NODE_ID_KEY,
    TERM_KEY,
    RocksOptions,
    decode_log_id,
    decode_number,
    encode_number,
    entry_key,
)
from wal.rocks.log import current_entry, decode_rocks_entry, first_kept, last_position
from wal.runtime import event_log

_log = event_log(__name__)

STORE_FORMAT = 1
"""Layout of the keys; any other is refused."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a database: log ids by name, last positions by log id, and the facts about the
    store.
    """

    node_id: str
    term: int
    meta_version: int
    log_ids: Mapping[str, int]
    last_positions: Mapping[int, int]
    synced_each_batch: bool = True
    """Whether the last term synced each batch before the next, so that at most one record of
    RocksDB's log was unsynced.
    """


def write_facts(database: Rdict, node_id: str) -> None:
    """Write the facts about the store into a new database."""
    facts = WriteBatch(raw_mode=True)
    facts.put(FORMAT_KEY, encode_number(STORE_FORMAT))
    facts.put(NODE_ID_KEY, node_id.encode())
    facts.put(TERM_KEY, encode_number(0))
    facts.put(META_VERSION_KEY, encode_number(0))
    database.write(facts)


def survey(
    database: Rdict, *, last_position: Callable[[Rdict, int], int] = last_position
) -> Survey:
    """Return the last position of every log and the facts about the store, without decoding an
    entry. Raises `UnsupportedFormat` for another layout, `Corrupt` for a missing fact.
    """
    version = decode_number(_fact(database, FORMAT_KEY))
    if version != STORE_FORMAT:
        raise UnsupportedFormat(
            f"the node directory has format {version} and this release reads {STORE_FORMAT} — "
            "open it with the release that wrote it, or a newer one"
        )
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
    """Raise `Corrupt` when `found`, the result of point-in-time recovery, lacks something that the
    floor or `behind_damage` has.
    """
    if found.node_id != floor.node_id:
        raise Corrupt(
            f"{place} belongs to node {found.node_id} and the floor file beside it to node "
            f"{floor.node_id}"
        )
    names = {log_id: name for name, log_id in behind_damage.log_ids.items()}
    # Point-in-time recovery stops at the first damaged record; skip-any recovery continues after
    # it. If the second finds more, a record in the middle is damaged: bit rot, since after a torn
    # tail of one batch nothing follows. Under durability `os` many records may be unsynced, and a
    # disk writes their pages in any order: data after the damage then proves nothing.
    if found.synced_each_batch:
        for log_id, position in behind_damage.last_positions.items():
            _require(
                found.last_positions.get(log_id, 0),
                position,
                f"{place}: log {names[log_id]!r}",
                _DAMAGED,
            )
        _require(
            found.meta_version, behind_damage.meta_version, f"{place}: the state map", _DAMAGED
        )
    for log_id, position in floor.positions.items():
        _require(
            found.last_positions.get(log_id, 0),
            position,
            f"{place}: log {names.get(log_id, log_id)!r}",
            _MISSING,
        )
    _require(found.meta_version, floor.meta_version, f"{place}: the state map", _MISSING)


_DAMAGED = "is damaged after {found}; entries behind the damage reach {wanted}"
_MISSING = (
    "ends at {found} and {wanted} was acknowledged: a file of the database is missing, "
    "short or damaged"
)


def _require(found: int, wanted: int, what: str, verdict: str) -> None:
    if found < wanted:
        raise Corrupt(
            f"{what} {verdict.format(found=found, wanted=wanted)} — restore the node directory "
            "from a backup"
        )


def verify_database(path: Path, options: RocksOptions, floor: Floor) -> Survey:
    """Check without changes that the database holds all that `floor` records, and return its
    survey. Raises `Corrupt`.
    """
    check_framing(path)
    try:
        return _verified(path, options, floor)
    except Corrupt:
        if torn := torn_manifest(path):
            # If the copy without the torn end fails too, raise the error of the original.
            with suppress(StreamingNodeError, OSError), without_torn_end(path, *torn) as look_alike:
                return _verified(look_alike, options, floor)
        raise


def _verified(path: Path, options: RocksOptions, floor: Floor) -> Survey:
    (found, behind_damage) = verify_files(path, options, floor)
    for name, log_id in found.log_ids.items():
        kept = found.last_positions[log_id]
        reached = behind_damage.last_positions.get(log_id, 0)
        # acknowledged under durability `os` and torn by a power cut; opening for writing drops it
        if reached > kept:
            _log.warning(
                "torn_tail_dropped", path=str(path), log=name, kept=kept, dropped=reached - kept
            )
    return found


def verify_files(path: Path, options: RocksOptions, floor: Floor) -> tuple[Survey, Survey]:
    """Check a database as `verify_database`, but refuse one with a torn manifest. Returns its
    survey, and the survey that includes what follows damage.
    """
    found = _survey(path, options)
    try:
        behind_damage = _survey(path, options, past_damage=True)
    except Corrupt:
        # When a record of several blocks is damaged, RocksDB 10 mixes the checksum of its part into
        # that of the next such record, and refuses the database for the mismatch. Under durability
        # `os` a power cut leaves both kinds of records, and the refusal proves nothing.
        if found.synced_each_batch:
            judge(found, found, floor, place=str(path))  # names the log that is short
            raise
        behind_damage = found
    judge(found, behind_damage, floor, place=str(path))
    return found, behind_damage


def _survey(path: Path, options: RocksOptions, *, past_damage: bool = False) -> Survey:
    with (
        closing(open_rocksdb(path, options, past_damage=past_damage)) as database,
        classified(path),
    ):
        return survey(database)


def scan_prefix(family: Rdict, prefix: bytes) -> dict[bytes, bytes]:
    """Return all records of a family whose keys start with `prefix`, in key order."""
    iterator = family.iter()
    iterator.seek(prefix)
    records: dict[bytes, bytes] = {}
    while iterator.valid() and (key := iterator.key()).startswith(prefix):
        records[key] = iterator.value()
        iterator.next()
    iterator.status()  # without this a damaged block looks like the end
    return records


def _fact(database: Rdict, key: bytes) -> bytes:
    value = database.get(key)
    if value is None:
        raise Corrupt(
            f"the database lacks its record {key!r} — restore the node directory from a backup"
        )
    assert isinstance(value, bytes)
    return value


def recover(path: Path, database: Rdict, options: RocksOptions, floor: Floor) -> Survey:
    """Drop what a crash tore in a verified database that is open for writing. Returns the survey of
    what is left, which is durable.
    """
    found = drop_behind_holes(database, survey(database), floor)
    # After a failed sync the kernel may mark pages of the log's files as clean although they are
    # not on the disk. So the content of the logs goes into new, synced tables before anything else
    # happens.
    _bring_into_tables(database, options)
    judge(found, found, floor, place=str(path))
    return found


def _bring_into_tables(database: Rdict, options: RocksOptions) -> None:
    """Flush the replayed log into tables, which takes most of the time of an opening. RocksDB would
    do it as it opens, but with the interpreter lock held.
    """
    # Close the family here: otherwise a failure's traceback, which keeps this frame, would keep the
    # database open.
    with closing(database.get_column_family(ENTRY_FAMILY)) as entries:
        for family in (entries, database):
            family.set_options({"write_buffer_size": str(options.memtable_bytes)})
            family.flush()


def drop_behind_holes(database: Rdict, found: Survey, floor: Floor) -> Survey:
    """Delete what follows a hole in the unsynced part of each log, and return the survey of what is
    left. Durable on return.

    RocksDB recovers no hole within one log file, but continues from file to file and cannot detect
    that the end of a full file is missing. So if the disk kept the beginning of the next file and
    not the end of this one, RocksDB recovers a log with a hole and reports no error. Nothing is
    deleted from a log that was synced before its acknowledgements, nor from one whose hole lies
    below the floor: that is damage, and reading it raises.
    """
    if found.synced_each_batch:
        return found
    batch = WriteBatch(raw_mode=True)
    family = database.get_column_family_handle(ENTRY_FAMILY)
    torn = torn_logs(database, found, floor)
    for name, kept in torn.items():
        log_id = found.log_ids[name]
        reached = found.last_positions[log_id]
        batch.delete_range(entry_key(log_id, kept + 1), entry_key(log_id, reached + 1), family)
        _log.warning("torn_tail_dropped", log=name, kept=kept, dropped=reached - kept)
    if torn:
        database.write(batch)
        # a power cut before this sync leaves the hole, and the next open finds it again
        database.flush_wal(sync=True)
    return without_torn(found, torn)


def torn_logs(database: Rdict, found: Survey, floor: Floor) -> dict[str, int]:
    """Return, by name, the last position before the hole of each log that has a hole in its
    unsynced part.
    """
    if found.synced_each_batch:
        return {}
    kept = {name: chain_end(database, log_id, floor) for name, log_id in found.log_ids.items()}
    return {
        name: position
        for name, position in kept.items()
        if position < found.last_positions[found.log_ids[name]]
    }


def without_torn(found: Survey, torn: Mapping[str, int]) -> Survey:
    """Return a survey in which logs end at the positions that `torn_logs` returned."""
    ends = {found.log_ids[name]: position for name, position in torn.items()}
    return msgspec.structs.replace(found, last_positions={**found.last_positions, **ends})


def chain_end(database: Rdict, log_id: int, floor: Floor) -> int:
    """Return the end of the unbroken chain of entries that begins after the floor's last position
    of a log.
    """
    end = max(floor.positions.get(log_id, 0), first_kept(database, log_id) - 1)
    previous_crc32c = None
    iterator = database.get_column_family(ENTRY_FAMILY).iter()
    # Start after the floor: an invalid synced entry is damage, not a hole, and nothing is deleted
    # for it.
    iterator.seek(entry_key(log_id, end + 1))
    while (current := current_entry(iterator, log_id)) is not None:
        last_position, data = current
        try:
            entry = decode_rocks_entry(data, previous_crc32c)
        except Corrupt:
            break
        if entry.first_position > end + 1:
            break
        end = last_position
        previous_crc32c = entry.crc32c
        iterator.next()
    return end


LOOK_ALIKE_SUFFIX = ".look.tmp"
_LEFT_OUT = ("LOCK", "LOG", "rocksdict-config.json")
"""Every opening of a database writes these files, so the copy never shares them with the original.
"""
_CURRENT_BYTES_MAX = 4096


def manifest_of(database: Path) -> Path:
    """Return the path of a database's current manifest. Raises `OSError`, `Corrupt`."""
    return (
        database / read_regular(database / "CURRENT", bytes_max=_CURRENT_BYTES_MAX).decode().strip()
    )


def torn_manifest(database: Path) -> tuple[Path, int] | None:
    """Return the manifest and the byte at which its torn end begins, None unless it has a torn end
    with nothing whole after it.

    RocksDB accepts a manifest that ends in the middle of a record, but refuses one whose last
    record has its full length and lacks pages. It syncs a manifest before it removes the files that
    the manifest makes needless, so without the torn record the database is the state before that
    record. Were the record bit rot instead, files of that earlier state would be missing or the
    floor would be higher. So the database is first read without the record, and the record is cut
    off only after that was found sound.
    """
    with suppress(OSError, ValueError, Corrupt):  # CURRENT is missing or names no file
        manifest = manifest_of(database)
        if (end := torn_end(manifest)) is not None:
            return manifest, end
    return None


@contextmanager
def without_torn_end(database: Path, manifest: Path, end: int) -> Iterator[Path]:
    """Yield a temporary copy of a database for reading, whose manifest ends at byte `end`, before
    its torn end.

    The other files are hard links. The copy is removed afterwards; after a kill the next call
    removes it. Raises `OSError`, also on file systems without hard links.
    """
    look_alike = database.with_name(database.name + LOOK_ALIKE_SUFFIX)
    shutil.rmtree(look_alike, ignore_errors=True)
    look_alike.mkdir(DIRECTORY_MODE)
    try:
        for file in database.iterdir():
            if file != manifest and not file.name.startswith(_LEFT_OUT):
                (look_alike / file.name).hardlink_to(file)
        (look_alike / manifest.name).write_bytes(manifest.read_bytes()[:end])
        yield look_alike
    finally:
        shutil.rmtree(look_alike, ignore_errors=True)


def drop_torn_end(database: Path) -> None:
    """Cut the torn end, if there is one, off the manifest of a database that was found sound
    without it. Durable on return.
    """
    if torn := torn_manifest(database):
        _log.warning("torn_manifest_dropped", path=str(database))
        manifest, end = torn
        with manifest.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
        sync_directory(database)


# --- the framing of RocksDB's manifest and logs ---------------------------------------------------
# Files consist of blocks of 32 KiB; each block begins with a fragment. A fragment has a checksum, a
# length, a type and content; a record is one fragment or several. Layout: RocksDB's wiki, "Write
# Ahead Log File Format".

BLOCK_BYTES = 32 << 10
RECYCLED_TYPES = frozenset({5, 6, 7, 8, 11})
"""Types in recycled files: full, first, middle and last fragment, and the timestamp size."""

_HEADER = struct.Struct("<IHB")  # checksum, length, type
_SEQUENCE = struct.Struct("<Q")  # start of the content of a log file's first record
_NOTE_BYTES_MAX = 16 << 20
_JOURNAL_BYTES_MAX = 64 << 30
"""Limits of file sizes: `_NOTE_BYTES_MAX` for small files, which RocksDB reads whole;
`_JOURNAL_BYTES_MAX` for manifests and log files, which RocksDB replaces long before.
"""
_PADDING = 0
_WHOLE_RECORD = 1
_FIRST_FRAGMENT = 2
_MIDDLE_FRAGMENT = 3
# RocksDB stores checksums rotated and with this added, so that a checksum over checksums is not
# weak
_CRC_MASK = 0xA282EAD8


def check_framing(database: Path) -> None:
    """Raise `Corrupt`, naming file and byte, for damage that would hang RocksDB. Changes nothing.

    A flipped bit can turn a record's type into one that occurs only in recycled files. This store
    recycles no files. RocksDB 10 takes such a record for one of an older file, starts again, and
    never ends. RocksDB itself detects all other damage of a record.
    """
    for path in database.iterdir():
        is_journal = path.name.startswith("MANIFEST-") or path.name.endswith(".log")
        is_note = path.name.startswith("OPTIONS-") or path.name in {"CURRENT", "IDENTITY"}
        with suppress(FileNotFoundError):  # a running owner has removed it
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise not_regular(path)  # RocksDB would wait forever for a pipe
            bytes_max = _JOURNAL_BYTES_MAX if is_journal else _NOTE_BYTES_MAX
            # a sparse file of any size takes no space
            if (is_journal or is_note) and status.st_size > bytes_max:
                length = f"{status.st_size} bytes, more than the limit of {bytes_max}"
                raise Corrupt(f"{path} has {length} — restore it from a backup")
            if is_journal:
                with _mapped(path) as data:
                    at = first_recycled(data)
                if at is not None:
                    damage = f"damaged at byte {at}: a record type that is never used here"
                    raise Corrupt(f"{path} is {damage} — restore it from a backup")


def first_recycled(data: bytes | mmap.mmap) -> int | None:
    """Return the offset of the first record with a recycled file's type, None without one."""
    return next((at for at, _, kind in _fragments(data) if kind in RECYCLED_TYPES), None)


def torn_bytes(database: Path) -> int:
    """Return how many bytes of RocksDB's log files follow the first record that is not whole, over
    all files in order. Blocks.
    """
    torn = 0
    for path in sorted(database.glob("*.log"), key=lambda each: int(each.stem)):
        with _mapped(path) as data:
            whole = 0 if torn else whole_bytes(data)
            torn += len(data[whole:].rstrip(b"\0"))
    return torn


def whole_bytes(data: bytes | mmap.mmap) -> int:
    """Return the offset at which the unbroken run of whole records from the beginning ends."""
    whole = 0
    for at, following, kind in _fragments(data):
        if not _is_sound(data, at, following):
            break
        if kind not in (_FIRST_FRAGMENT, _MIDDLE_FRAGMENT):
            whole = following
    return whole


def _fragments(data: bytes | mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """Yield the offset of each fragment, the offset of the next one, and its type; continues after
    damage where lengths allow.
    """
    for block in range(0, len(data), BLOCK_BYTES):
        at = block
        end = min(block + BLOCK_BYTES, len(data))
        while at + _HEADER.size <= end:
            _, length, kind = _HEADER.unpack_from(data, at)
            following = at + _HEADER.size + length
            if kind == _PADDING or following > end:
                yield at, at, kind
                break  # the next fragment with a known offset begins the next block
            yield at, following, kind
            at = following


def _is_sound(data: bytes | mmap.mmap, at: int, following: int) -> bool:
    """Whether a fragment's checksum is right."""
    if following == at:
        return False
    checksum, _, _ = _HEADER.unpack_from(data, at)
    plain = crc32c(data[at + _HEADER.size - 1 : following])
    return bool(checksum == ((plain >> 15 | plain << 17) + _CRC_MASK) & 0xFFFFFFFF)


@contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Yield a file's content, empty if it is shorter than a fragment's header, as just after its
    creation.
    """
    with open_binary(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < _HEADER.size:
            yield b""
            return
        with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as data:
            yield data


def first_sequence(path: Path) -> int | None:
    """Return RocksDB's sequence number of the first change in one of its log files, None when the
    file is empty.
    """
    with _mapped(path) as data:
        if len(data) < _HEADER.size + _SEQUENCE.size or data[_HEADER.size - 1] == _PADDING:
            return None
        return int(_SEQUENCE.unpack_from(data, _HEADER.size)[0])


def torn_end(path: Path) -> int | None:
    """Return the offset at which the torn end of a file begins; None when the file is whole, or
    when whole records follow the damage.
    """
    with _mapped(path) as data:
        damaged = False
        for at, following, kind in _fragments(data):
            sound = _is_sound(data, at, following)
            if damaged and sound and kind in (_WHOLE_RECORD, _FIRST_FRAGMENT):
                return None
            damaged = damaged or not sound
        whole = whole_bytes(data)
        return whole if data[whole:].rstrip(b"\0") else None  # zeros are preallocated room
