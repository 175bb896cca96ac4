"""Who gets which row offsets when the rows of several callers went into the log as one append group. Pure.

In: the group's result and how many rows each caller had. Out: a result for each caller, in order: rows of one shard keep
their order, so a caller's rows are contiguous on every vchannel.
"""

from collections.abc import Sequence

import numpy as np

from streamingnode.rows.routing import Routed
from streamingnode.writing.results import WriteResult
from wal.append import AppendResult


def share_result(
    appended: AppendResult, routed: Routed, vchannels: Sequence[str], row_counts: Sequence[int]
) -> list[WriteResult]:
    """Return each caller's result; the group had one insert message for each of `routed.parts`, in order."""
    if routed.shard_of_row is None:
        return _share_one_shard(appended, vchannels[routed.parts[0][0]], row_counts)
    shards = routed.shard_of_row.tolist()
    ranks = _ranks(routed)
    message_of_shard = {shard: index for index, (shard, _) in enumerate(routed.parts)}
    results, start = [], 0
    for count in row_counts:
        offsets: dict[str, tuple[int, int]] = {}
        touched = set()
        for shard, rank in zip(shards[start : start + count], ranks[start : start + count], strict=True):
            vchannel = vchannels[shard]
            first, rows = offsets.get(vchannel, (appended.row_offsets[vchannel][0] + rank, 0))
            offsets[vchannel] = first, rows + 1
            touched.add(message_of_shard[shard])
        ids = appended.message_ids
        results.append(
            WriteResult(
                time_tick=appended.time_tick,
                row_offsets=offsets,
                message_ids=tuple(ids[index] for index in sorted(touched)),
                durable=appended.durable,
            )
        )
        start += count
    return results


def _share_one_shard(appended: AppendResult, vchannel: str, row_counts: Sequence[int]) -> list[WriteResult]:
    tick, ids, durable = appended.time_tick, appended.message_ids, appended.durable
    first, _ = appended.row_offsets[vchannel]
    results = []
    for count in row_counts:
        offsets = {vchannel: (first, count)}
        results.append(WriteResult(time_tick=tick, row_offsets=offsets, message_ids=ids, durable=durable))
        first += count
    return results


def _ranks(routed: Routed) -> list[int]:
    """Return, for each row, how many rows of its shard come before it."""
    assert routed.shard_of_row is not None
    ranks = np.empty(len(routed.shard_of_row), np.int64)
    for shard, part in routed.parts:
        ranks[routed.shard_of_row == shard] = np.arange(part.num_rows)
    return ranks.tolist()
