"""Backup of a node, closed or running: a copy that is read back before it gets its name. Blocks.

In: a database that no longer changes (linked by the running node, or simply closed), and the node directory around it. Out:
a directory with the database, the cuts its checkpoint knows and all their files, leases, a floor file, and the record of it
all. The database comes first and says which cut is its newest; cuts up to that one never change, and none goes meanwhile.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from anyio import from_thread

from flusher.cut_log import cut_numbers, living, manifest_path, read_cut
from flusher.directory import NodeDirectory
from flusher.retention import LEASE_BYTES_MAX, LEASES
from interceptors.errors import AlreadyExists
from streamingnode.care.database import read_node_records
from streamingnode.care.files import read_through
from streamingnode.care.findings import OnStep, told_nobody
from streamingnode.care.inspect import RECORD_FORMAT, BackupRecord, CopiedFile, check_node, encode_record
from streamingnode.care.verify import verify_unlocked
from wal.codec import crc32c
from wal.errors import Corrupt, InvalidArgument, StorageFailed
from wal.files import (
    DIRECTORY_MODE,
    DirectoryLock,
    create_file,
    disk_errors_typed,
    make_directory,
    open_binary,
    place_beneath,
    read_regular,
    sync_directory,
    write_file,
)
from wal.rocks.floor import FLOOR_NAME, Floor, read_floor, write_floor
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME

UNFINISHED = ".unfinished"
LINKS = "backup.tmp"
"""In the node directory while a backup of the running node is made: hard links need the same disk."""

_NOT_COPIED = ("LOCK", "LOG")
"""RocksDB's lock and its own notes: no part of the data."""


class BackupResult(msgspec.Struct, frozen=True, kw_only=True):
    """A backup that was verified: everything acknowledged up to `tick` is in it; `cut` is the newest cut in it."""

    path: str
    node_id: str
    tick: int
    cut: int
    files: int
    bytes: int


