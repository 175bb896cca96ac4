"""What callers get back for a write, and which part of a group each insert that went together with others gets. No I/O."""

from collections.abc import Mapping, Sequence
from itertools import islice, repeat

import msgspec

from streamingnode.rows import Routed
from wal.log import AppendResult
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
    message_ids: tuple[MessageId, ...]
    txn_id: int = 0
    durable: bool = True
    groups: tuple["WriteResult", ...] = ()


def nothing_at(tick: int) -> WriteResult:
    """Return the result of a write without rows, as of a consistent tick: whoever reads on from there misses nothing."""
    return WriteResult(time_tick=tick, row_offsets={}, message_ids=())


def result_of(appended: AppendResult) -> WriteResult:
    """Return the result of a write that is one append group."""
    return WriteResult(
        time_tick=appended.time_tick,
        row_offsets=dict(appended.row_offsets),
        message_ids=appended.message_ids,
        txn_id=appended.txn_id,
        durable=appended.durable,
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
        message_ids=tuple(message_id for result in results for message_id in result.message_ids),
        txn_id=results[-1].txn_id,
        durable=all(result.durable for result in results),
        groups=tuple(results),
    )


def share_result(
    appended: AppendResult, routed: Routed, vchannels: Sequence[str], row_counts: Sequence[int]
) -> list[WriteResult]:
    """Return each caller's result; the group had one insert message for each of `routed.parts`, in order."""
    next_offset = {vchannel: first for vchannel, (first, _) in appended.row_offsets.items()}
    message_ids = {shard: each for (shard, _), each in zip(routed.parts, appended.message_ids, strict=True)}
    shards = routed.shard_of_row
    shard_of_row = repeat(routed.parts[0][0]) if shards is None else iter(shards.tolist())
    results = []
    for count in row_counts:
        rows_of: dict[int, int] = {}
        for shard in islice(shard_of_row, count):
            rows_of[shard] = rows_of.get(shard, 0) + 1
        offsets = {}
        for shard, rows in rows_of.items():
            vchannel = vchannels[shard]
            offsets[vchannel] = next_offset[vchannel], rows
            next_offset[vchannel] += rows
        results.append(
            WriteResult(
                time_tick=appended.time_tick,
                row_offsets=offsets,
                message_ids=tuple([message_ids[shard] for shard in sorted(rows_of)]),
                durable=appended.durable,
            )
        )
    return results
