"""One channel that a stream consumes: the consumer of its group, and what has become of its
messages.

    fetched -> merged (decoded) -> handed on (in a pack) -> acknowledged
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from wal.errors import StreamingNodeError
from wal.rocksmq.contract import Consumer
from wal.rocksmq.messages import ConsumerMessage

FETCHED_AT_ONCE = 16
FETCH_WAIT_S = 60.0
"""Batches that are taken of a channel together, and how many seconds a read waits for the first."""


class Subscription:
    """One channel of a consumer: the reader of its group, what it has fetched, and what may be
    acknowledged.
    """

    def __init__(self, channel: str, consumer: Consumer, *, placed: bool) -> None:
        self.channel = channel
        self.consumer = consumer
        self.placed = placed
        self.fetch: asyncio.Task[list[ConsumerMessage]] | None = None
        self.forget()

    def forget(self) -> None:
        """Forget what was fetched, as after a seek."""
        self.fetched = deque[ConsumerMessage]()
        self.merged = deque[int]()
        self.handed_on = list[int]()
        self.held = set[int]()
        self.acked = set[int]()

    def take(self, messages: Iterable[ConsumerMessage]) -> None:
        """Keep what was fetched, once: over a new connection a queue delivers again what was not
        acknowledged.
        """
        new = [each for each in messages if each.message_id not in self.held]
        self.held.update(each.message_id for each in new)
        self.fetched.extend(new)

    async def refill(self) -> None:
        """Take what the read has brought that was begun, or what is there now."""
        if self.fetch is None:
            self.take(await self._ask())
        elif self.fetch.done():
            fetch = self.fetch
            self.fetch = None
            if not fetch.cancelled():  # by a `seek` that was cancelled, too
                self.take(fetch.result())

    def fetching(self) -> asyncio.Task[list[ConsumerMessage]]:
        """Return the read that waits for what comes, begun unless it was; it outlives a `consume`
        that is cancelled.
        """
        if self.fetch is None:
            self.fetch = asyncio.get_running_loop().create_task(self._ask(FETCH_WAIT_S))
        return self.fetch

    async def _ask(self, wait_s: float = 0.0) -> list[ConsumerMessage]:
        self.held -= self.acked  # a read from before may bring them again; see `take`
        self.acked.clear()
        return await self.consumer.consume(FETCHED_AT_ONCE, wait_s=wait_s)

    async def stop_fetching(self) -> None:
        """End the read that was begun; what it has is kept, for the queue does not give it to this
        consumer again.
        """
        if self.fetch is not None:
            self.fetch.cancel()
            await asyncio.wait([self.fetch])
            with suppress(StreamingNodeError):
                await self.refill()

    async def acknowledge(self) -> None:
        """Acknowledge what the stream has handed on."""
        ids = self.handed_on.copy()
        await self.consumer.ack(ids)
        self.acked.update(ids)
        del self.handed_on[: len(ids)]  # there may be more by now
