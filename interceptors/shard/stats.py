"""How full a growing segment is, against its own limits. Pure.

The limits are soft: the insert that crosses one is taken, and the segment takes no more after it. So no insert is ever too
large for a segment, and hitting a limit exactly keeps the segment open.
"""

from typing import Self

import msgspec


class SegmentStats(msgspec.Struct, array_like=True):
    """Rows and payload bytes of one segment; a `rows_max` of 0 is no limit, `changed_tick` is 0 before the first rows."""

    bytes_max: int
    rows_max: int = 0
    rows: int = 0
    bytes: int = 0
    changed_tick: int = 0

    @property
    def reached(self) -> bool:
        """Whether a limit is crossed and the segment takes no more."""
        return self.bytes > self.bytes_max or 0 < self.rows_max < self.rows

    def add(self, rows: int, size_bytes: int, tick: int) -> Self:
        """Count rows that are in the segment since `tick`."""
        self.rows += rows
        self.bytes += size_bytes
        self.changed_tick = tick
        return self
