"""The topics of a node for one client. Its consumers end with its connection, and the messages they
hold are delivered again at once.
"""

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from wal.errors import InvalidArgument, OnShutdown, Overloaded
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.rocksmq.messages import ConsumerMessage

CONSUMERS_MAX = 1_024
"""Consumers of one connection; further ones are refused."""
REMEMBERED_MAX = 1_024
"""Remembered deliveries of one connection. A cancel that crosses the reply on its way gives the
messages of a remembered delivery back.
"""

_Key = tuple[str, str, int]


class ClientTopics:
    """The consumers of one connection. The client numbers them; number 0 serves calls without a
    consumer.
    """

    def __init__(self, mq: MessageQueue | None) -> None:
        self._mq = mq
        self._consumers: dict[_Key, Consumer] = {}
        self._is_closed = False
        self._delivered: OrderedDict[int, tuple[_Key, Sequence[int]]] = OrderedDict()
        self.waiting = set[int]()
        """The numbers of calls that wait for messages."""

    async def call(self, number: int, name: str, arguments: dict[str, Any]) -> object:
        """Make a call of the table with a method of this class or of the queue. Raises
        `InvalidArgument` when the node has no topics.
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
        """Register a consumer, as `MessageQueue.register_consumer`. Over the next connection the
        first delivery registers it again.
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
        """As `Consumer.held`, limited to messages that the consumer holds for at least `for_s`
        seconds more.
        """
        known = self._consumers.get((topic, group, consumer))
        # it was registered over an earlier connection, and the messages it held went to other
        # consumers
        if known is None:
            return []
        return await known._held(ids, for_s)  # noqa: SLF001 - the client's consumer calls it

    async def give_back(
        self, topic: str, group: str, consumer: int, ids: Sequence[int] | None
    ) -> None:
        """As `Consumer.give_back`; with None as `Consumer.close`."""
        key = topic, group, consumer
        if ids is None:
            if (closing := self._consumers.pop(key, None)) is not None:
                await closing.close()
        elif key in self._consumers:
            await self._consumers[key].give_back(ids)

    def cancelled(self, number: int, work: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Give back the messages delivered by a call that its client has cancelled."""
        if (delivered := self._delivered.pop(number, None)) is not None:
            work(self.give_back(*delivered[0], delivered[1]))

    async def close(self) -> None:
        """Give back all held messages and deliver no more: the client is gone, or has another
        connection.
        """
        self._is_closed = True
        while self._consumers:
            await self._consumers.popitem()[1].close()

    async def _consumer(
        self, topic: str, group: str, consumer: int, ack_timeout_s: float | None
    ) -> Consumer:
        assert self._mq is not None, "`call` checks this"
        key = topic, group, consumer
        if key not in self._consumers:
            # consumers of number 0 need no close: the messages they hold are delivered again after
            # their timeout
            if len(self._consumers) >= CONSUMERS_MAX:
                self._consumers = {each: made for each, made in self._consumers.items() if each[2]}
            if len(self._consumers) >= CONSUMERS_MAX:
                raise Overloaded(f"the connection has {CONSUMERS_MAX} consumers — close some")
            made = await self._mq.register_consumer(topic, group, ack_timeout_s=ack_timeout_s)
            if self._is_closed:
                raise OnShutdown("this connection is replaced — use the newest one")
            # another call may have registered it in the meantime
            self._consumers.setdefault(key, made)
        return self._consumers[key]
