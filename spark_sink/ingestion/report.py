"""What an ingest tells its caller: per table and in all, nothing that was not counted."""

from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[str, int, int], None]
"""Receives (stage, done, total) as an ingest goes on; called from the thread that called `ingest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """What one table took; `first_cut` is 0 when another job had taken everything or there was nothing to take."""

    table: str
    path: str
    first_cut: int
    last_cut: int
    tick: int
    version: int
    rows_added: int = 0
    rows_deleted: int = 0
    files_added: int = 0
    files_removed: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What one `ingest` did. `cut` is the node's newest cut (0: none yet); every table listed is at it or was dropped.

    `node_was_running` says that a process owned the node, so that no cut was asked for and the existing ones were used.
    """

    node_id: str
    cut: int
    tick: int
    node_was_running: bool
    seconds: float
    tables: tuple[TableReport, ...] = field(default=())

    @property
    def rows_added(self) -> int:
        """Rows taken from segments, over all tables, before deletes."""
        return sum(table.rows_added for table in self.tables)

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, over all tables, new ones and old ones."""
        return sum(table.rows_deleted for table in self.tables)
