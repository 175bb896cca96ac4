"""What callers get back for a write. No I/O."""

from collections.abc import Sequence

from msgspec.structs import replace

from wal.append import AppendResult
from wal.position import MessageId

WriteResult = AppendResult


def nothing_at(tick: int) -> WriteResult:
    """Return the result of a write without rows, as of a consistent tick: whoever reads on from there misses nothing."""
    return WriteResult(kind=MessageId, first_position=0, count=0, time_tick=tick, last_confirmed_position=0)


def combined(results: Sequence[WriteResult]) -> WriteResult:
    """Return the result of a write that took these groups, at least one, in order."""
    if len(results) == 1:
        return results[0]
    row_offsets: dict[str, tuple[int, int]] = {}
    for result in results:
        for vchannel, (first, count) in result.row_offsets.items():
            known_first, known_count = row_offsets.get(vchannel, (first, 0))
            row_offsets[vchannel] = known_first, known_count + count
    return replace(
        results[-1], row_offsets=row_offsets, durable=all(result.durable for result in results), groups=tuple(results)
    )
