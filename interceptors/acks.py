"""Which ticks are confirmed: acknowledgements come in any order, confirmation goes in tick order.

In: one allocation for each append or idle tick, and later its outcome. Out: details in strictly ascending ticks, handed to
`release` as soon as everything below them has ended. An append whose outcome is unknown is never acknowledged, so nothing
at or above its tick is ever confirmed in this term: that is the whole treatment of an indeterminate write.

An idle tick is in no entry of the log, so it is confirmed only where the store remembers that no later term may go below it:
up to `promised_tick`, which others raise.

Ticks are allocated in ascending order, hence a queue where the reference needs heaps. Lives on the event loop.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple, Protocol

from wal.errors import Indeterminate
from wal.headers import CommitTxnHeader, MessageType
from wal.message import LogEntry
from wal.timetick import TickAllocator

# --- ack detail ---
#
# What became of one allocated tick. Pure.


@unique
class AckKind(Enum):
    """How an allocated tick ended."""

    ENTRY = "entry"
    """A durable entry of the log carries it."""
    SYNC = "sync"
    """Nothing carries it: it only says that everything below it has ended."""
    FAILED = "failed"
    """Its append was refused before it reached the log; no reader ever hears of it."""


@dataclass(frozen=True, slots=True)
class AckDetail:
    """An acknowledged tick; `entry` is what readers get for it, present for `ENTRY` only."""

    kind: AckKind
    tick: int
    entry: LogEntry | None = None

    def __post_init__(self) -> None:
        assert self.tick > 0, "zero is no tick"
        assert (self.kind is AckKind.ENTRY) == (self.entry is not None), "entries, and only they, carry an entry"
        assert self.entry is None or self.entry.time_tick == self.tick, "an entry confirms its own tick"


Release = Callable[[Sequence[AckDetail]], None]
"""Takes newly confirmed details, ascending and never empty; must not suspend, append or fail."""


class Unpromised(Exception):
    """A mark has to wait until ticks from `tick` on are promised; never leaves the append path."""

    def __init__(self, tick: int) -> None:
        self.tick = tick
        super().__init__(tick)


class Acker:
    """One allocated tick on its way to an outcome."""

    __slots__ = ("detail", "tick")

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.detail: AckDetail | None = None


class AckManager:
    """The ticks of one log in this term; `confirmed_tick` starts at the term's first tick."""

    def __init__(self, ticks: TickAllocator, *, confirmed_tick: int, release: Release) -> None:
        assert confirmed_tick > 0, "a term starts with a tick"
        self._ticks = ticks
        self._release = release
        self._confirmed_tick = confirmed_tick
        self.promised_tick = 0
        """No later term goes below it, so readers may have ticks without an entry up to it; only ever raised."""
        self._pending: deque[Acker] = deque()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waits = 0
        self._indeterminate_tick = 0
        """The smallest tick whose outcome nobody knows, 0 while there is none; nothing from it on is ever confirmed."""

    @property
    def confirmed_tick(self) -> int:
        """Every append at or below this tick has ended, and readers may know it."""
        return self._confirmed_tick

    @property
    def oldest_pending_tick(self) -> int | None:
        """The smallest tick without an outcome, or whose outcome waits for nothing but a turn; None when idle."""
        return self._pending[0].tick if self._pending else None

    @property
    def pending(self) -> int:
        """How many allocated ticks are not confirmed."""
        return len(self._pending)

    def allocate(self) -> Acker:
        """Return a new tick; it ends with exactly one of `confirm`, `fail` and `abandon`."""
        acker = Acker(self._ticks.allocate())
        self._pending.append(acker)
        return acker

    def confirm(self, acker: Acker, entry: LogEntry) -> None:
        """The append is durable as `entry`."""
        self._end(acker, AckDetail(AckKind.ENTRY, acker.tick, entry))

    def fail(self, acker: Acker) -> None:
        """The append certainly did not happen."""
        self._end(acker, AckDetail(AckKind.FAILED, acker.tick))

    def abandon(self, acker: Acker) -> None:
        """Nobody knows whether the append happened: nothing at or above its tick is confirmed from here on."""
        assert acker.detail is None, "an append ends once"
        if not self._indeterminate_tick or acker.tick < self._indeterminate_tick:
            self._indeterminate_tick = acker.tick
        self._refuse_unreachable()

    def end(self) -> None:
        """End the term: no further tick is given to readers, and nobody waits for one; idempotent.

        The live tail may belong to the next term from here on, whose appends this manager knows nothing of.
        """
        if not self._indeterminate_tick:
            self._indeterminate_tick = self._confirmed_tick + 1
        self._refuse_unreachable()

    def _refuse_unreachable(self) -> None:
        for tick, _, waiter in self._waiting:
            if tick >= self._indeterminate_tick and not waiter.done():
                waiter.set_exception(self._unreachable(tick))
                waiter.exception()  # nobody may be listening any more
        self._waiting = [wait for wait in self._waiting if wait[0] < self._indeterminate_tick]
        heapq.heapify(self._waiting)

    def mark(self) -> int:
        """Return a tick above every allocated one, carried by nothing: confirmed once everything below has ended.

        Marks with no append between them are one. Raises `Unpromised` beyond `promised_tick`, `Indeterminate` when no tick
        can be confirmed any more.
        """
        if self._indeterminate_tick:
            raise self._unreachable(self._ticks.last + 1)
        if self._pending and (last := self._pending[-1]).detail is not None and last.detail.kind is AckKind.SYNC:
            return last.tick
        acker = self.allocate()
        if acker.tick > self.promised_tick:
            self._pending.pop()  # a tick that nobody has heard of needs no end
            raise Unpromised(acker.tick)
        self._end(acker, AckDetail(AckKind.SYNC, acker.tick))
        return acker.tick

    def confirmed(self, tick: int) -> asyncio.Future[None]:
        """Return a future of the caller's own that ends when `tick` is confirmed.

        It fails with `Indeterminate` when that can no longer happen in this term. It sets nothing in motion.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if tick <= self._confirmed_tick:
            waiter.set_result(None)
        elif self._indeterminate_tick and tick >= self._indeterminate_tick:
            waiter.set_exception(self._unreachable(tick))
            waiter.exception()
        else:
            self._waits += 1
            heapq.heappush(self._waiting, (tick, self._waits, waiter))
        return waiter

    def _end(self, acker: Acker, detail: AckDetail) -> None:
        assert acker.detail is None, "an append ends once"
        acker.detail = detail
        pending = self._pending
        if pending[0] is not acker:
            return
        if len(pending) == 1:  # the usual case: appends end in order
            pending.clear()
            details = [detail]
        else:
            details = []
            while pending and (ended := pending[0].detail) is not None:
                pending.popleft()
                details.append(ended)
        tick = details[-1].tick
        self._release(details)
        self._confirmed_tick = tick
        while self._waiting and self._waiting[0][0] <= tick:
            _, _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(None)

    def _unreachable(self, tick: int) -> Indeterminate:
        return Indeterminate(
            f"tick {tick} cannot be confirmed: the outcome of the append at {self._indeterminate_tick} is unknown — "
            "wait until the log is open again and ask for a new tick"
        )


# --- mvcc ---
#
# The newest tick at which each vchannel changed, and whether it is confirmed: what a consistent read of it waits for. Pure.
#
# A transaction changes its vchannels at its commit; its begin and bodies change nothing.


class VChannelMvcc(NamedTuple):
    """A read of `vchannel` at `time_tick` sees all of it; when not `confirmed`, readers are not there yet."""

    vchannel: str
    time_tick: int
    confirmed: bool


class MvccManager:
    """Ticks of the vchannels of one log since its term began; `first_tick` stands for everything before.

    `updates` counts how often one of them moved.
    """

    __slots__ = ("_confirmed_tick", "_first_tick", "_ticks", "updates")

    def __init__(self, first_tick: int) -> None:
        self._first_tick = first_tick
        self._confirmed_tick = first_tick
        self._ticks: dict[str, int] = {}
        self.updates = 0

    def update(self, entry: LogEntry) -> None:
        """Take in a durable entry, before or after it is confirmed; entries may come out of order."""
        for message in entry.messages:
            if message.type is MessageType.DROP_COLLECTION:
                self._ticks.pop(message.vchannel, None)
            elif isinstance(message.header, CommitTxnHeader):
                for vchannel in message.header.vchannels:
                    self._changed(vchannel, entry.time_tick)
            elif message.vchannel and not message.txn_id:
                self._changed(message.vchannel, entry.time_tick)

    def confirm(self, tick: int) -> None:
        """Everything at or below `tick` is confirmed."""
        self._confirmed_tick = max(self._confirmed_tick, tick)

    def of(self, vchannel: str) -> VChannelMvcc:
        """Return the tick of a vchannel; one that has not changed in this term is complete at the term's first tick."""
        tick = self._ticks.get(vchannel, self._first_tick)
        return VChannelMvcc(vchannel, tick, tick <= self._confirmed_tick)

    def all_vchannels(self) -> list[VChannelMvcc]:
        """Return the ticks of the vchannels that changed in this term, by name."""
        return [self.of(vchannel) for vchannel in sorted(self._ticks)]

    def _changed(self, vchannel: str, tick: int) -> None:
        if tick > self._ticks.get(vchannel, 0):
            self._ticks[vchannel] = tick
            self.updates += 1


# --- release ---
#
# Confirmed ticks on their way to readers: entries and idle ticks go to the live tail.


class TailSink(Protocol):
    """Where readers get what is confirmed. Neither method suspends; both are called in ascending ticks."""

    def append(self, entry: LogEntry) -> None:
        """Give readers an entry; it confirms its own tick."""

    def advance(self, tick: int) -> None:
        """Tell readers that everything at or below `tick` has been given to them."""


class ReaderRelease:
    """Gives readers newly confirmed ticks; call it with what the ack manager confirmed, in order."""

    __slots__ = ("_mvcc", "_tail")

    def __init__(self, tail: TailSink, mvcc: MvccManager) -> None:
        self._tail = tail
        self._mvcc = mvcc

    def __call__(self, details: Sequence[AckDetail]) -> None:
        """Release ascending details; a failed tick releases nothing by itself."""
        told_tick = 0
        for detail in details:
            if detail.entry is not None:
                self._tail.append(detail.entry)
            elif detail.kind is AckKind.SYNC:
                self._tail.advance(detail.tick)
            told_tick = detail.tick
        if told_tick:
            self._mvcc.confirm(told_tick)
