"""When the flusher asks for a cut: at aligned wall-clock boundaries, and when much is unflushed.

It only asks: the shard manager decides, and makes none when there is nothing to cut. Boundaries are multiples of the
interval since the epoch, so that the cuts of several nodes line up without a coordinator.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from wal.errors import ChannelFenced, OnShutdown, StreamingNodeError
from wal.event_log import event_log

RequestCut = Callable[[], Awaitable[int]]
"""Ask for a cut; returns the number of the cut that covers everything appended before, made now or earlier."""

Wait = Callable[[anyio.Event, float | None], Awaitable[None]]
"""Return when the event is set, or after that many seconds (None: not before)."""

_log = event_log(__name__)


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
