"""Makes a cut visible: data files first, the manifest last. Blocks, so it runs in a worker thread.

In: files complete and synced under temporary names, and the manifest that names them. Out: the cut is on disk; the
checkpoint is the flusher's next step. What each crash leaves behind, and what the next start makes of it:

1. While a file is written, or before it is renamed: `*.tmp`. Removed; the log is read again from the last checkpoint.
2. Between the renames: data files no manifest names. Removed, and read again.
3. Before the manifest's rename: as 2, and the manifest's `*.tmp`. The same.
4. After that rename, before its directory is synced: after a power cut either the manifest or its `*.tmp`, never half of
   one. As 3, or as 5.
5. Before the checkpoint: the cut, and a checkpoint one cut behind. The cut is adopted: its names are synced once more, the
   log up to its tick is read again and compared with it (`check_same_cut`), no file is written, the checkpoint follows.
6. Before truncation: everything. Truncation is tried again, and is idempotent.

A cut on disk is never written again: a reader may hold it. A disk error in the running process leaves what a crash at the
same place leaves, and is treated the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flusher.cuts.collection_entry import collection_entries
from flusher.cuts.cut_log import Cut, manifest_path
from flusher.files.node_directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import (
    MANIFEST_FORMAT,
    CutManifest,
    DeleteFile,
    SegmentFile,
    VChannelEntry,
    encode_manifest,
    manifest_crc32c,
)
from interceptors.shard.state import ShardState
from wal.errors import Corrupt
from wal.failpoint import failpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """A cut that is on disk: its number, its tick, the segments it brought, and where its manifest is."""

    number: int
    tick: int
    segments: tuple[SegmentFile, ...]
    manifest_path: str


NO_CUT = CutResult(number=0, tick=0, segments=(), manifest_path="")
"""What stands before the first cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """The place of a cut in the row of cuts: its number and tick, and the cut before it."""

    number: int
    tick: int
    previous_tick: int
    previous_crc32c: int


def build_manifest(
    point: CutPoint,
    files: Iterable[SegmentFile | DeleteFile],
    state: ShardState,
    *,
    node_id: str,
    created_ms: int,
) -> CutManifest:
    """Return the manifest of a cut; the state is as of its tick."""
    found = sorted(files, key=lambda file: file.path)
    return CutManifest(
        format=MANIFEST_FORMAT,
        node_id=node_id,
        number=point.number,
        tick=point.tick,
        previous_tick=point.previous_tick,
        previous_crc32c=point.previous_crc32c,
        created_ms=created_ms,
        collections=collection_entries(state.catalog.collections(dropped=True), since_tick=point.previous_tick),
        vchannels=tuple(
            VChannelEntry(name=name, complete_to=point.tick, next_offset=next_offset)
            for name, next_offset in sorted(state.next_offsets.items())
        ),
        segments=tuple(file for file in found if isinstance(file, SegmentFile)),
        deletes=tuple(file for file in found if isinstance(file, DeleteFile)),
    )


def publish_cut(directory: NodeDirectory, manifest: CutManifest, renames: Sequence[tuple[str, str]]) -> Cut:
    """Give the files their names and write the manifest; durable on return.

    `renames` are pairs of temporary and final path. Raises `OSError`; what is on disk then is in the table above.
    """
    for temporary, path in renames:
        failpoint("flush.file_renaming")
        directory.rename(temporary, path)
    failpoint("flush.files_renamed")
    directory.sync_parents([path for _, path in renames])
    failpoint("flush.file_names_synced")
    content = encode_manifest(manifest)
    path = manifest_path(manifest.number)
    with directory.create(path + TEMPORARY_SUFFIX) as file:
        file.write(content)
        failpoint("flush.manifest_written")
        directory.sync(file)
    failpoint("flush.manifest_synced")
    directory.rename(path + TEMPORARY_SUFFIX, path)
    failpoint("flush.manifest_renamed")
    directory.sync_parents([path])
    failpoint("flush.manifest_name_synced")
    return Cut(manifest, manifest_crc32c(content))


def check_same_cut(manifest: CutManifest, point: CutPoint, rows: Mapping[str, int]) -> None:
    """Check that a cut found on disk is the one the log tells; `rows` counts what the log has for each file's path.

    Raises `Corrupt` when it is not: then one of the two was changed behind the node's back.
    """
    found = {file.path: file.rows for file in (*manifest.segments, *manifest.deletes)}
    if found != rows or (manifest.tick, manifest.previous_crc32c) != (point.tick, point.previous_crc32c):
        raise Corrupt(
            f"cut {manifest.number} on disk is not the cut the log tells at tick {point.tick} — "
            "the directory mixes files of different backups; restore all of it from one"
        )


def cut_result(manifest: CutManifest) -> CutResult:
    """Return what whoever waited for the cut is told."""
    return CutResult(
        number=manifest.number,
        tick=manifest.tick,
        segments=manifest.segments,
        manifest_path=manifest_path(manifest.number),
    )
