"""One unbroken sequence of entries out of two sources: the log, and the live tail once it reaches back far enough.

    CATCH_UP --covered--> TAILING        the tail has everything from the reader's position on
    CATCH_UP --read-----> CATCH_UP       entries came from the log
    CATCH_UP --ended----> WAITING        no tail that could take over, and nothing more in the log
    WAITING  --grown----> CATCH_UP       the log has more
    TAILING  --read-----> TAILING        entries or an idle tick came from the tail
    TAILING  --evicted--> CATCH_UP       the reader was too slow: the same position, from the log

Both sources hold the same entries at the same positions, and the position is the only thing carried over: so a switch can
neither lose nor repeat an entry.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto, unique

from scanner.catch_up import CatchUp
from scanner.closing import Closing
from scanner.patient_read import PatientLog
from scanner.tailing import Tailing
from wal.live_tail import Evicted, LiveTail, TailRead
from wal.log import Log


@unique
class Mode(Enum):
    """Where a reader's entries come from."""

    CATCH_UP = "catching up"
    WAITING = "waiting"
    TAILING = "tailing"


@unique
class Event(Enum):
    """What a step of a reader came to."""

    READ = auto()
    COVERED = auto()
    ENDED = auto()
    GROWN = auto()
    EVICTED = auto()


TRANSITIONS: dict[tuple[Mode, Event], Mode] = {
    (Mode.CATCH_UP, Event.READ): Mode.CATCH_UP,
    (Mode.CATCH_UP, Event.COVERED): Mode.TAILING,
    (Mode.CATCH_UP, Event.ENDED): Mode.WAITING,
    (Mode.WAITING, Event.GROWN): Mode.CATCH_UP,
    (Mode.TAILING, Event.READ): Mode.TAILING,
    (Mode.TAILING, Event.EVICTED): Mode.CATCH_UP,
}

Step = tuple[Event, TailRead | None]


class SwitchableReader:
    """Every entry of a log from a position on, once, in order; used by one task at a time.

    Without a tail it stays with the log. `evictions` counts how often it was too slow for the tail.
    """

    def __init__(
        self,
        log: Log,
        tail: LiveTail | None,
        reader: PatientLog,
        position: int,
        *,
        read_bytes: int,
        closing: Closing,
    ) -> None:
        self._log = log
        self._tail = tail
        self._reader = reader
        self._read_bytes = read_bytes
        self._closing = closing
        self._catch_up = self._from_log(position)
        self._tailing: Tailing | None = None
        self._growing: asyncio.Task[None] | None = None
        self._steps: dict[Mode, Callable[[], Awaitable[Step]]] = {
            Mode.CATCH_UP: self._step_catch_up,
            Mode.WAITING: self._step_waiting,
            Mode.TAILING: self._step_tailing,
        }
        self.mode = Mode.CATCH_UP
        self.evictions = 0

    @property
    def position(self) -> int:
        """Position of the next message to be read."""
        return self._catch_up.position if self._tailing is None else self._tailing.position

    async def next(self) -> TailRead:
        """Wait for the next entries, or an idle tick, and return them. Cancelling loses nothing.

        Raises `Corrupt` and `Truncated` as the log does, `OnShutdown` when the scanner or the tail is closed.
        """
        while True:
            event, read = await self._steps[self.mode]()
            self.mode = TRANSITIONS[self.mode, event]
            if read is not None:
                return read

    def close(self) -> None:
        """Let go of what is read ahead and of a wait in `next`."""
        self._catch_up.close()
        self._closing.abandon(self._growing)
        self._growing = None
        if self._tailing is not None:
            self._tailing.close()

    async def _step_catch_up(self) -> Step:
        if self._cover():
            return Event.COVERED, None
        entries = await self._catch_up.next()
        if not entries:
            return Event.ENDED, None
        return Event.READ, TailRead(entries, entries[-1].time_tick)

    async def _step_waiting(self) -> Step:
        if self._growing is None:
            self._growing = asyncio.get_running_loop().create_task(self._await_growth(self.position))
        growing = self._growing
        await self._closing.wait(growing)
        self._growing = None
        growing.result()
        return Event.GROWN, None

    async def _step_tailing(self) -> Step:
        assert self._tailing is not None
        try:
            return Event.READ, await self._tailing.next()
        except Evicted:
            self._catch_up = self._from_log(self._tailing.position)
            self._tailing = None
            self.evictions += 1
            return Event.EVICTED, None

    def _cover(self) -> bool:
        reader = self._tail.open_reader(self.position) if self._tail is not None else None
        if reader is None:
            return False
        self._tailing = Tailing(reader, read_bytes=self._read_bytes)
        self._catch_up.close()
        return True

    def _from_log(self, position: int) -> CatchUp:
        return CatchUp(self._log, self._reader, position, read_bytes=self._read_bytes, closing=self._closing)

    async def _await_growth(self, position: int) -> None:
        await self._log.wait_beyond(position - 1)
