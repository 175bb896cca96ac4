"""`node.mq` and `node.channels` of a client: the methods of `MessageQueue` and `ChannelService` as
calls over its connection.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from streamingnode.remote.calls import CALLS, TOPICS
from wal.rocksmq.contract import ACK_TIMEOUT_S, ITERATED_PART, Consumer
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage, bodies_of

TRUSTED_S = 0.1
"""How long an iterating consumer relies on the node's last reply about the messages that it still
holds, in seconds.
"""


class RemoteCalls:
    """Has a method for each call of the table whose name begins with a prefix; the method makes
    that call at the node.
    """

    def __init__(self, prefix: str, call_of: Callable[..., Awaitable[Any]]) -> None:
        self._prefix = prefix
        self._call_of = call_of

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_") or self._prefix + name not in CALLS:
            raise AttributeError(f"there is no call {name!r}")
        return partial(self._call_of, self._prefix + name)


class RemoteQueue(RemoteCalls):
    """The topics of a node in another process; see `MessageQueue`.

    Calls reconnect as needed. A change raises `Indeterminate` when the node restarts before it
    answers. Consumers survive a restart of the node, but the messages they held go to the first
    consumer that asks. The same is true for messages returned by `consume`.
    """

    def __init__(self, call_of: Callable[..., Awaitable[Any]], number: Callable[[], int]) -> None:
        super().__init__(TOPICS, call_of)
        self._number = number

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        """See `MessageQueue.produce`; up to 8 MiB in one call."""
        bodies_of(messages)
        # The call encodes lists and dicts only; the queue's interface takes any sequence and
        # mapping.
        sent = [
            m if isinstance(m, bytes) else ProducerMessage(m.payload, dict(m.properties or {}))
            for m in messages
        ]
        ids: range = await self._call_of(f"{TOPICS}produce", topic, sent)
        return ids

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        """See `MessageQueue.ack`."""
        await self._call_of(
            f"{TOPICS}ack", topic, group, list(ids) if isinstance(ids, Sequence) else ids
        )

    async def consume(
        self, topic: str, group: str, count: int, *, wait_s: float = 0.0
    ) -> list[ConsumerMessage]:
        """See `MessageQueue.consume`."""
        messages: list[ConsumerMessage] = await self.deliver(
            topic, group, 0, ACK_TIMEOUT_S, count, wait_s
        )
        return messages

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        """See `MessageQueue.register_consumer`."""
        key = topic, group, self._number()
        await self.register(*key, ack_timeout_s)
        lasts_s = inf if ack_timeout_s is None else ack_timeout_s
        return Consumer(
            partial(self.deliver, *key, ack_timeout_s),
            partial(self.ack, topic, group),
            partial(self.give_back, *key),
            _held=partial(self.held, *key),
            _now=monotonic,
            _lasts_s=lasts_s,
            _trusted_s=min(TRUSTED_S, ITERATED_PART * lasts_s),
        )
