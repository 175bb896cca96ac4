"""What a collection should be, for the model: changes by tick, and what messages say, in one form
to compare.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from streamingnode.read_message import ReadMessage
from wal.headers import MessageType

DEFAULT = "_default"

Row = tuple[int, int]
Change = tuple[str, tuple[Row, ...] | tuple[int, ...]]
"""`insert` with rows, or `delete` with keys."""
Normal = tuple[int, tuple[tuple[str, Counter[object]], ...]]
"""A tick and what happened at it, without the order of rows across shards, which is not
promised.
"""


@dataclass
class Expected:
    """One collection as it should be: its changes by tick, in order, and what of it was dropped."""

    changes: list[tuple[int, tuple[Change, ...]]] = field(default_factory=list)
    partitions: set[str] = field(default_factory=lambda: {DEFAULT})
    partition_of: dict[int, str] = field(default_factory=dict)
    """By value: where a row is that is not in the default partition. A value is written once."""
    gone: set[int] = field(default_factory=set)
    """Values of rows that went with their partition."""
    partition_dropped_at: int = 0
    acknowledged: int | None = None
    """Up to where the named reader has acknowledged; None before it was first opened."""

    def state(self, up_to: int) -> Counter[Row]:
        """The rows that live at a tick."""
        rows: list[Row] = []
        for tick, changes in self.changes:
            for kind, content in changes if tick <= up_to else ():
                if kind == "insert":
                    rows += content  # type: ignore[arg-type]  # an insert's content is rows
                else:
                    rows = [row for row in rows if row[0] not in content]
        return Counter(row for row in rows if row[1] not in self.gone)

    def drop_partition(self, partition: str) -> None:
        """Forget the rows of a partition."""
        self.partitions.remove(partition)
        self.gone.update(value for value, place in self.partition_of.items() if place == partition)


def as_dicts(rows: Iterable[Row]) -> list[dict[str, int]]:
    return [{"key": key, "value": value} for key, value in rows]


def message_changes(message: ReadMessage) -> tuple[tuple[str, Counter[object]], ...]:
    """What a message says, without the order of rows across shards, which is not promised."""
    parts = message.bodies or (message,)
    merged: list[tuple[str, Counter[object]]] = []
    for part in parts:
        table = part.to_arrow()
        assert table is not None
        kind = "insert" if part.type is MessageType.INSERT else "delete"
        content: list[object] = table["key"].to_pylist()
        if kind == "insert":
            content = list(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        merged.append((kind, Counter(content)))
    return tuple(merged)


def without_order(changes: tuple[Change, ...]) -> tuple[tuple[str, Counter[object]], ...]:
    return tuple((kind, Counter(content)) for kind, content in changes)
