"""One file of a cut out of a backup, into the node that it is missing or damaged in. Blocks.

Only a file that the node can vouch for is taken: a segment or delete file by the checksum in its manifest, a manifest by the
one after it or by the checkpoint. Nothing else of the directory changes, and a crash leaves the old file or the new one.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flusher.checkpoint import NO_CHECKPOINT
from flusher.cut_log import CUTS, CutLog, cut_numbers
from flusher.cuts import FIRST_CUT
from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import DataFile, decode_manifest, manifest_crc32c
from streamingnode.backup.restoring import read_record
from streamingnode.inspection.node_files import check_node
from streamingnode.inspection.node_records import read_node_records
from streamingnode.verification.walk import PCHANNEL
from wal.codec import crc32c
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError
from wal.files import DirectoryLock, disk_errors_typed, open_binary, place_beneath
from wal.rocks.opening import BACKUP_RECORD_NAME

CHUNK_BYTES = 1 << 20
_MANIFEST = re.compile(rf"{CUTS}/(\d{{16}})\.json")
_OTHER = "restore from another backup"


class RestoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is as the node wrote it again; `cut` is the one that it belongs to."""

    path: str
    cut: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What the node knows of a file: of a manifest the checksum of its document, of another file its length, too."""

    cut: int
    crc32c: int
    file: DataFile | None


def restore_file(backup: Path, directory: Path, path: str) -> RestoredFile:
    """Put back one file of a node that no process has open; `path` is relative to it, as `verify` names files.

    Raises `InvalidArgument` for what is no backup, no node or no file of a cut that is kept, `AlreadyOwned` while it runs,
    `Corrupt` when nothing vouches for the file or the backup's is another one, `StorageFailed`. Nothing is changed then.
    """
    with disk_errors_typed(directory):
        record = read_record(backup)
        if (check_node(directory) / BACKUP_RECORD_NAME).exists():
            raise InvalidArgument(f"{directory} is a backup, and stays as it was made — name a node's directory")
        lock = DirectoryLock(directory)
        try:
            known = _known(directory, record.node_id, path)
            node = NodeDirectory(directory, for_group=_for_group(directory / CUTS))
            return RestoredFile(path=path, cut=known.cut, bytes=_replace(node, backup, path, known))
        finally:
            lock.release()


def _known(directory: Path, backup_node_id: str, path: str) -> _Known:
    records = read_node_records(directory)
    if records.survey.node_id != backup_node_id:
        raise InvalidArgument(
            f"the backup is of node {backup_node_id}, {directory} of {records.survey.node_id} — {_OTHER}"
        )
    checkpoint = records.checkpoints.get(PCHANNEL, NO_CHECKPOINT)
    first_kept = records.first_kept.get(PCHANNEL, FIRST_CUT)
    cuts = CutLog(NodeDirectory(directory), node_id=records.survey.node_id)
    cuts.anchor(checkpoint.cut_number, crc32c=checkpoint.manifest_crc32c, tick=checkpoint.tick)
    found = _MANIFEST.fullmatch(path)
    if found is None:
        return _known_by_manifest(cuts, path)
    number = int(found[1])
    if not first_kept <= number <= checkpoint.cut_number:
        raise InvalidArgument(
            f"the node has to have the cuts {first_kept} to {checkpoint.cut_number}, {path} is none — name one of them"
        )
    return _Known(number, cuts.mark_of(number).crc32c, None)


def _known_by_manifest(cuts: CutLog, path: str) -> _Known:
    for number in reversed(cut_numbers(cuts.directory)):
        manifest = cuts.read(number).manifest
        for file in (*manifest.segments, *manifest.deletes):
            if file.path == path:
                return _Known(number, file.crc32c, file)
    raise InvalidArgument(f"no cut of {cuts.node} names {path!r} — name a file as `streamingnode verify` does")


def _replace(node: NodeDirectory, backup: Path, path: str, known: _Known) -> int:
    """Bring the file under a temporary name, which a start removes if this ends here; return how long it is."""
    temporary = path + TEMPORARY_SUFFIX
    try:
        length = _copy(node, place_beneath(backup, path), temporary, known)
        node.rename(temporary, path)
    except BaseException:
        with suppress(OSError, StreamingNodeError):
            node.remove(temporary)
        raise
    node.sync_parents([path])
    return length


def _copy(node: NodeDirectory, source: Path, temporary: str, known: _Known) -> int:
    length = checksum = 0
    manifest = b""
    try:
        reading = open_binary(source)
    except FileNotFoundError:
        raise InvalidArgument(f"the backup does not have {source} — {_OTHER}") from None
    with reading:
        size_bytes = os.fstat(reading.fileno()).st_size
        if known.file is not None and size_bytes != known.file.bytes:  # it may be a terabyte of holes
            raise Corrupt(f"{source} has {size_bytes} bytes, cut {known.cut} names {known.file.bytes} — {_OTHER}")
        with node.create(temporary) as writing:
            while chunk := reading.read(CHUNK_BYTES):
                writing.write(chunk)
                length += len(chunk)
                checksum = crc32c(chunk, checksum)
            node.sync(writing)
    if known.file is None:
        manifest = node.read(temporary)
        decode_manifest(manifest, name=str(source))
        checksum = manifest_crc32c(manifest)
    if checksum != known.crc32c:
        raise Corrupt(f"{source} is not the file that this node wrote for cut {known.cut} — {_OTHER}")
    return length


def _for_group(directory: Path) -> bool:
    return directory.is_dir() and bool(directory.stat().st_mode & 0o040)
