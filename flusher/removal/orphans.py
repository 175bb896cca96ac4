"""What a crash left in the node directory, sorted out before the flusher starts. Blocks, so it runs in a worker thread.

In: the checkpoint. Out: the newest cut, if it is ahead of the checkpoint, and a directory without the files of the cut that
was in the making. Those are told by names that no other cut gives: segments that the log made since the last cut, and a
manifest and deletes under the number of the next one. Nothing else is removed, whoever put it there. What retention had
begun to remove, `retention` removes.
"""

from flusher.checkpoint import Checkpoint
from flusher.cuts.cut_log import CUTS, Cut, cut_numbers, file_paths, manifest_path, read_cut
from flusher.files.node_directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import DELETES, SEGMENTS, delete_path, is_vchannel, segment_path
from wal.errors import Corrupt
from wal.failpoint import failpoint


def cut_ahead(directory: NodeDirectory, checkpoint: Checkpoint) -> Cut | None:
    """Return the cut that was published when a crash kept its checkpoint from following; None when there is none.

    It is durable when this returns.
    Raises `Corrupt` when the cuts on disk and the checkpoint do not belong together.
    """
    newest = max(cut_numbers(directory), default=0)
    if checkpoint.cut_number and not newest:
        raise Corrupt(
            f"{directory.root / CUTS} holds no cut and the checkpoint is at {checkpoint.cut_number} — "
            "restore the cuts from a backup"
        )
    if newest not in {checkpoint.cut_number, checkpoint.cut_number + 1}:
        raise Corrupt(
            f"the newest cut on disk is {newest}, the checkpoint is at {checkpoint.cut_number} — "
            "restore the cuts and the log from one backup"
        )
    if newest == 0:
        return None
    cut = read_cut(directory, newest)
    if newest > checkpoint.cut_number:
        # The names are there, but what kept the checkpoint back may have come before they were durable.
        directory.sync_parents([manifest_path(newest), *file_paths(cut.manifest)])
        return cut
    if cut.crc32c != checkpoint.manifest_crc32c:
        raise Corrupt(f"cut {newest} is not the one the checkpoint knows — restore it from a backup")
    return None


def remove_orphans(directory: NodeDirectory, number: int, *, segment_ids: range, ahead: Cut | None) -> list[str]:
    """Remove what was written for cut `number` and is not named by it, as it is on disk; return the paths. Idempotent.

    `segment_ids` are those given since the cut before it. Only while no file is in progress. Raises `OSError`.
    """
    named = frozenset() if ahead is None else frozenset(file_paths(ahead.manifest))
    on_disk = [path for top in (SEGMENTS, DELETES, CUTS) for path in directory.files(top)]
    orphans = [path for path in on_disk if path not in named and _is_of_cut(path, number, segment_ids)]
    for path in orphans:
        failpoint("recovery.orphan_removing")
        directory.remove(path)
    return orphans


def _is_of_cut(path: str, number: int, segment_ids: range) -> bool:
    """Whether the node gives this path to a file of cut `number`, or to one in the making; not to its manifest."""
    final = path.removesuffix(TEMPORARY_SUFFIX)
    top, *ids, name = final.split("/")
    if top == CUTS:
        return path == manifest_path(number) + TEMPORARY_SUFFIX
    if len(ids) != 1 or not ids[0].isdecimal():
        return False
    collection_id, stem = int(ids[0]), name.removesuffix(".parquet")
    if top == SEGMENTS:
        return stem.isdecimal() and int(stem) in segment_ids and final == segment_path(collection_id, int(stem))
    vchannel = stem.partition("-")[2]
    return is_vchannel(vchannel, collection_id) and final == delete_path(collection_id, number, vchannel)
