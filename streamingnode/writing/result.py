"""What callers get back for a write. No I/O."""

from collections.abc import Mapping, Sequence

import msgspec

from wal.append import AppendResult
from wal.position import MessageId


class WriteResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of an insert, upsert, delete or transaction that is in the log.

    Everything in it is at `time_tick`. `row_offsets` maps each vchannel to the first row offset and the number of rows
    inserted there; `message_ids` are the log positions of its messages, ascending; `txn_id` is 0 outside a transaction.
    `durable` says whether it was synced when it was acknowledged; with `durability="os"` that follows within the sync
    interval.

    A write over the size of one append group was split into several, each atomic by itself, and `groups` has a result for
    each; `time_tick` is then the last one's, and the rows of a vchannel lie close together only within a group. A write of
    no rows did nothing: its tick is one that everything acknowledged before the call is at or below.
    It holds no cycles and is left out of garbage collection: a busy node makes a hundred thousand a second.
    """

    time_tick: int
    row_offsets: Mapping[str, tuple[int, int]]
    txn_id: int = 0
    durable: bool = True
    groups: tuple["WriteResult", ...] = ()
    appended: AppendResult | None = None

    @property
    def message_ids(self) -> tuple[MessageId, ...]:
        """The positions of the write's messages."""
        if self.groups:
            return tuple(message_id for group in self.groups for message_id in group.message_ids)
        return () if self.appended is None else self.appended.message_ids


def nothing_at(tick: int) -> WriteResult:
    """Return the result of a write without rows, as of a consistent tick: whoever reads on from there misses nothing."""
    return WriteResult(time_tick=tick, row_offsets={})


def result_of(appended: AppendResult) -> WriteResult:
    """Return the result of a write that is one append group."""
    return WriteResult(
        time_tick=appended.time_tick,
        row_offsets=appended.row_offsets,
        txn_id=appended.txn_id,
        durable=appended.durable,
        appended=appended,
    )


def combined(results: Sequence[WriteResult]) -> WriteResult:
    """Return the result of a write that took these groups, at least one, in order."""
    if len(results) == 1:
        return results[0]
    row_offsets: dict[str, tuple[int, int]] = {}
    for result in results:
        for vchannel, (first, count) in result.row_offsets.items():
            known_first, known_count = row_offsets.get(vchannel, (first, 0))
            row_offsets[vchannel] = known_first, known_count + count
    return WriteResult(
        time_tick=results[-1].time_tick,
        row_offsets=row_offsets,
        txn_id=results[-1].txn_id,
        durable=all(result.durable for result in results),
        groups=tuple(results),
    )
