"""The topics of a node for one client: its consumers end with its connection, and what they hold
comes to others at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from wal.errors import InvalidArgument, OnShutdown, Overloaded
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.rocksmq.messages import ConsumerMessage

CONSUMERS_MAX = 1_024
"""Of one connection; further ones are refused."""
REMEMBERED_MAX = 1_024
"""Deliveries of one connection that a cancellation, which crosses the answer on its way, still
finds.
"""

_Key = tuple[str, str, int]


class ClientTopics:
    """What one connection does with topics; a consumer has a number from its client, 0 is for calls
    without one.
    """

    def __init__(self, mq: MessageQueue | None) -> None:
        self._mq = mq
        self._consumers: dict[_Key, Consumer] = {}
        self._is_closed = False
        self._delivered: OrderedDict[int, tuple[_Key, Sequence[int]]] = OrderedDict()
        self.waiting = set[int]()
        """Calls that wait for messages."""

    async def call(self, number: int, name: str, arguments: dict[str, Any]) -> object:
        """Make a call of the table: one of these here, or the queue's own. Raises `InvalidArgument`
        without topics.
        """
        if self._mq is None:
            raise InvalidArgument("this node has no topics — open one with a directory")
        if name != "deliver":
            return await getattr(self if hasattr(ClientTopics, name) else self._mq, name)(
                **arguments
            )
        self.waiting.add(number)
        try:
            messages = await self.deliver(**arguments)
        finally:
            self.waiting.discard(number)
        if ids := [message.message_id for message in messages]:
            key = arguments["topic"], arguments["group"], arguments["consumer"]
            self._delivered[number] = (
                key,
                ids if ids[-1] - ids[0] >= len(ids) else range(ids[0], ids[-1] + 1),
            )
            if len(self._delivered) > REMEMBERED_MAX:
                self._delivered.popitem(last=False)
        return messages

    async def register(
        self, topic: str, group: str, consumer: int, ack_timeout_s: float | None
    ) -> None:
        """As `MessageQueue.register_consumer`, and the first delivery over the next connection does
        it again.
        """
        await self._consumer(topic, group, consumer, ack_timeout_s)

    async def deliver(
        self,
        topic: str,
        group: str,
        consumer: int,
        ack_timeout_s: float | None,
        count: int,
        wait_s: float,
    ) -> list[ConsumerMessage]:
        """As `Consumer.consume`."""
        return await (await self._consumer(topic, group, consumer, ack_timeout_s)).consume(
            count, wait_s=wait_s
        )

    async def held(
        self, topic: str, group: str, consumer: int, ids: Sequence[int], for_s: float
    ) -> Sequence[int]:
        """As `Consumer.held`, of those that it holds for at least `for_s` seconds more."""
        known = self._consumers.get((topic, group, consumer))
        if known is None:  # the connection is new to it: what it held went to others
            return []
        return await known._held(ids, for_s)  # noqa: SLF001 - it is what the client's consumer asks

    async def give_back(
        self, topic: str, group: str, consumer: int, ids: Sequence[int] | None
    ) -> None:
        """As `Consumer.give_back`; None: as `Consumer.close`."""
        key = topic, group, consumer
        if ids is None:
            if (closing := self._consumers.pop(key, None)) is not None:
                await closing.close()
        elif key in self._consumers:
            await self._consumers[key].give_back(ids)

    def cancelled(self, number: int, work: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Have what a call got come again whose client did not wait for the answer."""
        if (delivered := self._delivered.pop(number, None)) is not None:
            work(self.give_back(*delivered[0], delivered[1]))

    async def close(self) -> None:
        """Have everything come again that is held, and deliver no more: the client is gone, or
        connected anew.
        """
        self._is_closed = True
        while self._consumers:
            await self._consumers.popitem()[1].close()

    async def _consumer(
        self, topic: str, group: str, consumer: int, ack_timeout_s: float | None
    ) -> Consumer:
        assert self._mq is not None, "asked before"
        key = topic, group, consumer
        if key not in self._consumers:
            # what calls without one hold comes again when its time is over
            if len(self._consumers) >= CONSUMERS_MAX:
                self._consumers = {each: made for each, made in self._consumers.items() if each[2]}
            if len(self._consumers) >= CONSUMERS_MAX:
                raise Overloaded(f"the connection has {CONSUMERS_MAX} consumers — close some")
            made = await self._mq.register_consumer(topic, group, ack_timeout_s=ack_timeout_s)
            if self._is_closed:
                raise OnShutdown("this connection is given up — ask over the newest one")
            self._consumers.setdefault(key, made)  # another call of the same may have been faster
        return self._consumers[key]
