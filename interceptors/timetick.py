"""Gives each append its tick, and publishes it to readers once it is durable and every append below
it has ended.

Nothing suspends from `allocate` to the log's queue, so positions, ticks and durability have the
same order. The ticket alone decides the outcome of a group that reached the queue, even if its
caller was cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
import msgspec

from interceptors.chain import Interceptor
from wal.append import Append, AppendPack, Pack
from wal.entry import LogEntry
from wal.errors import Ends, OnShutdown, StreamingNodeError
from wal.failpoint import failpoint
from wal.headers import CommitTxnHeader, MessageType
from wal.live_tail import LiveTail
from wal.runtime import event_log
from wal.timetick import TickAllocator, add_ms

INTERVAL_S = 0.2
"""How often readers of an idle log get a new confirmed tick."""
PROMISED_AHEAD_MS = 1_000
"""How far the promised tick is ahead of the newest one; an idle log syncs a page this often.

The ahead time doubles while a sync takes longer than it. The next term's ticks begin above the
promised tick.
"""

_log = event_log(__name__)


class VChannelMvcc(NamedTuple):
    """A read of `vchannel` at `time_tick` sees all its changes; readers have reached that tick if
    `confirmed`.
    """

    vchannel: str
    time_tick: int
    confirmed: bool


class MvccManager:
    """The newest tick at which each vchannel changed in this term; `first_tick` stands for all
    earlier changes.

    A transaction changes its vchannels at its commit. The ack manager sets `confirmed_tick`: every
    tick at or below it is confirmed. `updates` counts the changes of ticks.
    """

    def __init__(self, first_tick: int) -> None:
        self._first_tick = self.confirmed_tick = first_tick
        self._ticks: dict[str, int] = {}
        self.updates = 0

    def update(self, entry: LogEntry) -> None:
        """Record a durable entry, before or after it is confirmed; entries come in any order."""
        if entry.rows is not None:
            for batch in entry.rows.batches:
                self._changed(batch.vchannel, int(entry.rows.ticks[batch.groups[-1]]))
        for message in entry.messages:
            if message.type is MessageType.DROP_COLLECTION:
                self._ticks.pop(message.vchannel, None)
            elif isinstance(message.header, CommitTxnHeader):
                for vchannel in message.header.vchannels:
                    self._changed(vchannel, entry.time_tick)
            elif message.vchannel and not message.txn_id:
                self._changed(message.vchannel, entry.time_tick)

    def of(self, vchannel: str) -> VChannelMvcc:
        """Return the tick of a vchannel; the term's first tick if it has not changed in this
        term.
        """
        tick = self._ticks.get(vchannel, self._first_tick)
        return VChannelMvcc(vchannel, tick, tick <= self.confirmed_tick)

    def all_vchannels(self) -> list[VChannelMvcc]:
        """Return the ticks of the vchannels that changed in this term, by name."""
        return [self.of(vchannel) for vchannel in sorted(self._ticks)]

    def _changed(self, vchannel: str, tick: int) -> None:
        if tick > self._ticks.get(vchannel, 0):
            self._ticks[vchannel] = tick
            self.updates += 1


class Acker(msgspec.Struct, eq=False):
    """Ticks whose outcome is open: those of an append, or the single one of a mark.

    An append has one tick for each of its groups, from `first` to `tick`, and they end together. A
    mark has no `entry`; callers wait for its `confirmed`.
    """

    first: int
    tick: int
    ended: bool = False
    entry: LogEntry | None = None
    confirmed: asyncio.Future[None] | None = None


class AckManager:
    """The ticks of one log in this term: acknowledged in any order, given to readers in tick order.

    Every append at or below `confirmed_tick` has ended. One whose outcome is unknown never does, so
    nothing at or above its tick is confirmed in this term.
    """

    def __init__(
        self, ticks: TickAllocator, *, confirmed_tick: int, tail: LiveTail, mvcc: MvccManager
    ) -> None:
        assert confirmed_tick > 0, "a term starts with a tick"
        self.confirmed_tick = confirmed_tick
        self.promised_tick = 0
        """Every later term starts above it, so readers may get ticks without an entry up to it; it
        only rises.
        """
        self.ticks = ticks
        self._tail = tail
        self._mvcc = mvcc
        self._pending: deque[Acker] = deque()  # allocated in ascending order, hence no heap
        self._indeterminate_tick = 0
        """The smallest tick whose outcome is unknown, 0 while there is none."""

    @property
    def oldest_pending_tick(self) -> int | None:
        """The smallest tick that is not confirmed; None when idle."""
        return self._pending[0].first if self._pending else None

    @property
    def pending(self) -> int:
        """How many allocated ticks are not confirmed."""
        return len(self._pending)

    def allocate(self, count: int = 1) -> Acker:
        """Return `count` new ticks; they end once, by `confirm`, `fail` or `abandon`."""
        first = self.ticks.allocate(count)
        acker = Acker(first, first + count - 1)
        self._pending.append(acker)
        return acker

    def confirm(self, acker: Acker, entry: LogEntry) -> None:
        """Record that the append is durable as `entry`."""
        assert entry.time_tick == acker.tick, "an entry confirms its own tick"
        acker.entry = entry
        self._mvcc.update(entry)
        self._end(acker)

    def fail(self, acker: Acker) -> None:
        """Record that the append certainly did not happen; its tick is never published."""
        self._end(acker)

    def abandon(self, acker: Acker) -> None:
        """Record that the append's outcome is unknown: from now on nothing at or above its tick is
        confirmed.
        """
        assert not acker.ended, "an append ends once"
        self._confirm_nothing_from(acker.first)

    def end(self) -> None:
        """End the term: fail every wait for one of its ticks; idempotent."""
        self._confirm_nothing_from(self.confirmed_tick + 1)

    def mark(self) -> Acker | None:
        """Return a tick above every allocated one, confirmed once those have ended; None if it is
        above the promised tick.
        """
        if self._indeterminate_tick:
            raise self._unreachable(self.ticks.last + 1)
        if self._pending and self._pending[-1].confirmed is not None:
            return self._pending[-1]  # no append came since the last mark, so both are one
        mark = self.allocate()
        if mark.tick > self.promised_tick:
            self._pending.pop()  # no caller has this tick, so it needs no end
            return None
        mark.confirmed = asyncio.get_running_loop().create_future()
        self._end(mark)
        return mark

    def _end(self, acker: Acker) -> None:
        assert not acker.ended, "an append ends once"
        acker.ended = True
        pending = self._pending
        if pending[0] is not acker:
            return
        while pending and pending[0].ended:
            ended = pending.popleft()
            if ended.entry is not None:
                self._tail.append(ended.entry)
            elif ended.confirmed is not None:
                self._tail.advance(ended.tick)
                if not ended.confirmed.done():
                    ended.confirmed.set_result(None)
            self.confirmed_tick = ended.tick
        self._mvcc.confirmed_tick = self.confirmed_tick

    def _confirm_nothing_from(self, tick: int) -> None:
        if self._indeterminate_tick and self._indeterminate_tick <= tick:
            return
        self._indeterminate_tick = tick
        for acker in self._pending:
            if acker.tick >= tick and acker.confirmed is not None and not acker.confirmed.done():
                acker.confirmed.set_exception(self._unreachable(acker.tick))
                acker.confirmed.exception()  # marks it as retrieved: its waiters may be gone

    def _unreachable(self, tick: int) -> OnShutdown:
        return OnShutdown(
            f"tick {tick} is not confirmed: the term ended at the append of "
            f"{self._indeterminate_tick}"
        )


class TimeTickInterceptor(Interceptor):
    """Stamps every append of one log with its ticks and its last-confirmed position."""

    name = "timetick"

    def __init__(self, *, acks: AckManager, oldest_open_begin: Callable[[], int | None]) -> None:
        self._acks = acks
        self._oldest_open_begin = oldest_open_begin

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append at new ticks, one for each group."""
        acker = self._acks.allocate(len(pack.groups))
        # A reader of this entry resumes at the oldest open begin, so that it gets the bodies of
        # open transactions that lie before the entry.
        pack.stamp(acker.tick, self._oldest_open_begin())
        failpoint("append.stamped")
        try:
            await append(pack)
        finally:
            self._decide(pack, acker)

    def _decide(self, pack: Pack, acker: Acker) -> None:
        if (ticket := pack.ticket) is None:
            self._acks.fail(acker)
            return
        entry = pack.entry
        assert entry is not None, "a pack with a ticket has its entry"
        if ticket.durable.done():
            self._acknowledge(acker, entry, ticket.durable)
        else:
            ticket.durable.add_done_callback(
                lambda durable: self._acknowledge(acker, entry, durable)
            )

    def _acknowledge(self, acker: Acker, entry: LogEntry, durable: asyncio.Future[None]) -> None:
        if durable.cancelled() or durable.exception() is not None:
            self._acks.abandon(acker)
        else:
            failpoint("append.confirming")
            self._acks.confirm(acker, entry)
            failpoint("append.published")


