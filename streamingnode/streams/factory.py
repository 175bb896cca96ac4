"""Creates streams over a queue, removes their subscriptions, and writes the ticks that tick streams
need to progress.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from streamingnode.errors import AccessDenied
from streamingnode.streams.messages import (
    AS_IT_IS,
    MsgPack,
    MsgType,
    TsMsg,
    UnmarshalDispatcher,
    new_proto_dispatcher,
)
from streamingnode.streams.stream import DEFAULTS, MsgStream, StreamOptions, TtMsgStream
from wal.errors import (
    Ends,
    GroupNotFound,
    StreamingNodeError,
    TopicNotFound,
    UnsupportedFormat,
)
from wal.rocksmq.contract import MessageQueue
from wal.runtime import elapsed_ms, event_log, unix_ms
from wal.timetick import IdAllocator, TickAllocator

TICK_INTERVAL_S = 0.2
"""Seconds between two ticks of a ticker: about the lag of a tick stream behind its producers."""

_log = event_log(__name__)


@dataclass(frozen=True, slots=True)
class MsgStreamFactory:
    """Creates the streams of one queue: `node.mq` or any other `MessageQueue`."""

    queue: MessageQueue
    new_dispatcher: Callable[[], UnmarshalDispatcher] = new_proto_dispatcher
    options: StreamOptions = DEFAULTS

    def new_msg_stream(self) -> MsgStream:
        """Return a stream that returns each batch as it arrives, with a dispatcher of its own."""
        return MsgStream(self.queue, self.new_dispatcher(), self.options)

    def new_tt_msg_stream(self) -> TtMsgStream:
        """Return a stream that returns the messages of one time tick together."""
        return TtMsgStream(self.queue, self.new_dispatcher(), self.options)

    def new_disposer(
        self, channels: Sequence[str], subscription: str
    ) -> Callable[[], Awaitable[None]]:
        """Return a function that removes a subscription, so that retention no longer keeps messages
        for it. Streams that consume for it end.
        """

        async def dispose() -> None:
            for channel in channels:
                with suppress(TopicNotFound, GroupNotFound):
                    await self.queue.destroy_consumer_group(channel, subscription)

        return dispose


class Ticker:
    """Writes time ticks to all channels of a producer. Used in `async with`; leaving it without an
    error writes a last tick.

    A tick promises that no message at or below it follows. So producers take their ticks from the
    ticker, `with ticker.stamp() as ts:`, and all producers of a channel share one ticker. Ticks
    follow the clock, or come from `ticks`. They begin above the ticks in the channels at entry,
    whichever clock those came from.
    """

    def __init__(
        self,
        stream: MsgStream,
        *,
        interval_s: float = TICK_INTERVAL_S,
        ticks: TickAllocator | None = None,
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._ids = IdAllocator(ticks or TickAllocator(unix_ms, elapsed_ms))
        self._stamped: dict[int, None] = {}  # in the order of ticks
        self._task: asyncio.Task[None] | None = None
        self.last_tick = 0
        """The highest tick written."""

    @contextmanager
    def stamp(self, count: int = 1) -> Iterator[int]:
        """Yield the first of `count` new ticks for messages. Until the block ends, the ticker
        writes no tick at or above it.
        """
        first = self._ids.alloc(count).start
        self._stamped[first] = None
        try:
            yield first
        finally:
            del self._stamped[first]

    async def tick(self) -> int:
        """Write the highest tick whose promise holds now to all channels, and return it; a tick
        that is not above the last one is not written.
        """
        tick = next(iter(self._stamped)) - 1 if self._stamped else self._ids.alloc_one()
        if tick > self.last_tick:
            # marshals to an empty body with any dispatcher
            message = TsMsg(MsgType.TIME_TICK, tick, tick, b"", template=AS_IT_IS)
            await self._stream.broadcast(MsgPack([message]))
            self.last_tick = tick
        return tick

    async def __aenter__(self) -> Self:
        for channel in self._stream.get_produce_channels():
            try:
                self._ids.update_id(await self._stream.last_ts(channel))
            except (AccessDenied, UnsupportedFormat) as error:
                # without permission to read, or without a batch: use the clock
                _log.warning("last_tick_unknown", channel=channel, error=repr(error))
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, kind: object, _error: object, _trace: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if kind is None:
            await self.tick()

    async def _run(self) -> None:
        while True:
            try:
                await self.tick()
            except StreamingNodeError as error:  # readers wait, and the next attempt may succeed
                if error.ends is Ends.LOG:
                    return
                _log.warning("tick_not_written", error=repr(error))
            await asyncio.sleep(self._interval_s)
