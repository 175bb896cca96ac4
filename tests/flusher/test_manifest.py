"""A manifest names files where the node puts them, and nowhere else."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from flusher.directory import CutLog, NodeDirectory, manifest_path
from flusher.manifest import (
    CutManifest,
    DeleteFile,
    SegmentFile,
    decode_manifest,
    delete_path,
    encode_manifest,
)
from tests.flusher.stamped_log import StampedLog, flusher_of
from wal.errors import Corrupt
from wal.memory_store import MemoryLogStore


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> CutManifest:
    """A cut with a segment and a delete file, as the flusher writes it."""
    root = tmp_path_factory.mktemp("node")

    async def main() -> None:
        store = MemoryLogStore()
        log = StampedLog(await store.open_log("p0"))
        table = log.create()
        log.insert(table, [1, 2])
        log.delete(table, [1])
        log.cut()
        flusher = flusher_of(NodeDirectory(root), store, log.log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            await flusher.wait_for_cut(1)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    return CutLog(root).read(1).manifest


def with_segment(manifest: CutManifest, **changes: Any) -> bytes:
    segment: SegmentFile = msgspec.structs.replace(manifest.segments[0], **changes)
    return encode_manifest(
        msgspec.structs.replace(manifest, segments=(segment, *manifest.segments[1:]))
    )


def with_delete(manifest: CutManifest, **changes: Any) -> bytes:
    delete: DeleteFile = msgspec.structs.replace(manifest.deletes[0], **changes)
    return encode_manifest(
        msgspec.structs.replace(manifest, deletes=(delete, *manifest.deletes[1:]))
    )


@pytest.mark.parametrize(
    "path",
    ["../victim", "/etc/hosts", "segments/1/../../victim", "segments/1/4.parquet", "", "floor"],
)
def test_a_path_that_no_name_of_the_node_gives_is_corrupt(manifest: CutManifest, path: str) -> None:
    assert decode_manifest(encode_manifest(manifest), name=manifest_path(1)) == manifest
    for content in (with_segment(manifest, path=path), with_delete(manifest, path=path)):
        with pytest.raises(Corrupt, match="where this node has"):
            decode_manifest(content, name=manifest_path(1))


def test_two_entries_of_one_path_are_each_looked_at(manifest: CutManifest) -> None:
    segment = manifest.segments[0]
    other = msgspec.structs.replace(segment, segment_id=segment.segment_id + 1)
    for pair in ((segment, other), (other, segment)):
        with pytest.raises(Corrupt, match="where this node has"):
            decode_manifest(
                encode_manifest(msgspec.structs.replace(manifest, segments=pair)), name=""
            )


@pytest.mark.parametrize(
    "vchannel", ["../../victim", "p0_1v0/../x", "p0_9v0", "p0", "", "p0_1v0\n"]
)
def test_a_vchannel_that_leads_out_of_the_directory_is_corrupt(
    manifest: CutManifest, vchannel: str
) -> None:
    path = delete_path(manifest.deletes[0].collection_id, 1, vchannel)
    with pytest.raises(Corrupt, match="no such file"):
        decode_manifest(with_delete(manifest, path=path, vchannel=vchannel), name="")


def test_deletes_of_another_cut_are_not_named_by_this_one(manifest: CutManifest) -> None:
    delete = manifest.deletes[0]
    path = delete_path(delete.collection_id, 2, delete.vchannel)
    with pytest.raises(Corrupt, match="where this node has"):
        decode_manifest(with_delete(manifest, path=path), name="")


def test_a_crafted_manifest_removes_nothing_outside_of_its_node(
    tmp_path: Path, manifest: CutManifest
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "node/cuts").mkdir(parents=True)
    (tmp_path / "node" / manifest_path(1)).write_bytes(with_segment(manifest, path="../victim"))
    with pytest.raises(Corrupt, match=r"\.\./victim"):
        CutLog(tmp_path / "node").read(1)
    assert victim.read_text() == "mine"
