"""Are the node's files what its manifests say? Length and CRC32C of each, in bounded memory, before a row is read.

Runs in threads of the driver: the checksum releases the interpreter lock, and one pass at disk speed leaves the file in the
page cache for the executors that read it next.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flusher.cuts.cut_log import CutLog, living
from flusher.manifest import DataFile
from wal.codec import crc32c
from wal.errors import Corrupt, Truncated
from wal.files import open_binary, place_beneath

CHUNK_BYTES = 1 << 20
"""Read at a time by each thread; large enough to cost nothing per call, small enough to forget."""

THREADS_MAX = 16
"""Each has a file open, and a machine may have more processors than a process may open files beside its others."""


def verify_files(node: Path, files: Sequence[DataFile]) -> None:
    """Return when every file is whole.

    Raises `Corrupt` naming the first one that is not, or that is missing though a cut names it; `Truncated` naming one that
    retention took with its cut.
    """
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, THREADS_MAX)) as threads:
        for _ in threads.map(lambda file: verify_file(node, file), files):
            pass


def verify_file(node: Path, file: DataFile) -> None:
    """Return when one file is whole. Raises as `verify_files`."""
    path = place_beneath(node, file.path)
    try:
        length, checksum = _measure(path, file.bytes)
    except FileNotFoundError:
        raise _gone(node, file) from None
    if length != file.bytes:
        raise Corrupt(f"{path} has {length} bytes, its cut says {file.bytes} — restore it from a backup")
    if checksum != file.crc32c:
        raise Corrupt(f"{path} fails its checksum — restore it from a backup")


def _gone(node: Path, file: DataFile) -> Corrupt | Truncated:
    """Return why a file is not there: retention removes a cut's manifest before its files, so one that is kept tells.

    But files of a dropped collection, for which no table waits, go by themselves.
    """
    cuts = CutLog(node)
    if cuts.numbers and file.collection_id not in living(cuts.read(cuts.newest).manifest):
        return Truncated(
            f"file {file.path}, of a collection that was dropped,", f"cut {cuts.newest}", "its rows are gone"
        )
    for number in cuts.numbers:
        manifest = cuts.read(number).manifest
        if any(file.path == each.path for each in (*manifest.segments, *manifest.deletes)):
            return Corrupt(
                f"{node / file.path} is missing, and cut {number} names it — restore it from a backup that has it"
            )
    return Truncated(f"file {file.path}", f"cut {cuts.first}", "read again: every table has taken it meanwhile")


def _measure(path: Path, expected_bytes: int) -> tuple[int, int]:
    """Return length and CRC32C of a file; nothing is read of one with another length, which may be a terabyte of holes."""
    length = checksum = 0
    with open_binary(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != expected_bytes:
            return size_bytes, 0
        while chunk := stream.read(CHUNK_BYTES):
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
    return length, checksum
