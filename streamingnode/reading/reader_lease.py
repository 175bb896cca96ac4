"""What a named reader holds of the log: as little as its acknowledgements allow.

In: what was delivered, up to which tick nothing is left to deliver, and acknowledgements. Out: the durable place of the
named reader. A reader of a quiet collection would otherwise hold everything that other collections write: so acknowledging
the last message delivered acknowledges the quiet after it too, and a reader that has nothing to acknowledge moves on by
itself from time to time.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from scanner.named_reader import NamedReader
from streamingnode.reading.read_message import ReadMessage
from wal.errors import StreamingNodeError

LEASE_INTERVAL_S = 10.0
"""How often an idle reader's place follows the log; each time is one synced write."""


class ReaderLease:
    """The place of one open named reader; `clock` returns seconds. Lives on the event loop."""

    def __init__(self, named: NamedReader, clock: Callable[[], float]) -> None:
        self._named = named
        self._clock = clock
        self._due_s = 0.0
        self._last: ReadMessage | None = None
        self._passed: ReadMessage | None = None

    def saw(self, delivered: Sequence[ReadMessage], passed: ReadMessage) -> None:
        """Take note of messages on their way to the caller, and of a tick up to which there are no others."""
        self._passed = passed
        self._last = delivered[-1] if delivered else self._last

    async def ack(self, message: ReadMessage) -> None:
        """Acknowledge a message and everything before it; durable when this returns."""
        await self._named.ack(self._passed if message is self._last and self._passed is not None else message)

    async def follow(self) -> None:
        """Move on if everything delivered is acknowledged, and the last time is a while ago."""
        passed, last, named = self._passed, self._last, self._named
        if passed is None or passed.last_confirmed.position <= named.position.position:
            return
        if (last is not None and named.acknowledged_tick < last.time_tick) or self._clock() < self._due_s:
            return
        self._due_s = self._clock() + LEASE_INTERVAL_S
        with suppress(StreamingNodeError):  # reading goes on without it; the next time is soon enough
            await named.ack(passed)

    async def close(self) -> None:
        """Let the name be opened again."""
        await self._named.close()
