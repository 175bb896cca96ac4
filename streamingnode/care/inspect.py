"""What a directory says about itself to somebody who does not own it: a node's files, its collections, a backup's record.

Files are read, nothing is opened or changed. A running node goes on meanwhile, so two answers may be of two moments. Blocks.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flusher.cuts import UNREADABLE, Lease, lease_files, read_leases
from flusher.directory import CutLog, NodeDirectory, lives
from flusher.manifest import arrow_schema, checked_document, collection_info, with_checksum
from wal.codec import decode_versioned
from wal.errors import AlreadyOwned, Corrupt, InvalidArgument, StorageFailed
from wal.files import LOCK_NAME, open_regular
from wal.rocks.floor import FLOOR_NAME, Floor, read_floor
from wal.rocks.layout import DATABASE_NAME

PARTS = ("log", "segments", "deletes", "cuts", "leases")
_FOLDERS = {"log": PARTS[:1], "cuts": PARTS[1:4], "backup": PARTS, "copy": PARTS}
"""What each part of a long work reads."""


# --- a node's files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """A node directory as its files tell it; `holder` is the process that has it open, 0 when that did not say who it is."""

    directory: Path
    holder: int | None
    floor: Floor
    cuts: CutLog
    leases: tuple[Lease, ...]
    disk_bytes: Mapping[str, int]


def check_node(directory: Path) -> Path:
    """Return `directory` if it holds a node. Raises `InvalidArgument`; a name mistyped must not make a new node."""
    if is_node(directory):
        return directory
    what = "is no node directory" if directory.is_dir() else "is a file" if directory.exists() else "does not exist"
    raise InvalidArgument(f"{directory} {what} — name the directory a node was opened with")


def is_node(directory: Path) -> bool:
    """Whether the directory holds a node."""
    return (directory / FLOOR_NAME).is_file() or (directory / DATABASE_NAME / "CURRENT").is_file()


def read_node_files(directory: Path) -> NodeFiles:
    """Return what the files in a node directory say.

    Raises `InvalidArgument` when it is none, `Corrupt` or `UnsupportedFormat` as its files are, `StorageFailed` when they
    cannot be read.
    """
    check_node(directory)
    try:
        floor = read_floor(directory)
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
        return NodeFiles(
            directory=directory,
            holder=holder(directory),
            floor=floor,
            cuts=CutLog(directory),
            leases=tuple(found for _, found in lease_files(NodeDirectory(directory)) if isinstance(found, Lease)),
            disk_bytes={part: _bytes_under(directory / part) for part in PARTS},
        )
    except OSError as error:
        raise StorageFailed(f"cannot read {directory}: {error.strerror} — make it readable for this user") from error


def part_bytes(directory: Path, part: str) -> int | None:
    """Return how much of a node a part of a long work will read, None when nobody knows beforehand."""
    if part not in _FOLDERS:
        return None
    return sum(_bytes_under(directory / folder) for folder in _FOLDERS[part])


def _bytes_under(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a running node removes files
                total += (Path(parent) / name).lstat().st_size
    return total


# --- who has it open --------------------------------------------------------------------------------------------------


def holder(directory: Path) -> int | None:
    """Return the process that has a node open, 0 when it did not say which one it is, None when nobody has.

    The question takes the lock for some microseconds, shared; an opener in just that moment is refused and may try again.
    """
    with suppress(FileNotFoundError):
        descriptor = open_regular(directory / LOCK_NAME)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).strip()
            return int(pid) if pid.isdigit() else 0
        finally:
            os.close(descriptor)
    return None


def check_free(directory: Path) -> None:
    """Return if nobody owns the node. Raises `AlreadyOwned`."""
    if (owner := holder(directory)) is not None:
        raise AlreadyOwned(str(directory), owner or None)


@contextmanager
def kept_closed(directory: Path) -> Iterator[None]:
    """Keep a node from being opened while the block reads it; changes nothing, not even the pid in its lock file.

    Raises `AlreadyOwned`.
    """
    check_free(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an owner has the directory locked as well
        except BlockingIOError:
            raise AlreadyOwned(str(directory), None) from None
        yield
    finally:
        os.close(descriptor)


# --- collections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSummary:
    """One collection: what it is and how many rows were ever inserted.

    `next_offsets` has the next row offset of each shard, so their sum counts inserted rows; `last_tick` is that of the
    newest row or delete, 0 when there is none or its cut is no longer kept.
    """

    id: int
    name: str
    primary_key: str
    columns: Mapping[str, str]
    partitions: tuple[str, ...]
    next_offsets: Mapping[str, int]
    last_tick: int

    @property
    def inserted(self) -> int:
        """Rows inserted since the collection was created."""
        return sum(self.next_offsets.values())


def summaries_at_newest(cuts: CutLog) -> dict[int, CollectionSummary]:
    """Return the living collections of the newest cut by id; none when no cut was made."""
    if not cuts.numbers:
        return {}
    newest = cuts.read(cuts.newest)
    offsets = {vchannel.name: vchannel.next_offset for vchannel in newest.manifest.vchannels}
    entries = {entry.collection_id: entry for entry in newest.manifest.collections if lives(entry, newest.tick)}
    ticks = _last_ticks(cuts, set(entries))
    return {
        number: CollectionSummary(
            id=number,
            name=entry.name,
            primary_key=entry.primary_key,
            columns={field.name: str(field.type) for field in arrow_schema(collection_info(entry))},
            partitions=tuple(partition.name for partition in entry.partitions if not partition.dropped_tick),
            next_offsets={name: offsets.get(name, 0) for name in entry.vchannels},
            last_tick=ticks.get(number, 0),
        )
        for number, entry in entries.items()
    }


def _last_ticks(cuts: CutLog, wanted: set[int]) -> dict[int, int]:
    """Return the newest tick of each wanted collection, looking backwards only until all are found."""
    found: dict[int, int] = {}
    for number in reversed(cuts.numbers):
        ticks: dict[int, int] = {}
        manifest = cuts.read(number).manifest
        for file in manifest.files:
            ticks[file.collection_id] = max(ticks.get(file.collection_id, 0), file.tick_max)
        found = ticks | found
        if wanted <= found.keys():
            break
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFiles:
    """The files of one collection: `name` is empty for one that was dropped, `held_by` says why they are still there."""

    id: int
    name: str
    files: int
    bytes: int
    held_by: tuple[str, ...]


def held_files(cuts: CutLog) -> list[HeldFiles]:
    """Return what holds the files of each collection, by id."""
    if not cuts.numbers:
        return []
    newest = cuts.read(cuts.newest).manifest
    living = {entry.collection_id: entry.name for entry in newest.collections if lives(entry, newest.tick)}
    leases = read_leases(cuts.directory, node_id=newest.node_id)
    sizes: dict[int, list[int]] = {}
    for path in (path for top in ("segments", "deletes") for path in cuts.directory.files(top)):
        name = path.split("/")[1]
        if name.isdecimal() and path.endswith(".parquet"):
            with suppress(FileNotFoundError):  # a running node removes files
                sizes.setdefault(int(name), []).append(cuts.directory.size_bytes(path))
    return [
        HeldFiles(
            id=number,
            name=living.get(number, ""),
            files=len(found),
            bytes=sum(found),
            held_by=_held_by(number, newest.number, living, leases),
        )
        for number, found in sorted(sizes.items())
    ]


def _held_by(collection_id: int, newest: int, living: Mapping[int, str], leases: list[Lease]) -> tuple[str, ...]:
    """Return who holds a collection's files. Cuts go in order, so a live one's wait for every table that lags."""
    readable = [lease for lease in leases if lease.collection_id != UNREADABLE]
    holders = [f"{lease.table}, which is no lease" for lease in leases if lease.collection_id == UNREADABLE]
    if collection_id not in living:
        holders += [f"table {lease.table}" for lease in readable if lease.collection_id == collection_id]
        return tuple(holders) or ("minimum retention",)
    without_table = living.keys() - {lease.collection_id for lease in readable}
    holders += ["no table has its rows"] if collection_id in without_table else []
    holders += [
        f"collection {name}, which has no table"
        for number, name in living.items()
        if number in without_table and number != collection_id
    ]
    holders += [f"table {lease.table} at cut {lease.cut}" for lease in readable if lease.cut < newest]
    return tuple(holders) or ("minimum retention",)


# --- a backup's record ------------------------------------------------------------------------------------------------
#
# Two lines as in a cut manifest: a JSON document and its CRC32C. It is written last, so a backup without it is not finished.
# Its presence keeps a node from being opened in the backup, which would change it. `docs/format.md`, section "Backup".

RECORD_FORMAT = 1


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file; `path` is relative to the backup."""

    path: str
    bytes: int
    crc32c: int


class BackupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One backup: everything that node `node_id` acknowledged up to `tick`; `cut` is the newest cut in it."""

    format: int
    node_id: str
    term: int
    tick: int
    cut: int
    made_ms: int
    files: tuple[CopiedFile, ...]


def encode_record(record: BackupRecord) -> bytes:
    """Return the record's file content."""
    return with_checksum(msgspec.json.encode(record))


def decode_record(content: bytes, *, name: str) -> BackupRecord:
    """Return the record in `content`. Raises `Corrupt`, or `UnsupportedFormat` for one of a newer release."""
    document = checked_document(content, name, step="restore from another backup")
    record = decode_versioned(document, BackupRecord, RECORD_FORMAT, name, decode=msgspec.json.decode)
    for file in record.files:
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise Corrupt(f"{name} names {file.path!r}, which is outside of it — restore from another backup")
    return record
