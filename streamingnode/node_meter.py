"""Gathers what the parts of one node tell about themselves into one picture."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flusher.flusher import Flusher
from streamingnode.append_meter import AppendMeter
from streamingnode.channel import Channel
from streamingnode.statistics import (
    NodeStatistics,
    SpaceLevelName,
    SpaceStatistics,
    TailStatistics,
    TickStatistics,
    WriteStatistics,
)
from streamingnode.writing.coalescer import Coalescer
from wal.rocks.space import SpaceLevel
from wal.rocks.store import RocksStore
from wal.timetick import physical_ms

LEVEL_NAMES: dict[SpaceLevel, SpaceLevelName] = {
    SpaceLevel.AMPLE: "ample",
    SpaceLevel.SHORT: "short",
    SpaceLevel.FULL: "full",
    SpaceLevel.EXHAUSTED: "exhausted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeter:
    """Reads the parts on their event loop; `now_ms` is the clock ticks follow, `clock` one in seconds that never leaps."""

    channel: Channel
    flusher: Flusher
    appends: AppendMeter
    now_ms: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    opened_s: float = field(default_factory=time.monotonic)

    def statistics(self, coalescer: Coalescer) -> NodeStatistics:
        """Return the node's statistics as of now."""
        channel = self.channel
        return NodeStatistics(
            at_ms=self.now_ms(),
            uptime_s=self.clock() - self.opened_s,
            log=channel.status,
            appends=self.appends.statistics(in_flight=channel.term.wal.in_flight),
            ticks=self._ticks(),
            writes=self._writes(coalescer),
            tail=TailStatistics(entries=channel.tail.entry_count, bytes=channel.tail.size_bytes),
            space=self._space(),
            readers=channel.scanners.statistics(),
            flusher=self.flusher.statistics(),
        )

    def _space(self) -> SpaceStatistics | None:
        store = self.channel.store
        if not isinstance(store, RocksStore):
            return None
        verdict = store.space
        return SpaceStatistics(
            level=LEVEL_NAMES[verdict.level],
            free_bytes=verdict.free_bytes,
            needed_bytes=verdict.needed_bytes,
            log_bytes=verdict.log_bytes,
            reserve_bytes=verdict.reserve_bytes,
            queued_bytes=store.queued_bytes,
        )

    def _ticks(self) -> TickStatistics:
        acks, confirmed_tick = self.channel.term.acks, self.channel.term.acks.confirmed_tick
        return TickStatistics(
            last=self.channel.ticks.last,
            confirmed=confirmed_tick,
            lag_s=max(0, self.now_ms() - physical_ms(confirmed_tick)) / 1000,
            ahead_s=self.channel.ticks.ahead_ms / 1000,
            unconfirmed=acks.pending,
            oldest_unconfirmed=acks.oldest_pending_tick or 0,
            mvcc_updates=self.channel.term.mvcc.updates,
        )

    def _writes(self, coalescer: Coalescer) -> WriteStatistics:
        transactions, shards = self.channel.term.transactions, self.channel.shards.state
        pending = self.channel.pending
        return WriteStatistics(
            waiting_rows=coalescer.waiting_rows,
            coalesced_groups_in_flight=coalescer.groups_in_flight,
            open_transactions=transactions.live,
            open_transaction_bytes=transactions.size_bytes,
            pending_bytes_max=pending.bytes_max,
            pending_row_bytes=pending.rows.held_bytes,
            pending_append_bytes=pending.appends.held_bytes,
            pending_transaction_bytes=pending.transactions.held_bytes,
            growing_segments=len(shards.segments),
            growing_segment_bytes=shards.growing_bytes,
        )
