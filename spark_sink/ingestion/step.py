"""The named points of an ingest between two effects on disk, so that a test can kill it at each."""

from collections.abc import Callable
from enum import Enum


class Step(Enum):
    """The points at which a killed job leaves a different disk behind."""

    CREATED = "created"
    """The empty table is in place."""
    INTENDED = "intended"
    """The intent is on disk, no data file yet."""
    WRITTEN = "written"
    """Spark has written the files; they may not be on disk."""
    SEALED = "sealed"
    """The files are on disk, nobody refers to them."""
    COMMITTED = "committed"
    """The commit is in the log."""
    FINISHED = "finished"
    """The commit is on disk and the intent is gone, the lease lags."""
    LEASED = "leased"
    """The lease is written."""
    RELEASED = "released"
    """A dropped collection's table has no lease any more."""
    RETIRED = "retired"
    """A dropped collection's table is renamed."""


OnStep = Callable[[Step], None]
"""Called at each step as it is reached; does nothing outside tests."""
