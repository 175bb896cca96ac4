"""Makes room on a disk that gets short of space, before appends have to be refused, and for as long as they are.

In: whether the store is short of space. Out: first what is in files already is given up from the log; if that is not enough
a cut, which seals every growing segment and brings its rows into files; then the log before it is given up too. What named
readers still need stays. A round that did not help is tried again after a pause that doubles.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from wal.errors import ChannelFenced, OnShutdown, StreamingNodeError
from wal.tasks import event_log

LOOK_S = 0.25
"""How soon a short disk is noticed, and how long a store needs to notice that it no longer is."""
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 5.0
"""A disk that stays short costs a cut this often, if there is something to cut."""

_log = event_log(__name__)


class SpaceRelief:
    """Watches `is_short`, and relieves. Lives on the event loop.

    `give_up_log` gives up the log that is in files and that nobody needs. `cut` makes a cut and returns when it is in files.
    """

    def __init__(
        self,
        is_short: Callable[[], bool],
        *,
        give_up_log: Callable[[], Awaitable[None]],
        cut: Callable[[], Awaitable[object]],
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._is_short = is_short
        self._give_up_log = give_up_log
        self._cut = cut
        self._sleep = sleep
        self.rounds = 0

    async def run(self) -> None:
        """Work until cancelled, or until the log is closed."""
        pause_s = PAUSE_FIRST_S
        while True:
            await self._sleep(LOOK_S)
            if not self._is_short():
                pause_s = PAUSE_FIRST_S
                continue
            try:
                await self.relieve()
            except (OnShutdown, ChannelFenced):
                return
            except (OSError, StreamingNodeError) as error:
                _log.warning("no_room_made", error=str(error))
            await self._sleep(LOOK_S)
            if self._is_short():
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
            else:
                pause_s = PAUSE_FIRST_S

    async def relieve(self) -> None:
        """Make room once. Raises what the cut and the log raise; nothing that is needed is lost then."""
        self.rounds += 1
        await self._give_up_log()
        await self._sleep(LOOK_S)
        if self._is_short():
            await self._cut()
            await self._give_up_log()


# --- cut schedule ---
#
# When the flusher asks for a cut: at aligned wall-clock boundaries, and when much is unflushed.
#
# It only asks: the shard manager decides, and makes none when there is nothing to cut. Boundaries are multiples of the
# interval since the epoch, so that the cuts of several nodes line up without a coordinator.


RequestCut = Callable[[], Awaitable[int]]
"""Ask for a cut; returns the number of the cut that covers everything appended before, made now or earlier."""

Wait = Callable[[anyio.Event, float | None], Awaitable[None]]
"""Return when the event is set, or after that many seconds (None: not before)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutScheduleOptions:
    """A cut every `interval_s` seconds (None: never by time), and when `bytes_max` bytes of rows are unflushed."""

    interval_s: float | None = 10.0
    bytes_max: int = 256 << 20


async def wait_for_event(event: anyio.Event, seconds: float | None) -> None:
    """Wait for the event, but not longer than `seconds`."""
    with anyio.move_on_after(seconds):
        await event.wait()


def seconds_to_boundary(now_ms: int, interval_s: float | None) -> float | None:
    """Return how long it is to the next multiple of the interval, in seconds; never 0, None without an interval."""
    if interval_s is None:
        return None
    interval_ms = max(1, round(interval_s * 1000))
    return (interval_ms - now_ms % interval_ms) / 1000


class CutSchedule:
    """Decides when to ask. Lives on the event loop."""

    def __init__(self, options: CutScheduleOptions, *, now_ms: Callable[[], int], wait: Wait = wait_for_event) -> None:
        self._options = options
        self._now_ms = now_ms
        self._wait = wait
        self._full = anyio.Event()
        self._asked = 0

    def report(self, cut_number: int, unflushed_bytes: int) -> None:
        """Take in how many bytes will go into cut `cut_number`; the flusher calls this as it reads."""
        # A cut asked for is on its way through the log: until the flusher meets it, the bytes it covers do not ask again.
        if cut_number > self._asked and unflushed_bytes >= self._options.bytes_max:
            self._full.set()

    async def run(self, request_cut: RequestCut) -> None:
        """Ask until the log is closed; a cut that could not be made is asked for again at the next boundary."""
        while True:
            await self._wait(self._full, seconds_to_boundary(self._now_ms(), self._options.interval_s))
            self._full = anyio.Event()
            try:
                self._asked = await request_cut()
            except (OnShutdown, ChannelFenced):
                return
            except StreamingNodeError as error:
                _log.warning("cut_not_made", code=error.code, error=str(error))
