"""One Parquet file of a cut: its length and checksum, the checksums of its pages, and what its rows are. Blocks.

The checksum of the whole file, which is in the manifest, finds every changed byte. The pages are decoded all the same: they
say which rows a changed byte takes, and that the rows are those the manifest counts. A file that is not the one its cut
names is asked who it is, so that a swapped or foreign one is called that.
"""

import os
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.manifest import CutManifest, DataFile, SegmentFile
from flusher.rows import OFFSET, TICK, VCHANNEL
from streamingnode.verification.finding import RESTORE, Kind, Report
from wal.codec import crc32c
from wal.errors import Corrupt
from wal.files import open_binary, place_beneath

CHUNK_BYTES = 1 << 20

_PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)


def walk_data_file(
    directory: Path, file: DataFile, manifest: CutManifest, report: Report
) -> Generator[int, None, bool]:
    """Check one file and yield the bytes read after each step; return whether it is missing."""
    try:
        path = place_beneath(directory, file.path)
        length, checksum = yield from measure_file(path, expected_bytes=file.bytes)
    except FileNotFoundError:
        return True
    except OSError as error:
        report.damage(Kind.UNREADABLE, file.path, f"cannot be read: {error.strerror}", RESTORE)
        return False
    except Corrupt as error:
        report.damage(Kind.UNREADABLE, file.path, error.happened, RESTORE)
        return False
    report.count("segments" if isinstance(file, SegmentFile) else "delete files")
    if length != file.bytes:
        detail = f"has {length} bytes, its cut says {file.bytes}"
        report.damage(Kind.LENGTH, file.path, detail + _identity(path, file, manifest), RESTORE)
    elif checksum != file.crc32c:
        other = _identity(path, file, manifest)
        detail = (
            other.removeprefix("; ") or f"fails its checksum; unreadable: {_broken_rows(path) or 'nothing of its rows'}"
        )
        report.damage(Kind.FOREIGN if "of node" in other else Kind.CHECKSUM, file.path, detail, RESTORE)
    else:
        yield from _walk_rows(path, file, manifest, report)
    return False


def measure_file(path: Path, *, expected_bytes: int | None = None) -> Generator[int, None, tuple[int, int]]:
    """Return length and CRC32C of a file, yielding the bytes read after each chunk. Raises `OSError`, `Corrupt`.

    Nothing is read of a file with another length than the expected one, which may be a terabyte of holes.
    """
    length = checksum = 0
    with open_binary(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != (expected_bytes or size_bytes):
            return size_bytes, 0
        while chunk := stream.read(CHUNK_BYTES):
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
            yield len(chunk)
    return length, checksum


def _walk_rows(path: Path, file: DataFile, manifest: CutManifest, report: Report) -> Generator[int, None, None]:
    other = _identity(path, file, manifest)
    if other:
        report.damage(Kind.FOREIGN, file.path, other.removeprefix("; "), RESTORE)
        return
    rows, before = 0, -1
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group)
                problem = _check_rows(table, file, before)
                if problem:
                    report.damage(Kind.CONTENT, file.path, f"row group {group}: {problem}", RESTORE)
                    return
                rows += table.num_rows
                before = int(table.column(OFFSET)[-1].as_py()) if table.num_rows else before
                yield 0
    except _PARQUET_ERRORS as error:
        report.damage(Kind.CHECKSUM, file.path, f"is what its cut names, and is no Parquet file: {error}", RESTORE)
        return
    report.count("rows", rows)
    if rows != file.rows:
        report.damage(Kind.CONTENT, file.path, f"holds {rows} rows, its cut says {file.rows}", RESTORE)


def _check_rows(table: pa.Table, file: DataFile, before: int) -> str:
    """Return what is wrong with the rows of a row group that follows the offset `before`; nothing when all is well."""
    if not table.num_rows:
        return ""
    ticks, offsets = table.column(TICK).to_numpy(), table.column(OFFSET).to_numpy()
    if not (file.tick_min <= ticks.min() and ticks.max() <= file.tick_max):
        return f"ticks {ticks.min()} to {ticks.max()} are outside {file.tick_min} to {file.tick_max}"
    if not (file.offset_min <= offsets.min() and offsets.max() <= file.offset_max):
        return f"offsets {offsets.min()} to {offsets.max()} are outside {file.offset_min} to {file.offset_max}"
    if isinstance(file, SegmentFile) and (offsets[0] <= before or np.any(np.diff(offsets) <= 0)):
        return "row offsets do not ascend"
    names = pc.unique(table.column(VCHANNEL)).to_pylist()
    return "" if names == [file.vchannel] else f"holds rows of {', '.join(map(str, names))}, not of {file.vchannel}"


def _identity(path: Path, file: DataFile, manifest: CutManifest) -> str:
    """Return who a file is when that is somebody else than its cut names; nothing when it is itself or does not say."""
    try:
        with pq.ParquetFile(path) as parquet:
            metadata = {key.decode(): value.decode() for key, value in (parquet.metadata.metadata or {}).items()}
    except (*_PARQUET_ERRORS, UnicodeDecodeError):
        return ""
    node_id, segment = metadata.get("streamingnode.node_id"), metadata.get("streamingnode.segment_id")
    if node_id is not None and node_id != manifest.node_id:
        return f"; it is a file of node {node_id}"
    if isinstance(file, SegmentFile) and segment is not None and segment != str(file.segment_id):
        return f"; it holds segment {segment}, not {file.segment_id}: files were swapped or copied"
    return ""


def _broken_rows(path: Path) -> str:
    """Return which row groups of a damaged file cannot be decoded, by their rows."""
    broken, first = [], 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                try:
                    parquet.read_row_group(group)
                except _PARQUET_ERRORS:
                    broken.append(f"rows {first} to {first + count - 1}")
                first += count
    except _PARQUET_ERRORS:
        return "its footer, so all of its rows"
    return ", ".join(broken)
