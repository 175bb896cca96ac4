"""One channel that a stream consumes: the consumer of its group, and the state of its
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
"""How many batches one read takes from a channel, and how many seconds it waits for the first."""


class Subscription:
    """One channel of a consumer: the consumer of its group, the fetched messages, and those to
    acknowledge.
    """

    def __init__(self, channel: str, consumer: Consumer, *, placed: bool) -> None:
        self.channel = channel
        self.consumer = consumer
        self.placed = placed
        self.fetch: asyncio.Task[list[ConsumerMessage]] | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all fetched messages, as after a seek."""
        self.fetched = deque[ConsumerMessage]()
        self.merged = deque[int]()
        self.handed_on = list[int]()
        self.held = set[int]()
        self.acked = set[int]()

    def take(self, messages: Iterable[ConsumerMessage]) -> None:
        """Add fetched messages without repeats: over a new connection a queue delivers
        unacknowledged messages again.
        """
        new = [each for each in messages if each.message_id not in self.held]
        self.held.update(each.message_id for each in new)
        self.fetched.extend(new)

    async def refill(self) -> None:
        """Take the result of the background read if it has ended; without one, take the messages
        that the queue has now.
        """
        if self.fetch is None:
            self.take(await self._ask())
        elif self.fetch.done():
            fetch = self.fetch
            self.fetch = None
            # cancelled by `stop_fetching`, in a `seek` that was itself cancelled
            if not fetch.cancelled():
                self.take(fetch.result())

    def fetching(self) -> asyncio.Task[list[ConsumerMessage]]:
        """Return the background read for the next messages, starting one if necessary. It outlives
        a cancelled `consume`.
        """
        if self.fetch is None:
            self.fetch = asyncio.get_running_loop().create_task(self._ask(FETCH_WAIT_S))
        return self.fetch

    async def _ask(self, wait_s: float = 0.0) -> list[ConsumerMessage]:
        self.held -= self.acked  # until here, an older read could return them again; see `take`
        self.acked.clear()
        return await self.consumer.consume(FETCHED_AT_ONCE, wait_s=wait_s)

    async def stop_fetching(self) -> None:
        """End the background read. Its result is kept: the queue does not deliver it to this
        consumer again.
        """
        if self.fetch is not None:
            self.fetch.cancel()
            await asyncio.wait([self.fetch])
            with suppress(StreamingNodeError):
                await self.refill()

    async def acknowledge(self) -> None:
        """Acknowledge the messages that the stream has handed on."""
        ids = self.handed_on.copy()
        await self.consumer.ack(ids)
        self.acked.update(ids)
        del self.handed_on[: len(ids)]  # more may have been added meanwhile
