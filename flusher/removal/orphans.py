"""What a crash left in the node directory, sorted out before the flusher starts. Blocks, so it runs in a worker thread.

In: the checkpoint. Out: the newest cut, if it is ahead of the checkpoint, and a directory that holds only what manifests
name. Nothing that might be data is removed on a guess: while any manifest is missing or damaged, only temporary files go.
"""

from flusher.buffers.delete_buffer import DELETES
from flusher.buffers.segment_buffer import SEGMENTS
from flusher.checkpoint import Checkpoint
from flusher.cuts.cut_log import CUTS, Cut, cut_numbers, file_paths, manifest_path, read_cut
from flusher.files.node_directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.removal.kept_cuts import are_all_there
from wal.errors import Corrupt, StreamingNodeError
from wal.failpoint import failpoint


def cut_ahead(directory: NodeDirectory, checkpoint: Checkpoint) -> Cut | None:
    """Return the cut that was published when a crash kept its checkpoint from following; None when there is none.

    It is durable when this returns.
    Raises `Corrupt` when the cuts on disk and the checkpoint do not belong together.
    """
    newest = max(cut_numbers(directory), default=0)
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


def remove_orphans(directory: NodeDirectory, *, first_kept: int) -> list[str]:
    """Remove temporary files, and data files no manifest names; return their paths. Idempotent.

    Only while no file is in progress; cuts below `first_kept` may be gone. Raises `OSError`.
    """
    named = _named_files(directory, first_kept)
    on_disk = [path for top in (SEGMENTS, DELETES, CUTS) for path in directory.files(top)]
    orphans = [path for path in on_disk if path.endswith(TEMPORARY_SUFFIX)]
    if named is not None:
        orphans += [path for path in on_disk if path.endswith(".parquet") and path not in named]
    for path in orphans:
        failpoint("recovery.orphan_removing")
        directory.remove(path)
    return orphans


def _named_files(directory: NodeDirectory, first_kept: int) -> set[str] | None:
    """Return the files that any manifest names, None when that cannot be told."""
    numbers = cut_numbers(directory)
    if not are_all_there(numbers, first_kept):
        return None
    try:
        return {path for number in numbers for path in file_paths(read_cut(directory, number).manifest)}
    except StreamingNodeError:
        return None
