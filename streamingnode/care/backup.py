"""Backup of a node, closed or running, and restore. Copies are read back before they get their
final name. Blocks.

In: a database that no longer changes (linked by the running node, or closed), and the node
directory around it. Out: a directory with the database, the cuts up to its checkpoint with all
their files, leases, a floor file, and a record of all files. The database is fixed first and
determines the newest cut. Cuts up to that one never change, and none is deleted meanwhile.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import msgspec
from anyio import from_thread

from flusher.cuts import LEASE_BYTES_MAX, LEASES, UNREADABLE, read_leases, write_lease
from flusher.directory import (
    CUTS,
    TEMPORARY_SUFFIX,
    CutLog,
    NodeDirectory,
    cut_numbers,
    living,
    manifest_path,
    read_cut,
    read_through,
)
from flusher.flusher import Flusher
from flusher.manifest import DataFile, decode_manifest, manifest_crc32c, with_checksum
from streamingnode.care.findings import OnStep, Report, no_progress
from streamingnode.care.inspect import (
    BackupRecord,
    CopiedFile,
    check_node,
    floor_of,
    kept_closed,
    read_record,
)
from streamingnode.care.records import NodeRecords, read_node_records
from streamingnode.care.verify import check_cuts, check_leases, check_store, verify_unlocked
from streamingnode.channel import Channel, flush
from wal.codec import crc32c
from wal.errors import (
    AlreadyExists,
    Corrupt,
    InvalidArgument,
    StorageFailed,
    StreamingNodeError,
)
from wal.files import (
    DIRECTORY_MODE,
    READ_BYTES_MAX,
    create_file,
    disk_errors_typed,
    make_directory,
    open_binary,
    place_beneath,
    read_regular,
    sync_directory,
    write_file,
)
from wal.rocks.floor import BACKUP_RECORD_NAME, FLOOR_NAME, Floor, write_floor
from wal.rocks.layout import DATABASE_NAME
from wal.runtime import in_thread, outlast, unix_ms

T = TypeVar("T")

UNFINISHED = ".unfinished"
RESTORE_TERM_STEP = 1 << 16
"""The term increases by one for each owner. A restored node starts at the next multiple of this, so
that owners of the two histories never have the same term, whatever the original did since. Terms
stay below 2^31 for 32,767 restores.
"""

_OTHER = "restore from another backup"
_NOT_COPIED = ("LOCK", "LOG")
"""RocksDB's lock and its text log, which are not data."""


