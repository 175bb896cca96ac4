"""Are the node's files what its manifests say? Length and CRC32C of each, in bounded memory, before a row is read.

Runs in threads of the driver: the checksum releases the interpreter lock, and one pass at disk speed leaves the file in the
page cache for the executors that read it next.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from flusher.manifest import DataFile
from spark_sink.cuts.cut_log import CutLog
from wal.codec import crc32c
from wal.errors import Corrupt, Truncated

CHUNK_BYTES = 1 << 20
"""Read at a time by each thread; large enough to cost nothing per call, small enough to forget."""


def verify_files(node: Path, files: Sequence[DataFile]) -> None:
    """Return when every file is whole.

    Raises `Corrupt` naming the first one that is not, or that is missing though a cut names it; `Truncated` naming one that
    retention took with its cut.
    """
    with ThreadPoolExecutor(max_workers=cpu_count() or 1) as threads:
        for _ in threads.map(lambda file: verify_file(node, file), files):
            pass


def verify_file(node: Path, file: DataFile) -> None:
    """Return when one file is whole. Raises as `verify_files`."""
    path = node / file.path
    try:
        length, checksum = _measure(path)
    except FileNotFoundError:
        raise _gone(node, file) from None
    if length != file.bytes:
        raise Corrupt(f"{path} has {length} bytes, its cut says {file.bytes} — restore it from a backup")
    if checksum != file.crc32c:
        raise Corrupt(f"{path} fails its checksum — restore it from a backup")


def _gone(node: Path, file: DataFile) -> Corrupt | Truncated:
    """Return why a file is not there: retention removes a cut's manifest before its files, so one that is kept tells."""
    cuts = CutLog(node)
    for number in cuts.numbers:
        manifest = cuts.read(number).manifest
        if any(file.path == each.path for each in (*manifest.segments, *manifest.deletes)):
            return Corrupt(
                f"{node / file.path} is missing, and cut {number} names it — "
                f"give a backup that has it: streamingnode repair {node} --backup"
            )
    return Truncated(f"file {file.path}", f"cut {cuts.first}", "read again: every table has taken it meanwhile")


def _measure(path: Path) -> tuple[int, int]:
    length = checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
    return length, checksum
