"""What the cuts on disk hold, read with the tools users have, to be compared with the model."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flusher.directory import manifest_path
from flusher.manifest import CutManifest, DataFile, SegmentFile, decode_manifest, manifest_crc32c
from tests.flusher.stamped_log import Row
from wal.codec import crc32c


def manifests(root: Path) -> list[CutManifest]:
    """All cuts, each checked to follow the one before it."""
    found: list[CutManifest] = []
    previous = 0
    for path in sorted((root / "cuts").glob("*.json")):
        content = path.read_bytes()
        manifest = decode_manifest(content, name=path.name)
        assert f"cuts/{path.name}" == manifest_path(manifest.number)
        if found:
            assert (manifest.number, manifest.previous_tick) == (
                found[-1].number + 1,
                found[-1].tick,
            )
            assert manifest.previous_crc32c == previous
        previous = manifest_crc32c(content)
        found.append(manifest)
    return found


def read_file(root: Path, file: DataFile) -> pa.Table:
    """One file, after checking that it is what its manifest says."""
    content = (root / file.path).read_bytes()
    assert (len(content), crc32c(content)) == (file.bytes, file.crc32c)
    with pq.ParquetFile(root / file.path, page_checksum_verification=True) as parquet:
        table = parquet.read(use_threads=False)
    offsets: list[int] = table["_offset"].to_numpy().tolist()
    ticks: list[int] = table["_tick"].to_numpy().tolist()
    assert table.num_rows == file.rows
    assert (min(offsets), max(offsets)) == (file.offset_min, file.offset_max)
    assert (min(ticks), max(ticks)) == (file.tick_min, file.tick_max)
    assert offsets == sorted(offsets)
    return table


def rows_in(root: Path, manifest: CutManifest) -> list[Row]:
    return sorted(row for file in manifest.segments for row in _rows(root, file, file.partition_id))


def deletes_in(root: Path, manifest: CutManifest) -> list[Row]:
    return sorted(row for file in manifest.deletes for row in _rows(root, file, -1))


def _rows(root: Path, file: DataFile, partition_id: int) -> list[Row]:
    return [
        Row(
            file.collection_id,
            partition_id,
            found["_vchannel"],
            found["_tick"],
            found["_offset"],
            found["id"],
            found["item"] if isinstance(file, SegmentFile) else None,
        )
        for found in read_file(root, file).to_pylist()
    ]
