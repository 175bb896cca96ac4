"""Gives each append its tick, and tells readers of it once it is durable and everything below it has ended.

From `allocate` to the log's queue nothing suspends, so position order is tick order is durability order. What became of a
group that reached the queue is decided by its ticket alone, whoever still listens: an append that is cancelled there is
confirmed when it turns out durable, and stops all later ticks when nobody can know.
"""

import asyncio
from collections.abc import Awaitable, Callable

import anyio

from interceptors.acks import Acker, AckManager, MvccManager, Unpromised
from wal.errors import ChannelFenced, Indeterminate, OnShutdown, StreamingNodeError
from wal.failpoint import failpoint
from wal.headers import MessageType, TimeTickHeader
from wal.log import Append, AppendGroup, AppendResult, AppendTicket
from wal.message import LogEntry, MutableMessage, into_entry
from wal.tasks import event_log
from wal.timetick import add_ms

OldestOpenBegin = Callable[[], int | None]
"""Position of the oldest begin among the open transactions, those in the log's queue and recovered ones too; None without.

That is where a reader of the next entry resumes: position order is tick order, so all it could miss are bodies that came
before and take place later.
"""


class TimeTickInterceptor:
    """The tick and the last-confirmed position of every append of one log."""

    name = "timetick"

    def __init__(
        self,
        *,
        wal_name: str,
        acks: AckManager,
        mvcc: MvccManager,
        oldest_open_begin: OldestOpenBegin,
    ) -> None:
        self._wal_name = wal_name
        self._acks = acks
        self._mvcc = mvcc
        self._oldest_open_begin = oldest_open_begin

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append at a new tick."""
        acker = self._acks.allocate()
        group.stamp_time_tick(acker.tick, self._oldest_open_begin())
        failpoint("append.stamped")
        try:
            return await append(group)
        finally:
            self._decide(group, acker)

    async def ready(self) -> None:
        """The term's first tick is durable before the chain is built."""

    async def close(self) -> None:
        """Nothing to do: acknowledgements come from the log."""

    def _decide(self, group: AppendGroup, acker: Acker) -> None:
        ticket = group.ticket
        if ticket is None:
            self._acks.fail(acker)
            return
        entry = self._entry(group, ticket)  # now: the appender may use its messages again once it has the result
        if ticket.durable.done():
            self._acknowledge(acker, entry, ticket.durable)
        else:
            ticket.durable.add_done_callback(lambda durable: self._acknowledge(acker, entry, durable))

    def _acknowledge(self, acker: Acker, entry: LogEntry, durable: asyncio.Future[None]) -> None:
        if durable.cancelled() or durable.exception() is not None:
            self._acks.abandon(acker)
            return
        failpoint("append.confirming")
        self._mvcc.update(entry)
        self._acks.confirm(acker, entry)
        failpoint("append.published")

    def _entry(self, group: AppendGroup, ticket: AppendTicket) -> LogEntry:
        return into_entry(
            group.messages,
            wal_name=self._wal_name,
            first_position=ticket.first_position,
            crc32c=ticket.crc32c,
            size_bytes=ticket.size_bytes,
            producer=group.producer,
        )


# --- sync operator ---
#
# Ticks without rows: they tell readers of an idle log how far it is complete, and answer "consistent up to when?".
#
# Such a tick is in no entry, so before a reader hears of it the store remembers that no later term may go below it. That is
# written a moment ahead, by a thread: most ticks then have nothing to wait for, and the event loop never has.


PROMISED_AHEAD_MS = 1_000
"""An idle log syncs a page this often. The next opening's ticks begin above it, ahead of the clock by as much."""


class TimeTickSyncOperator:
    """Makes one log's readers advance. `source_id` names the node in ticks that are written to the log.

    `promise_tick` has the store remember a tick; see `LogStore.promise_tick`.
    """

    def __init__(self, acks: AckManager, *, promise_tick: Callable[[int], Awaitable[None]], source_id: str) -> None:
        self._acks = acks
        self._promise_tick = promise_tick
        self._source_id = source_id
        self._promising = asyncio.Lock()

    @property
    def confirmed_tick(self) -> int:
        """Everything at or below it has ended, and readers have been told."""
        return self._acks.confirmed_tick

    async def sync(self) -> int:
        """Return a new confirmed tick, above every append that was acknowledged before the call.

        Waits for the appends in flight, costs an fsync a second at most, and readers have been told of the tick when it
        returns. Cancelling leaves nothing behind. Raises `Indeterminate` when an append in flight has no known outcome, and
        what keeps the store from remembering the tick.
        """
        await asyncio.sleep(0)  # on an idle log nothing else suspends, and a loop of this would let nobody run
        while True:
            try:
                tick = self._acks.mark()
            except Unpromised as unpromised:
                await self.promise(unpromised.tick)
            else:
                await self._acks.confirmed(tick)
                return tick

    async def promise(self, tick: int) -> None:
        """Let ticks be marked up to `tick`, and a moment further. Raises what the store raises."""
        async with self._promising:
            if tick > self._acks.promised_tick:
                promised_tick = add_ms(tick, PROMISED_AHEAD_MS)
                await self._promise_tick(promised_tick)
                self._acks.promised_tick = promised_tick

    async def consistent_tick(self, *, at_least: int = 0) -> int:
        """Return what `sync` does, at or above `at_least`, which must be a tick of this node's allocator."""
        tick = await self.sync()
        while tick < at_least:
            tick = await self.sync()
        return tick

    async def persist(self, append: Append) -> int:
        """Append a tick message, so that readers of the log itself find it, and return its tick. Raises as `append`."""
        message = MutableMessage(MessageType.TIME_TICK, TimeTickHeader(source_id=self._source_id))
        result = await append(AppendGroup([message]))
        return result.time_tick


# --- inspector ---
#
# The timer of idle ticks: syncs a log at an interval, and at once when someone asks.
#
# One sync at a time, and no request is lost: one that comes during a sync runs another when it ends.


INTERVAL_S = 0.2
"""How long an idle log may keep its readers waiting."""

_ENDED = (ChannelFenced, Indeterminate, OnShutdown)
_log = event_log(__name__)


class TimeTickInspector:
    """Drives the sync operator of one log; made and used on the event loop."""

    def __init__(self, operator: TimeTickSyncOperator, *, interval_s: float = INTERVAL_S) -> None:
        self._operator = operator
        self._interval_s = interval_s
        self._wanted = asyncio.Event()
        self._persist_wanted = False
        self.syncs = 0

    def trigger(self) -> None:
        """Ask for an idle tick now."""
        self._wanted.set()

    def trigger_persisted(self) -> None:
        """Ask for a tick in the log now."""
        self._persist_wanted = True
        self._wanted.set()

    async def run(self, append: Append) -> None:
        """Sync until cancelled, or until the log takes no more: closed, fenced, or failed in a write."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._sync(append)
            except _ENDED as error:
                _log.info("idle_ticks_ended", reason=str(error))
                return
            except StreamingNodeError as error:  # a full disk refuses ticks too; the next interval tries again
                _log.warning("tick_not_written", error=str(error))

    async def _sync(self, append: Append) -> None:
        if self._persist_wanted:
            self._persist_wanted = False
            try:
                await self._operator.persist(append)
            except BaseException:
                self._persist_wanted = True
                raise
        else:
            await self._operator.sync()
        self.syncs += 1