class TimeTickSyncOperator:
    """Publishes confirmed ticks to readers of an idle log, and returns them to callers of `sync`.

    Its ticks are in no entry. So before a tick is published, the store persists (`promise_tick`)
    that every later term starts above it. A thread writes that promise ahead of time, so most ticks
    need not wait for it.
    """

    def __init__(self, acks: AckManager, *, promise_tick: Callable[[int], Awaitable[None]]) -> None:
        self._acks = acks
        self._promise_tick = promise_tick
        self._promising = asyncio.Lock()

    async def sync(self) -> int:
        """Return a new confirmed tick, above every append that was acknowledged before the call.

        The tick is published to readers on return. Raises `OnShutdown` when the outcome of an
        append in flight is unknown, and the store's error when it cannot persist the promise.
        """
        # On an idle log nothing below suspends: without this, calls in a loop would starve all
        # other tasks.
        await asyncio.sleep(0)
        ahead_ms = PROMISED_AHEAD_MS
        while (mark := self._acks.mark()) is None:
            async with self._promising:
                if (tick := self._acks.ticks.last) > self._acks.promised_tick:
                    promised_tick = add_ms(tick, ahead_ms)
                    await self._promise_tick(promised_tick)
                    self._acks.promised_tick = promised_tick
            ahead_ms *= 2  # if the sync took longer than this, the clock has passed the promise
        assert mark.confirmed is not None, "a mark has a future"
        await asyncio.shield(mark.confirmed)
        return mark.tick


class TimeTickInspector:
    """Syncs a log at an interval; made and used on the event loop."""

    def __init__(self, operator: TimeTickSyncOperator, *, interval_s: float = INTERVAL_S) -> None:
        self._operator = operator
        self._interval_s = interval_s

    async def run(self, append: Append) -> None:
        """Sync until cancelled, or until the log takes no more appends: it is closed, fenced, or
        failed in a write.
        """
        while True:
            await anyio.sleep(self._interval_s)
            try:
                await self._operator.sync()
            except StreamingNodeError as error:
                if error.ends is not Ends.CALL:
                    return
                # the promise cannot be written now; the next interval tries again
                _log.warning("tick_not_written", error=str(error))
