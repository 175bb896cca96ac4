"""Recognises retries, in front of everything that costs something: a retry waits for no lock and gets no tick.

In comes a stamped group. If its write is in the window, its first result goes back. If another try of it is under way, this
one waits for that outcome. Otherwise it passes, as the first try, and what becomes of it is remembered. A group that is
the producer's next write, whichever that will be, passes too and is given its sequence where it goes to the log. A try
that was cancelled after the log had it is decided by its ticket alone, as everywhere; one that never reached the log leaves
no trace, and whoever waits for it comes next. Groups without a stamp pass untouched.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from interceptors.idempotency.results import result_of_group
from interceptors.idempotency.window import Places, Window
from wal.append import Append, AppendGroup, AppendResult, AppendTicket
from wal.errors import Indeterminate
from wal.message_id import MessageId
from wal.producer_stamp import Place, ProducerStamp


class _Try:
    """A first try under way; `waiting` is made when somebody waits for it."""

    __slots__ = ("group", "waiting")

    def __init__(self, group: AppendGroup) -> None:
        self.group = group
        self.waiting: asyncio.Future[AppendResult | None] | None = None

    async def outcome(self) -> AppendResult | None:
        """Return the try's result, None when it was given up before the log had it. Raises what it raised."""
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.waiting)

    def succeed(self, result: AppendResult | None) -> None:
        if self.waiting is not None:
            self.waiting.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self.waiting is not None:
            self.waiting.set_exception(error)
            self.waiting.exception()  # counts as heard: its waiters may all have been cancelled


class IdempotencyInterceptor:
    """Wraps the append path with the window of its log. Lives on the event loop."""

    name = "idempotency"

    def __init__(self, window: Window, places: Places, message_id: type[MessageId]) -> None:
        self.window = window
        self._places = places
        self._message_id = message_id
        self._under_way: dict[tuple[int, int], _Try] = {}

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append a write that is not in the log yet, once.

        Cancelling a retry that waits for another try leaves that one alone. Raises `ProducerFenced` and `SequenceTooOld`,
        and for a retry what the try it joined raised.
        """
        stamp = group.producer
        if stamp is None:
            return await append(group)
        if not stamp.sequence:
            return await self._append_next(group, append, stamp)
        known = self.window.find(stamp)
        while known is None and (other := self._under_way.get((stamp.producer_id, stamp.sequence))) is not None:
            group.twin = other.group
            known = await other.outcome() or self.window.find(stamp)
        if known is not None:
            return known
        group.twin = None
        attempt = self._under_way[stamp.producer_id, stamp.sequence] = _Try(group)
        return await self._run(attempt, append)

    async def ready(self) -> None:
        """Return at once: the window is recovered before the chain is built."""

    async def close(self) -> None:
        """Nothing to do: what waits here waits for an append that ends by itself."""

    async def settled(self, producer_id: int) -> None:
        """Return once no write of this producer is under way; fence it first, or new ones may come."""
        while tries := [each for key, each in self._under_way.items() if key[0] == producer_id]:
            with suppress(Exception):  # it is its appender's; here only its end matters
                await tries[0].outcome()

    async def _append_next(self, group: AppendGroup, append: Append, stamp: ProducerStamp) -> AppendResult:
        """Append a write that nobody can have sent before, because its sequence is drawn with its place in the log."""
        self.window.check_epoch(stamp)
        attempt = _Try(group)

        def draw() -> None:
            self.window.check_epoch(stamp)  # it may have been fenced since, and `settled` knows only what is under way
            drawn = group.producer = self._places.draw(stamp.producer_id, stamp.epoch)
            group.draw = None
            self._under_way[drawn.producer_id, drawn.sequence] = attempt

        group.draw = draw
        return await self._run(attempt, append)

    async def _run(self, attempt: _Try, append: Append) -> AppendResult:
        try:
            result = await append(attempt.group)
        except BaseException as error:
            self._failed(attempt, error)
            raise
        self._succeeded(attempt, result)
        return result

    def _succeeded(self, attempt: _Try, result: AppendResult) -> None:
        stamp = attempt.group.producer
        assert stamp is not None, "only stamped groups are tries"
        del self._under_way[stamp.producer_id, stamp.sequence]
        self.window.add(stamp, result)
        attempt.group.place = None  # now: frames of a `Redo` refer to the group until garbage is collected
        attempt.succeed(result)

    def _failed(self, attempt: _Try, error: BaseException) -> None:
        ticket, stamp = attempt.group.ticket, attempt.group.producer
        assert stamp is not None, "only stamped groups are tries"
        if not stamp.sequence:
            attempt.group.draw = None  # it came nowhere near the log
            return
        if attempt.group.place is None or attempt.group.place.stamp is not stamp:
            # Its sequence was drawn, and its outcome may be open: from here on whoever has the group may send it again.
            attempt.group.place = self._places.hold(Place(stamp))
        if isinstance(error, asyncio.CancelledError) and ticket is not None:
            ticket.durable.add_done_callback(self._decided_by(ticket, attempt, stamp))
            return
        del self._under_way[stamp.producer_id, stamp.sequence]
        if isinstance(error, asyncio.CancelledError):
            attempt.succeed(None)
        else:
            attempt.fail(error)

    def _decided_by(
        self, ticket: AppendTicket, attempt: _Try, stamp: ProducerStamp
    ) -> Callable[[asyncio.Future[None]], None]:
        # Now, because whoever appended it may use its messages again; shards and offsets are stamped for good.
        result = result_of_group(attempt.group, self._message_id)

        def decided(durable: asyncio.Future[None]) -> None:
            error = Indeterminate("nobody knows what became of it") if durable.cancelled() else durable.exception()
            if error is None:
                self._succeeded(attempt, result)
            else:
                del self._under_way[stamp.producer_id, stamp.sequence]
                attempt.fail(error)

        return decided
