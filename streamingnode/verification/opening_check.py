"""Whether log and cuts of a directory are of one life of one node, asked before anything is appended. Blocks.

A log that is older than the cuts beside it would make those cuts again, with other rows: tables that took the first ones
could never be told from those that took the second. Only what cannot be undone is refused here; a damaged or missing file is
met by who reads it, and found by `verify`.
"""

from pathlib import Path

from flusher.checkpoint import Checkpoint
from flusher.cut_log import CUTS, cut_numbers, read_cut
from flusher.directory import NodeDirectory
from flusher.manifest import CutManifest
from wal.errors import Corrupt, StreamingNodeError


def refuse_mixed(directory: Path, checkpoint: Checkpoint, node_id: str, last_tick: int) -> None:
    """Return if a log that ends at `last_tick` may go on beside the cuts here. Raises `Corrupt`, having changed nothing."""
    newest = max(cut_numbers(directory), default=0)
    if not newest:
        return
    manifest = _read(directory, newest)
    if manifest is not None and manifest.node_id != node_id:
        raise Corrupt(
            f"{directory / CUTS} holds cuts of node {manifest.node_id} and the log is of node {node_id} — {_TOGETHER}"
        )
    if newest > checkpoint.cut_number + 1 or (manifest is not None and manifest.tick > last_tick):
        raise Corrupt(
            f"{directory / CUTS} has cut {newest} and the log does not know it: the log is older than the cuts "
            f"beside it — {_TOGETHER}"
        )


_TOGETHER = "put log, floor and cuts of one backup together"


def _read(directory: Path, number: int) -> CutManifest | None:
    """Return a cut's manifest; None when it cannot be read, which stops nobody but the flusher."""
    try:
        return read_cut(NodeDirectory(directory), number).manifest
    except (OSError, StreamingNodeError):
        return None
