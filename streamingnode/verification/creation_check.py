"""Whether a directory is of a node whose creation was cut off, as `wal.rocks.opening` leaves it. Reads; blocks."""

from pathlib import Path

from flusher.cut_log import cut_numbers
from streamingnode.verification.finding import Kind, Report
from wal.errors import StreamingNodeError
from wal.rocks.floor import read_floor
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME, TEMPORARY_SUFFIX

UNFINISHED_NAME = DATABASE_NAME + TEMPORARY_SUFFIX


def is_unfinished_creation(directory: Path) -> bool:
    """Whether the next opening makes the node here anew: nothing was ever acknowledged by it."""
    if not directory.is_dir() or (directory / DATABASE_NAME).exists() or (directory / BACKUP_RECORD_NAME).exists():
        return False
    if cut_numbers(directory):  # of a node that was more than begun
        return False
    try:
        floor = read_floor(directory)
    except StreamingNodeError:
        return False
    return floor is not None and not floor.term


def warn_of_unfinished(report: Report) -> None:
    """Say that a node was not made to its end, by which nothing is lost."""
    detail = "the node's creation was cut off, before it took anything"
    report.warn(Kind.UNFINISHED, DATABASE_NAME, detail, "open the node: the next opening finishes it")