@contextmanager
def new_directory(path: Path, source: Path | None) -> Iterator[Path]:
    """Yield a directory to build in, which becomes `path` at the end of the block, durably and as a
    whole or not at all.

    `path` must not exist or be empty. The directory to build in is `<name>.unfinished` beside it;
    one left by a crash is named in an error and not touched. Raises `InvalidArgument` when `path`
    is inside `source` or a mount point, `AlreadyExists`, `StorageFailed` when it cannot be created.
    """
    given = path
    try:
        # resolve links: a directory cannot be renamed over a link
        path = Path(os.path.realpath(path))
        if path.is_mount():
            raise InvalidArgument(f"{given} is a mount point — name a new directory on it")
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise AlreadyExists(f"{given} exists and is not empty — name a new directory")
        if source is not None and path.is_relative_to(source.resolve()):
            raise InvalidArgument(f"{given} is inside {source} — name a directory outside it")
        building = path.with_name(path.name + UNFINISHED)
        building.mkdir(DIRECTORY_MODE, parents=True)
    except FileExistsError:
        raise AlreadyExists(
            f"{path}{UNFINISHED} is left over from an interrupted run — remove it, then try again"
        ) from None
    except OSError as error:
        raise StorageFailed(
            f"cannot create {given}: {error.strerror} — choose a writable place"
        ) from error
    try:
        yield building
        for parent, _, _ in os.walk(building):
            sync_directory(Path(parent))
        building.rename(path)  # over an empty directory too
        sync_directory(path.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def backup_directory(
    directory: Path, target: Path, *, on_step: OnStep = no_progress
) -> BackupRecord:
    """Copy a node that no process has open into a new directory, and verify the copy.

    Raises `InvalidArgument` when `directory` is not a node or contains the target, `AlreadyOwned`
    while the node runs, `AlreadyExists` for a target in use, `Corrupt` when the node is damaged,
    `StorageFailed`. After an error nothing is at `target`.
    """
    with disk_errors_typed(directory), kept_closed(check_node(directory)):
        if (directory / BACKUP_RECORD_NAME).exists():
            raise InvalidArgument(f"{directory} is a backup already — copy it with any tool")
        with new_directory(target, directory) as building:
            # Include the cut after the checkpoint's too: in a node without an owner it is complete.
            return make_backup(
                directory, directory, floor_of(directory), building, on_step, cuts_ahead=1
            )


def make_backup(
    directory: Path, links: Path, floor: Floor, building: Path, on_step: OnStep, *, cuts_ahead: int
) -> BackupRecord:
    """Copy a node to `building`, verify the copy and return its record. `links` holds the database,
    which does not change, and the leases.

    No cut may be deleted meanwhile. Raises `Corrupt`, `StorageFailed`.
    """
    on_bytes = partial(on_step, "copy")
    with disk_errors_typed(building):
        found, records = read_node_records(links)
        contents = _contents(directory, links, records.checkpoint.cut_number + cuts_ahead)
        files = [
            _copy_file(source, building, path, bytes_max, on_bytes)
            for source, path, bytes_max in contents
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
        _check_copy(building, on_step)
        record = BackupRecord(
            node_id=found.node_id,
            term=floor.term,
            tick=max(floor.tick, records.checkpoint.tick),
            cut=max(cut_numbers(building), default=0),
            made_ms=unix_ms(),
            files=tuple(files),
        )
        write_file(
            building / BACKUP_RECORD_NAME,
            with_checksum(msgspec.json.encode(record)),
            exclusive=True,
        )
    return record


def _contents(directory: Path, links: Path, newest: int) -> Iterator[tuple[Path, str, int | None]]:
    """Yield the files of a backup with cuts up to `newest`, except the floor file: source, path in
    the backup, and maximum size.

    Files of collections that are dropped at the newest cut may be missing; those that exist are
    included, as a table may still need them.
    """
    for path in sorted((links / DATABASE_NAME).iterdir()):
        if path.is_file() and not path.name.startswith(_NOT_COPIED):
            yield path, f"{DATABASE_NAME}/{path.name}", None
    node = NodeDirectory(directory)
    numbers = [number for number in cut_numbers(directory) if number <= newest]
    living_ids = living(read_cut(node, numbers[-1]).manifest) if numbers else frozenset()
    for number in numbers:
        manifest = read_cut(node, number).manifest
        yield directory / manifest_path(number), manifest_path(number), None
        for file in manifest.files:
            path = place_beneath(directory, file.path)
            if path.exists():
                yield path, file.path, file.bytes
            elif file.collection_id in living_ids:
                raise Corrupt(
                    f"cut {number} names {path}, which is not there — run: streamingnode verify "
                    f"{directory}"
                )
    for path in sorted((links / LEASES).glob("*.json")):
        yield path, f"{LEASES}/{path.name}", LEASE_BYTES_MAX


def _copy_file(
    source: Path, directory: Path, path: str, bytes_max: int | None, on_bytes: Callable[[int], None]
) -> CopiedFile:
    """Copy `source` to `directory / path` and return its size and checksum. The content is durable
    on return, the name is not.

    Raises `OSError`, and `Corrupt` for a file that is longer than `bytes_max`, before reading it:
    it may be sparse and huge.
    """
    target = directory / path
    for parent in reversed(target.relative_to(directory).parents):
        make_directory(directory / parent)
    with open_binary(source) as reading, create_file(target, exclusive=True) as writing:
        size_bytes = os.fstat(reading.fileno()).st_size
        if bytes_max is not None and size_bytes > bytes_max:
            was = f"it was written with {bytes_max}"
            raise Corrupt(f"{source} has {size_bytes} bytes, {was} — restore it from a backup")
        length, checksum = read_through(reading, lambda chunk: on_bytes(writing.write(chunk)))
        writing.flush()
        os.fsync(writing.fileno())
        if hasattr(os, "posix_fadvise"):  # so that verifying reads from the disk
            os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return CopiedFile(path=path, bytes=length, crc32c=checksum)


def _check_copy(building: Path, on_step: OnStep) -> None:
    """Verify the copy by reading all of it. Raises `Corrupt` naming the first damage."""
    damages = verify_unlocked(building, on_step=lambda _part, done: on_step("verify", done)).damages
    if damages:
        found = f"{damages[0].place}: {damages[0].detail}"
        raise Corrupt(f"the copy is damaged and was deleted: {found} — verify the original")


def restore_directory(backup: Path, target: Path, *, on_step: OnStep = no_progress) -> BackupRecord:
    """Create a node in a new directory from a backup, and verify it. Its next owner gets a term
    that no other owner can have.

    Raises `InvalidArgument` when `backup` is not a backup or contains the target, `AlreadyExists`
    for a target that is not empty, `Corrupt` naming a file that differs from the backup's record,
    `StorageFailed`. After an error nothing is at `target`.
    """
    with disk_errors_typed(backup):
        record = read_record(backup)
    with disk_errors_typed(target), new_directory(target, backup) as building:
        for file in record.files:
            source = backup / file.path
            on_bytes = partial(on_step, "copy")
            try:
                copied = _copy_file(source, building, file.path, file.bytes, on_bytes)
            except FileNotFoundError:
                raise Corrupt(f"{backup} lacks {file.path} — {_OTHER}") from None
            if copied != file:
                raise Corrupt(f"{source} is not what the backup had — {_OTHER}")
        # Tables may be restored to an older state too: until each reports again which cuts it has
        # taken, no cut of the backup is deleted.
        before = min(cut_numbers(NodeDirectory(building)), default=1) - 1
        for lease in read_leases(NodeDirectory(building), node_id=record.node_id):
            if lease.collection_id != UNREADABLE:
                write_lease(
                    building, msgspec.structs.replace(lease, cut=min(before, lease.cut), tick=0)
                )
        floor = floor_of(building)
        term = (floor.term // RESTORE_TERM_STEP + 1) * RESTORE_TERM_STEP
        write_floor(
            building, msgspec.structs.replace(floor, term=term, tick=max(floor.tick, record.tick))
        )
        _check_copy(building, on_step)
    return record


def restore_file(backup: Path, directory: Path, path: str) -> CopiedFile:
    """Restore one file of a node from a backup; `path` is relative to the node directory, as in the
    findings of `verify`.

    A running node continues meanwhile. Only a file that the node can verify is restored: a segment
    or delete file by the checksum in its manifest, a manifest by the next manifest or by the
    checkpoint. Raises `InvalidArgument` when there is no such backup, node or file of a kept cut,
    `Corrupt` when the node cannot verify the file or the backup's file differs, `StorageFailed`.
    After an error nothing is changed.
    """
    with disk_errors_typed(directory):
        record = read_record(backup)
        if (check_node(directory) / BACKUP_RECORD_NAME).exists():
            raise InvalidArgument(
                f"{directory} is a backup and must not be changed — name a node's directory"
            )
        # This is safe beside a running or starting owner: it opens a cut's file only to read it,
        # and never writes one again.
        number, content = _vouched_for(directory, backup, record.node_id, path)
        for_group = (directory / CUTS).is_dir() and bool((directory / CUTS).stat().st_mode & 0o040)
        node = NodeDirectory(directory, for_group=for_group)
        temporary = f"{path}.{uuid4().hex}{TEMPORARY_SUFFIX}"
        try:
            # a temporary name unique to this restore; after a crash `verify` reports it
            with node.create(temporary) as writing:
                writing.write(content)
                node.sync(writing)
            node.rename(temporary, path)
        except BaseException:
            with suppress(OSError, StreamingNodeError):
                node.remove(temporary)
            raise
        node.sync_parents([path])
        # The owner records that a cut may be deleted before it removes the first file. If that
        # happened meanwhile, the owner may have missed the restored file, and nothing needs it.
        if read_node_records(directory)[1].first_kept > number:
            node.remove(path)
            raise InvalidArgument(
                f"retention deleted cut {number} meanwhile — nothing needs {path} any more"
            )
    return CopiedFile(path=path, bytes=len(content), crc32c=crc32c(content))


def _vouched_for(
    directory: Path, backup: Path, backup_node_id: str, path: str
) -> tuple[int, bytes]:
    """Return the number of the cut that has a file, and the file's content in the backup, verified
    to be what the node wrote.
    """
    found, records = read_node_records(directory)
    if found.node_id != backup_node_id:
        raise InvalidArgument(
            f"the backup is of node {backup_node_id}, {directory} of {found.node_id} — {_OTHER}"
        )
    checkpoint = records.checkpoint
    cuts = CutLog(NodeDirectory(directory), node_id=found.node_id)
    cuts.anchor(checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick)
    manifests = {
        manifest_path(number): number
        for number in range(records.first_kept, checkpoint.cut_number + 1)
    }
    named: Iterator[tuple[int, DataFile | None]] = (
        (number, file)
        for number in reversed(cut_numbers(directory))
        for file in cuts.read(number).manifest.files
        if file.path == path
    )
    number, file = (manifests[path], None) if path in manifests else next(named, (0, None))
    if not number:
        raise InvalidArgument(
            f"no cut of {directory} names {path!r} — name a file as `streamingnode verify` does"
        )
    try:
        content = read_regular(
            place_beneath(backup, path), bytes_max=file.bytes if file else READ_BYTES_MAX
        )
    except FileNotFoundError:
        raise InvalidArgument(f"the backup does not have {path} — {_OTHER}") from None
    if file is None:
        decode_manifest(content, name=str(backup / path))
        is_same = manifest_crc32c(content) == cuts.mark_of(number).crc32c
    else:
        is_same = (len(content), crc32c(content)) == (file.bytes, file.crc32c)
    if not is_same:
        raise Corrupt(
            f"{backup / path} is not the file that this node wrote for cut {number} — {_OTHER}"
        )
    return number, content


# --- of a running node ----------------------------------------------------------------------------
# Files are read in threads, the log on the event loop. Files that retention deletes meanwhile do
# not count as missing.

LINKS = "backup.tmp"
"""Directory of links in the node directory during a backup of the running node: hard links need the
same disk.
"""


class Upkeep:
    """Verification and backup of the running node at `path`. Raises `InvalidArgument` for a node in
    memory, whose path is None.
    """

    def __init__(self, path: Path | None, channel: Channel, flusher: Flusher) -> None:
        store = channel.store
        if path is None or store.link_copy is None:
            raise InvalidArgument(
                "a node in memory cannot be verified or backed up — open one in a directory"
            )
        self._path = path
        self._store = store
        self._link_copy = store.link_copy
        self._topics = None if store.topic_store is None else store.topic_store.state
        self._channel = channel
        self._flusher = flusher
        self._backing_up = asyncio.Lock()

    async def verify(self) -> Report:
        """Check everything in the node, as fast as the disk allows; see `Node.verify`.

        It skips the floor file, which is written all the time, and files that no manifest names
        yet.
        """
        report = Report()
        # In this order every cut of the checkpoint is listed. `first_kept`, read later, rises
        # before a cut is deleted.
        checkpoint = self._flusher.checkpoint
        with disk_errors_typed(self._path):
            numbers = await in_thread(cut_numbers, self._path)
            records = await check_store(self._store, self._topics, report)
            if records is not None:
                records.checkpoint = checkpoint
                records.last_tick = None  # a cut may have been published since
            report.on_step = _check_cancelled
            await _in_own_task(in_thread(self._check_files, numbers, records, report))
        return report

    def _check_files(self, numbers: list[int], records: NodeRecords | None, report: Report) -> None:
        check_cuts(self._path, numbers, self._store.node_id, records, report)
        check_leases(self._path, self._store.node_id, report)

    async def back_up(self, path: Path) -> BackupRecord:
        """Make a verified backup, one at a time; see `Node.backup`."""
        made: list[BackupRecord] = []

        async def run() -> None:
            async with self._backing_up, self._flusher.retention.hold_cuts():
                await flush(self._channel, self._flusher)
                await self._back_up(path, made)

        try:
            with disk_errors_typed(self._path):
                await _in_own_task(run())
        except asyncio.CancelledError:
            # cancelled too late: delete the backup, which the caller does not expect at `path`
            if made:
                await outlast(in_thread(shutil.rmtree, path))
            raise
        return made[0]

    async def _back_up(self, path: Path, made: list[BackupRecord]) -> None:
        """Link the database in one step, without copying; then copy the bytes from the links.

        The record goes into `made` before anything else is awaited, where a cancellation would lose
        it.
        """
        links = self._path / LINKS
        try:
            floor = await in_thread(self._make_links, links)
            await self._link_copy(links / DATABASE_NAME)
            made.append(await in_thread(self._copy, links, floor, path))
        finally:
            await outlast(in_thread(partial(shutil.rmtree, links, ignore_errors=True)))

    def _make_links(self, links: Path) -> Floor:
        """Create the directory of links with the leases, and return the floor. The database is
        linked afterwards, so it contains all that leases and floor refer to.
        """
        shutil.rmtree(links, ignore_errors=True)  # left by a crash
        make_directory(links)
        make_directory(links / LEASES)
        for lease in sorted((self._path / LEASES).glob("*.json")):
            with suppress(FileNotFoundError):  # the lease was removed meanwhile
                content = read_regular(lease, bytes_max=LEASE_BYTES_MAX)
                write_file(links / LEASES / lease.name, content)
        return floor_of(self._path)

    def _copy(self, links: Path, floor: Floor, path: Path) -> BackupRecord:
        with new_directory(path, self._path) as building:
            return make_backup(self._path, links, floor, building, _check_cancelled, cuts_ahead=0)


def _check_cancelled(_part: str, _bytes: int) -> None:
    from_thread.check_cancelled()


async def _in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` and return its result. A cancellation of the caller cancels it too, and waits for
    its threads.
    """
    scope = anyio.CancelScope()
    result = list[T]()

    async def run() -> None:  # runs in its own task, which only its scope can cancel
        with scope:
            result.append(await work)

    await outlast(run(), on_cancel=scope.cancel)
    return result[0]
