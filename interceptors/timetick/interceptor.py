"""Gives each append its tick, and tells readers of it once it is durable and everything below it has ended.

From `allocate` to the log's queue nothing suspends, so position order is tick order is durability order. What became of a
group that reached the queue is decided by its ticket alone, whoever still listens: an append that is cancelled there is
confirmed when it turns out durable, and stops all later ticks when nobody can know.
"""

import asyncio
from collections.abc import Awaitable, Callable

from interceptors.redo import Redo
from interceptors.timetick.ack_manager import Acker, AckManager, Unpromised
from interceptors.timetick.mvcc import MvccManager
from wal.append import Append, AppendGroup, AppendResult, AppendTicket
from wal.errors import InvalidArgument
from wal.failpoint import failpoint
from wal.message import LogEntry, into_entry
from wal.timetick import CLOCK_LEAP_MS_MAX, TickAllocator, physical_ms

OldestOpenBegin = Callable[[], int | None]
"""Position of the oldest begin among the open transactions, those in the log's queue and recovered ones too; None without.

That is where a reader of the next entry resumes: position order is tick order, so all it could miss are bodies that came
before and take place later.
"""


class TimeTickInterceptor:
    """The tick and the last-confirmed position of every append of one log.

    `promise` lets ticks without an entry be confirmed up to one; see `TimeTickSyncOperator.promise`.
    """

    name = "timetick"

    def __init__(
        self,
        *,
        wal_name: str,
        ticks: TickAllocator,
        acks: AckManager,
        mvcc: MvccManager,
        oldest_open_begin: OldestOpenBegin,
        promise: Callable[[int], Awaitable[None]],
    ) -> None:
        self._wal_name = wal_name
        self._ticks = ticks
        self._acks = acks
        self._mvcc = mvcc
        self._oldest_open_begin = oldest_open_begin
        self._promise = promise

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append at a new tick, above the group's barrier.

        Raises `Redo` while something at or below the barrier is not confirmed, `InvalidArgument` for a barrier that no
        clock can have given.
        """
        if group.barrier_tick > self._acks.confirmed_tick:
            self._reach(group.barrier_tick)
        acker = self._acks.allocate()
        group.stamp_time_tick(acker.tick, self._oldest_open_begin())
        failpoint("append.stamped")
        try:
            return await append(group)
        finally:
            self._decide(group, acker)

    async def ready(self) -> None:
        """The term's first tick is durable before the chain is built."""

    async def graceful_close(self) -> None:
        """Nothing to do: acknowledgements come from the log."""

    async def close(self) -> None:
        """Nothing to let go of."""

    def _reach(self, barrier_tick: int) -> None:
        """Confirm up to the barrier if nothing is in the way; otherwise raise `Redo` until it is out of the way."""
        ahead_ms = physical_ms(barrier_tick) - physical_ms(self._ticks.last)
        if ahead_ms > CLOCK_LEAP_MS_MAX:
            raise InvalidArgument(
                f"barrier tick {barrier_tick} is {ahead_ms // 1000} s ahead of this node — "
                "use a tick that a node has given out, and check the clocks"
            )
        self._ticks.observe(barrier_tick)
        try:
            self._acks.mark()
        except Unpromised as unpromised:
            waiting_for = f"a promise of ticks up to barrier tick {barrier_tick}"
            raise Redo(self._promise(unpromised.tick), waiting_for=waiting_for) from None
        if self._acks.confirmed_tick < barrier_tick:
            raise Redo(self._acks.confirmed(barrier_tick), waiting_for=f"everything up to barrier tick {barrier_tick}")

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
