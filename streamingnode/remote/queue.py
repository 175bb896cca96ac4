"""`node.mq` and `node.channels` of a client: `MessageQueue` and `ChannelService` over its connection."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from streamingnode.remote.calls import CHANNELS, TOPICS
from streamingnode.streams.channels import ChannelService
from wal.rocksmq.contract import ACK_TIMEOUT_S, Consumer, MessageQueue
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage, bodies_of

P = ParamSpec("P")
T = TypeVar("T")


def _asked(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method that has the node make the call of its name."""

    @wraps(method)
    def call(self: "_Remote", /, *arguments: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return self._ask(method.__name__, *arguments, **options)

    return call


class _Remote:
    prefix: str
    """Names of its calls begin so."""

    def __init__(self, call_of: Callable[..., Awaitable[Any]], number: Callable[[], int]) -> None:
        self._call_of, self._number = call_of, number

    async def _ask(self, name: str, *arguments: object, **options: object) -> Any:
        return await self._call_of(self.prefix + name, *arguments, **options)


class RemoteChannels(_Remote, ChannelService):
    """The channel service of a node of another process."""

    prefix = CHANNELS
    create_channels = _asked(ChannelService.create_channels)
    destroy_channels = _asked(ChannelService.destroy_channels)
    describe_channels = _asked(ChannelService.describe_channels)


class RemoteQueue(_Remote):
    """The topics of a node of another process; see `MessageQueue`.

    Calls that may be repeated are, over as many connections as it takes; of others `Indeterminate` is raised when the
    connection was lost. Consumers live on: what they held goes to whoever asks first. So does what `consume` returned.
    """

    prefix = TOPICS
    create_topic = _asked(MessageQueue.create_topic)
    destroy_topic = _asked(MessageQueue.destroy_topic)
    create_consumer_group = _asked(MessageQueue.create_consumer_group)
    destroy_consumer_group = _asked(MessageQueue.destroy_consumer_group)
    exist_consumer_group = _asked(MessageQueue.exist_consumer_group)
    ack = _asked(MessageQueue.ack)
    seek = _asked(MessageQueue.seek)
    force_seek = _asked(MessageQueue.force_seek)
    seek_to_latest = _asked(MessageQueue.seek_to_latest)
    get_latest_msg = _asked(MessageQueue.get_latest_msg)
    check_topic_valid = _asked(MessageQueue.check_topic_valid)
    notify = _asked(MessageQueue.notify)
    info = _asked(MessageQueue.info)

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        """See `MessageQueue.produce`; up to 8 MiB in one call. Not repeated by itself."""
        bodies_of(messages)
        ids: range = await self._ask("produce", topic, messages)
        return ids

    async def consume(self, topic: str, group: str, count: int, *, wait_s: float = 0.0) -> list[ConsumerMessage]:
        """See `MessageQueue.consume`."""
        messages: list[ConsumerMessage] = await self._ask("deliver", topic, group, 0, ACK_TIMEOUT_S, count, wait_s)
        return messages

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        """See `MessageQueue.register_consumer`."""
        key = topic, group, self._number()
        await self._ask("register", *key, ack_timeout_s)
        deliver = partial(self._ask, "deliver", *key, ack_timeout_s)
        return Consumer(deliver, partial(self.ack, topic, group), partial(self._ask, "give_back", *key))
