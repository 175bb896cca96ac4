"""A node, or one file of it, out of a backup: checked on the way, and verified or vouched for by the node. Blocks.

A restored node keeps its id, so that it goes on with its tables where they are not ahead of it. Its term jumps: whatever the
original did after the backup, no owner of one history can be taken for an owner of the other.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from flusher.checkpoint import NO_CHECKPOINT
from flusher.cut_log import CUTS, CutLog, cut_numbers
from flusher.cuts import FIRST_CUT
from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import DataFile, decode_manifest, manifest_crc32c
from streamingnode.care.backup import Target, check_copy, copy_file
from streamingnode.care.database import PCHANNEL, read_node_records
from streamingnode.care.files import read_through
from streamingnode.care.findings import OnStep, told_nobody
from streamingnode.care.inspect import BackupRecord, CopiedFile, check_node, decode_record
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError
from wal.files import DirectoryLock, disk_errors_typed, open_binary, place_beneath, read_regular
from wal.rocks.floor import read_floor, write_floor
from wal.rocks.opening import BACKUP_RECORD_NAME

RESTORE_TERM_STEP = 1 << 16
"""Terms are counted up once for each owner; a restored node starts at the next multiple of this, which no owner before it
came near. Terms stay below 2^31 for 32,767 restores of restores."""

_MANIFEST = re.compile(rf"{CUTS}/(\d{{16}})\.json")
_OTHER = "restore from another backup"


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node made from a backup: it holds what was acknowledged up to `tick`, and its next owner has a term above `term`."""

    path: str
    node_id: str
    term: int
    tick: int
    cut: int
    files: int
    bytes: int


class RestoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is as the node wrote it again; `cut` is the one that it belongs to."""

    path: str
    cut: int
    bytes: int


def read_record(backup: Path) -> BackupRecord:
    """Return what a backup says about itself. Raises `InvalidArgument` for a directory that is none, `Corrupt`."""
    path = backup / BACKUP_RECORD_NAME
    try:
        return decode_record(read_regular(path), name=str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidArgument(f"{backup} is no finished backup — name a directory that `backup` made") from None


def restore_directory(backup: Path, target: Path, *, on_step: OnStep = told_nobody) -> RestoreResult:
    """Make a node in a new directory from a backup, and verify it.

    Raises `InvalidArgument` when it is no backup or the target lies in it, `AlreadyExists` for a target that is not empty,
    `Corrupt` naming what is not as the backup says, `StorageFailed`. Nothing is at `target` then.
    """
    with disk_errors_typed(backup):
        record = read_record(backup)
    place = Target(target, backup)
    building = place.building
    try:
        with disk_errors_typed(building):
            for file in record.files:
                _copy_back(backup, building, file, partial(on_step, "copy"))
            floor = read_floor(building)
            if floor is None or floor.node_id != record.node_id:
                raise Corrupt(f"{backup} has no floor file of node {record.node_id} — {_OTHER}")
            term = (floor.term // RESTORE_TERM_STEP + 1) * RESTORE_TERM_STEP
            write_floor(building, msgspec.structs.replace(floor, term=term, tick=max(floor.tick, record.tick)))
            check_copy(building, on_step)
            place.publish()
    finally:
        place.discard()
    return RestoreResult(
        path=str(place.path),
        node_id=record.node_id,
        term=term,
        tick=record.tick,
        cut=record.cut,
        files=len(record.files),
        bytes=sum(file.bytes for file in record.files),
    )


def _copy_back(backup: Path, building: Path, file: CopiedFile, on_bytes: Callable[[int], None]) -> None:
    source = backup / file.path
    try:
        copied = copy_file(source, building, file.path, on_bytes, bytes_max=file.bytes)
    except FileNotFoundError:
        raise Corrupt(f"{backup} lacks {file.path} — {_OTHER}") from None
    if copied.bytes != file.bytes:
        raise Corrupt(f"{source} has {copied.bytes} bytes, the backup had {file.bytes} — {_OTHER}")
    if copied.crc32c != file.crc32c:
        raise Corrupt(f"{source} fails its checksum — {_OTHER}")


# --- one file ---------------------------------------------------------------------------------------------------------


def restore_file(backup: Path, directory: Path, path: str) -> RestoredFile:
    """Put back one file of a node that no process has open; `path` is relative to it, as `verify` names files.

    Only a file that the node can vouch for is taken: a segment or delete file by the checksum in its manifest, a manifest by
    the one after it or by the checkpoint. Raises `InvalidArgument` for what is no backup, no node or no file of a cut that
    is kept, `AlreadyOwned` while it runs, `Corrupt` when nothing vouches for the file or the backup's is another one,
    `StorageFailed`. Nothing is changed then.
    """
    with disk_errors_typed(directory):
        record = read_record(backup)
        if (check_node(directory) / BACKUP_RECORD_NAME).exists():
            raise InvalidArgument(f"{directory} is a backup, and stays as it was made — name a node's directory")
        lock = DirectoryLock(directory)
        try:
            number, checksum, file = _vouched_for(directory, record.node_id, path)
            for_group = (directory / CUTS).is_dir() and bool((directory / CUTS).stat().st_mode & 0o040)
            node, temporary = NodeDirectory(directory, for_group=for_group), path + TEMPORARY_SUFFIX
            try:  # under a temporary name, which a start removes if this ends here
                length = _bring(node, place_beneath(backup, path), temporary, number, checksum, file)
                node.rename(temporary, path)
            except BaseException:
                with suppress(OSError, StreamingNodeError):
                    node.remove(temporary)
                raise
            node.sync_parents([path])
        finally:
            lock.release()
    return RestoredFile(path=path, cut=number, bytes=length)


def _vouched_for(directory: Path, backup_node_id: str, path: str) -> tuple[int, int, DataFile | None]:
    """Return the cut of a file, the checksum that it must have, and its entry in the manifest; None for a manifest."""
    found, records = read_node_records(directory)
    if found.node_id != backup_node_id:
        raise InvalidArgument(f"the backup is of node {backup_node_id}, {directory} of {found.node_id} — {_OTHER}")
    checkpoint = records.checkpoints.get(PCHANNEL, NO_CHECKPOINT)
    first_kept = records.first_kept.get(PCHANNEL, FIRST_CUT)
    cuts = CutLog(NodeDirectory(directory), node_id=found.node_id)
    cuts.anchor(checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick)
    if named := _MANIFEST.fullmatch(path):
        number = int(named[1])
        if first_kept <= number <= checkpoint.cut_number:
            return number, cuts.mark_of(number).crc32c, None
        kept = f"{first_kept} to {checkpoint.cut_number}"
        raise InvalidArgument(f"the node has to have the cuts {kept}, {path} is none — name one of them")
    for number in reversed(cut_numbers(directory)):
        manifest = cuts.read(number).manifest
        for file in (*manifest.segments, *manifest.deletes):
            if file.path == path:
                return number, file.crc32c, file
    raise InvalidArgument(f"no cut of {directory} names {path!r} — name a file as `streamingnode verify` does")


def _bring(node: NodeDirectory, source: Path, temporary: str, number: int, checksum: int, file: DataFile | None) -> int:
    """Copy a file under a temporary name and return how long it is. Raises unless it is the one that the node wrote."""
    try:
        reading = open_binary(source)
    except FileNotFoundError:
        raise InvalidArgument(f"the backup does not have {source} — {_OTHER}") from None
    with reading:
        size_bytes = os.fstat(reading.fileno()).st_size
        if file is not None and size_bytes != file.bytes:  # it may be a terabyte of holes
            raise Corrupt(f"{source} has {size_bytes} bytes, cut {number} names {file.bytes} — {_OTHER}")
        with node.create(temporary) as writing:
            length, found = read_through(reading, writing.write)
            node.sync(writing)
    if file is None:
        manifest = node.read(temporary)
        decode_manifest(manifest, name=str(source))
        found = manifest_crc32c(manifest)  # of the document alone
    if found != checksum:
        raise Corrupt(f"{source} is not the file that this node wrote for cut {number} — {_OTHER}")
    return length
