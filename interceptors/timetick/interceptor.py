"""Gives each append its tick, and tells readers of it once it is durable and everything below it has ended.

From `allocate` to the log's queue nothing suspends, so position order is tick order is durability order. What became of a
group that reached the queue is decided by its ticket alone, whoever still listens: an append that is cancelled there is
confirmed when it turns out durable, and stops all later ticks when nobody can know.
"""

import asyncio
from collections.abc import Callable

from interceptors.timetick.ack_manager import Acker, AckManager
from interceptors.timetick.mvcc import MvccManager
from wal.append import Append, AppendGroup, AppendResult, AppendTicket
from wal.failpoint import failpoint
from wal.message import LogEntry, into_entry

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
