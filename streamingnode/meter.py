"""What a node measures by itself and gathers from its parts.

`AppendMeter` hears what the WAL and the chain observe, over all terms of the log: outcomes, latency, sizes and, when asked
for, where in the chain the time goes. A user's own observer hears everything too, after it was counted here; about 2 us for
each append group of one message, on the event loop. `NodeMeter` asks the parts of a node and makes one picture of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flusher.flusher import Flusher
from streamingnode.channel import Channel
from streamingnode.statistics import (
    AppendStatistics,
    InterceptorStatistics,
    NodeStatistics,
    SpaceLevelName,
    SpaceStatistics,
    TailStatistics,
    TickStatistics,
    WriteStatistics,
)
from streamingnode.writing.coalescer import Coalescer
from wal.log import AppendGroup, AppendObserver
from wal.measure import Histogram, Rate
from wal.rocks.space import SpaceLevel
from wal.rocks.store import RocksStore
from wal.timetick import physical_ms


class AppendMeter:
    """Counts and times the appends of a node; lives on its event loop."""

    def __init__(
        self, forward_to: AppendObserver | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._forward_to = forward_to
        self._ended = {"ok": 0, "error": 0, "cancel": 0}
        self._seconds = Histogram()
        self._message_bytes = Histogram()
        self._messages = Rate(clock)
        self._bytes = Rate(clock)
        self._before: dict[str, Histogram] = {}
        self._after: dict[str, Histogram] = {}

    def append_ended(self, group: AppendGroup, seconds: float, status: str) -> None:
        """Count an append; only those that succeeded are timed and sized."""
        self._ended[status] += 1
        if status == "ok":
            self._seconds.record(seconds)
            self._messages.add(len(group.messages))
            group_bytes = 0
            for message in group.messages:
                size_bytes = message.size_bytes
                group_bytes += size_bytes
                self._message_bytes.record(size_bytes)
            self._bytes.add(group_bytes)
        if self._forward_to is not None:
            self._forward_to.append_ended(group, seconds, status)

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        """Time one interceptor of one append."""
        if name not in self._before:
            self._before[name], self._after[name] = Histogram(), Histogram()
        self._before[name].record(before_s)
        if not failed_before:
            self._after[name].record(after_s)
        if self._forward_to is not None:
            self._forward_to.interceptor_timed(name, before_s, after_s, failed_before=failed_before)

    def statistics(self, *, in_flight: int) -> AppendStatistics:
        """Return what was measured so far."""
        return AppendStatistics(
            succeeded=self._ended["ok"],
            failed=self._ended["error"],
            cancelled=self._ended["cancel"],
            in_flight=in_flight,
            messages=self._messages.total,
            messages_per_s=self._messages.per_second,
            bytes=self._bytes.total,
            bytes_per_s=self._bytes.per_second,
            seconds=self._seconds.distribution(),
            message_bytes=self._message_bytes.distribution(),
            interceptors=tuple(
                InterceptorStatistics(
                    name=name, before_s=before.distribution(), after_s=self._after[name].distribution()
                )
                for name, before in self._before.items()
            ),
        )


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
            log=channel.wal.status,
            appends=self.appends.statistics(in_flight=channel.wal.in_flight),
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