class Target:
    """A directory to be made outside of `source`, as a whole or not at all: it does not exist yet, or is empty.

    Work is done in `<name>.unfinished` beside it and renamed at the end. What a crash leaves there is named and left alone.
    Raises `InvalidArgument` when it is inside, `AlreadyExists`, `StorageFailed` when it cannot be made.
    """

    def __init__(self, path: Path, source: Path) -> None:
        try:
            self.path = path.absolute()
            if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
                raise AlreadyExists(f"{path} is there and not empty — name a new directory")
            if Path(os.path.realpath(self.path)).is_relative_to(source.resolve()):
                raise InvalidArgument(f"{path} is inside {source} — name a directory outside it")
            self.building = self.path.with_name(self.path.name + UNFINISHED)
            self.building.mkdir(DIRECTORY_MODE, parents=True)
        except FileExistsError:
            left = f"{self.building} is left of a run that did not end"
            raise AlreadyExists(f"{left} — remove it, then try again") from None
        except OSError as error:
            raise StorageFailed(f"cannot make {path}: {error.strerror} — choose a writable place") from error

    def publish(self) -> None:
        """Give what was built its name; durable on return."""
        for parent, _, _ in os.walk(self.building):
            sync_directory(Path(parent))
        self.building.rename(self.path)  # over an empty directory too
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove what was built; idempotent, and nothing once it is published."""
        shutil.rmtree(self.building, ignore_errors=True)


# --- backup -----------------------------------------------------------------------------------------------------------


def backup_directory(directory: Path, target: Path, *, on_step: OnStep = told_nobody) -> BackupResult:
    """Copy a node that no process has open into a new directory, and verify the copy.

    Raises `InvalidArgument` when it is no node or the target lies in it, `AlreadyOwned` while it runs, `AlreadyExists` for a
    target in use, `Corrupt` when the node is not sound, `StorageFailed`. Nothing is at `target` then.
    """
    with disk_errors_typed(directory):
        is_backup = (check_node(directory) / BACKUP_RECORD_NAME).exists()
    if is_backup:
        raise InvalidArgument(f"{directory} is a backup already — copy it with any tool")
    lock = DirectoryLock(directory)
    try:
        floor = read_floor(directory)
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — run: streamingnode verify {directory}")
        place, made_ms = Target(target, directory), time.time_ns() // 1_000_000
        try:
            # The cut after the checkpoint's is taken too: of a node nobody owns it is whole.
            return _make_backup(directory, directory, floor, place, on_step, cuts_ahead=1, made_ms=made_ms)
        finally:
            place.discard()
    finally:
        lock.release()


def backup_running(directory: Path, target: Target, link: Callable[[Path], object], *, made_ms: int) -> BackupResult:
    """Copy the node that runs in `directory`, from a worker thread, which ends when its task is cancelled.

    The database is linked beside the node's own (`link`), in one step that costs no copying; then its bytes are copied at
    leisure. No cut may go meanwhile. The caller discards the target. Raises `Corrupt`, `StorageFailed`.
    """
    links = directory / LINKS
    with disk_errors_typed(directory):
        try:
            shutil.rmtree(links, ignore_errors=True)  # a crash left it
            make_directory(links)
            # Floor and leases as they are before the database is linked: what they say is in the copy for certain.
            make_directory(links / LEASES)
            for lease in sorted((directory / LEASES).glob("*.json")):
                with suppress(FileNotFoundError):  # its table was given up meanwhile
                    write_file(links / LEASES / lease.name, read_regular(lease, bytes_max=LEASE_BYTES_MAX))
            floor = read_floor(directory)
            if floor is None:
                raise Corrupt(f"{directory} has no floor file any more — close the node and run: streamingnode verify")
            link(links / DATABASE_NAME)
            return _make_backup(directory, links, floor, target, _check_cancelled, cuts_ahead=0, made_ms=made_ms)
        finally:
            shutil.rmtree(links, ignore_errors=True)


def _check_cancelled(_part: str, _done: int) -> None:
    from_thread.check_cancelled()


def _make_backup(
    directory: Path, links: Path, floor: Floor, target: Target, on_step: OnStep, *, cuts_ahead: int, made_ms: int
) -> BackupResult:
    """Copy, verify and publish, and return what was made; `links` has the database, unchanging, and the leases."""
    building, on_bytes = target.building, partial(on_step, "copy")
    with disk_errors_typed(building):
        found, records = read_node_records(links)
        checkpoints = records.checkpoints.values()
        newest = max((checkpoint.cut_number for checkpoint in checkpoints), default=0) + cuts_ahead
        files = [
            copy_file(path, building, f"{DATABASE_NAME}/{path.name}", on_bytes)
            for path in sorted((links / DATABASE_NAME).iterdir())
            if path.is_file() and not path.name.startswith(_NOT_COPIED)
        ]
        files += _copy_cuts(directory, building, newest, on_bytes)
        files += [
            copy_file(path, building, f"{LEASES}/{path.name}", on_bytes, bytes_max=LEASE_BYTES_MAX)
            for path in sorted((links / LEASES).glob("*.json"))
        ]
        floor = msgspec.structs.replace(
            floor,
            generation=0,
            term=max(floor.term, found.term),
            meta_version=found.meta_version,
            positions=dict(found.last_positions),
        )
        write_floor(building, floor)
        content = read_regular(building / FLOOR_NAME)
        files.append(CopiedFile(path=FLOOR_NAME, bytes=len(content), crc32c=crc32c(content)))
        check_copy(building, on_step)
        record = BackupRecord(
            format=RECORD_FORMAT,
            node_id=found.node_id,
            term=floor.term,
            tick=max([floor.tick, *(checkpoint.tick for checkpoint in checkpoints)]),
            cut=max(cut_numbers(building), default=0),
            made_ms=made_ms,
            files=tuple(files),
        )
        write_file(building / BACKUP_RECORD_NAME, encode_record(record), exclusive=True)
        target.publish()
    return BackupResult(
        path=str(target.path),
        node_id=record.node_id,
        tick=record.tick,
        cut=record.cut,
        files=len(files),
        bytes=sum(file.bytes for file in files),
    )


def _copy_cuts(directory: Path, building: Path, newest: int, on_bytes: Callable[[int], None]) -> list[CopiedFile]:
    """Copy the cuts up to `newest` with their files.

    Those of collections that do not live at the newest cut may be gone; a table may wait for those that are not.
    """
    node, copied = NodeDirectory(directory), list[CopiedFile]()
    numbers = [number for number in cut_numbers(directory) if number <= newest]
    here = living(read_cut(node, numbers[-1]).manifest) if numbers else frozenset()
    for number in numbers:
        manifest = read_cut(node, number).manifest
        copied.append(copy_file(directory / manifest_path(number), building, manifest_path(number), on_bytes))
        for file in (*manifest.segments, *manifest.deletes):
            path = place_beneath(directory, file.path)
            if path.exists():
                copied.append(copy_file(path, building, file.path, on_bytes, bytes_max=file.bytes))
            elif file.collection_id in here:
                missing = f"cut {number} names {path}, which is not there"
                raise Corrupt(f"{missing} — verify the original: streamingnode verify")
    return copied


def copy_file(
    source: Path, directory: Path, path: str, on_bytes: Callable[[int], None], *, bytes_max: int | None = None
) -> CopiedFile:
    """Copy `source` to `directory / path` and return what was read; durable when it ends, but for the names.

    Raises `OSError`, and `Corrupt` for a file that is longer than `bytes_max` before any of it is read: it may be a terabyte
    of holes.
    """
    target = directory / path
    for parent in reversed(target.relative_to(directory).parents):
        make_directory(directory / parent)
    with open_binary(source) as reading, create_file(target, exclusive=True) as writing:
        size_bytes = os.fstat(reading.fileno()).st_size
        if bytes_max is not None and size_bytes > bytes_max:
            raise Corrupt(
                f"{source} has {size_bytes} bytes, it was written with {bytes_max} — restore it from a backup"
            )

        def take(chunk: bytes) -> None:
            writing.write(chunk)
            on_bytes(len(chunk))

        length, checksum = read_through(reading, take)
        writing.flush()
        os.fsync(writing.fileno())
        if hasattr(os, "posix_fadvise"):  # verifying is to read what the disk has
            os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return CopiedFile(path=path, bytes=length, crc32c=checksum)


def check_copy(building: Path, on_step: OnStep) -> None:
    """Read everything back. Raises `Corrupt` naming the first thing that is not sound."""
    damage = verify_unlocked(building, on_step=lambda _part, done: on_step("verify", done)).damages
    if damage:
        others = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        found = f"{damage[0].place}: {damage[0].detail}{others}"
        raise Corrupt(f"the copy is not sound, so it was given up: {found} — verify the original")
