"""`TtMsgStream` hands on what channels hold up to one tick; factories make streams of a kind of message queue."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from streamingnode.streams.messages import MessagePlace, MsgPack, MsgPosition, place_of
from streamingnode.streams.stream import MsgStream, StreamOptions, Subscribed
from streamingnode.streams.ticks import Arrived, TickMerge
from streamingnode.streams.unmarshal import DispatcherFactory, UnmarshalDispatcher, proto_dispatcher
from wal.errors import ChannelIdle, GroupNotFound, InvalidArgument, Overloaded, TopicNotFound
from wal.rocksmq.contract import MessageQueue
from wal.rocksmq.group import HELD_MAX

Disposer = Callable[[], Awaitable[None]]


class TtMsgStream(MsgStream):
    """A stream whose packs are the messages of all channels above one tick and up to the next; see `MsgStream`.

    Every channel needs a producer that writes ticks. One stream has the subscription for itself.
    """

    def __init__(self, queue: MessageQueue, dispatcher: UnmarshalDispatcher, options: StreamOptions) -> None:
        super().__init__(queue, dispatcher, options)
        self._merge = TickMerge()
        self._open: dict[str, Counter[int]] = {}
        """By channel, how many messages of each message of the queue are not handed on."""
        self._sizes: dict[str, dict[int, int]] = {}
        self._held_bytes: Counter[str] = Counter()

    async def consume(self) -> MsgPack:
        """Return the messages up to the next tick that all channels reach, by channel in the order of arrival.

        A pack may be empty; of inserts and deletes with the same id and part in a channel it has the first. Otherwise as
        `MsgStream.consume`. Raises `ChannelIdle` when a channel it waits for is silent for `StreamOptions.idle_s`, and
        `Overloaded` for one that has too much before its next tick; what was read is kept, and it may be called again.
        """
        return await super().consume()

    async def seek(self, positions: Sequence[MsgPosition]) -> None:
        """Go on after the ticks of these positions, start or end positions of one pack: the next packs are those that came.

        Every channel needs its position. Raises as `MsgStream.seek` does.
        """
        places = {position.channel: place_of(position) for position in self._check_positions(positions)}
        if missing := sorted(self._subscribed.keys() - places.keys()):
            raise InvalidArgument(f"there is no position for channels {missing} — pass all positions of one pack")
        await self._seek({channel: MessagePlace(place.queue_id) for channel, place in places.items()})
        for position in positions:
            self._subscribed[position.channel].skip = places[position.channel]
            self._forget(position.channel)
        self._merge.seek(positions)

    def _joined(self, channel: str) -> None:
        self._merge.add(channel)
        self._forget(channel)

    def _forget(self, channel: str) -> None:
        self._open[channel], self._sizes[channel], self._held_bytes[channel] = Counter(), {}, 0

    def _next_pack(self) -> MsgPack | None:
        taken = self._merge.take()
        if taken is None:
            return None
        for channel, queue_id in taken.done:
            still_open = self._open[channel]
            still_open[queue_id] -= 1
            if not still_open[queue_id]:
                del still_open[queue_id]
                self._held_bytes[channel] -= self._sizes[channel].pop(queue_id)
                self._handed.setdefault(channel, []).append(queue_id)
        return taken.pack

    async def _read(self) -> None:
        behind = [channel for channel in self._subscribed.values() if self._merge.wants(channel.name)]
        for channel in behind:
            held, held_bytes = len(self._open[channel.name]), self._held_bytes[channel.name]
            if held >= HELD_MAX or held_bytes >= self._options.buffer_bytes_max:
                raise Overloaded(
                    f"channel {channel.name!r} has {held} messages, {held_bytes} bytes, before its next tick — "
                    "have its producer write ticks more often"
                )
        if not await self._read_from(behind, self._options.idle_s):
            assert self._options.idle_s is not None, "without it there is no end of waiting"
            raise ChannelIdle(tuple(channel.name for channel in behind), self._options.idle_s)

    def _take(self, channel: Subscribed, arrived: list[Arrived], size_bytes: int) -> None:
        queue_id = arrived[0].queue_id
        self._open[channel.name][queue_id] = len(arrived)
        self._sizes[channel.name][queue_id] = size_bytes
        self._held_bytes[channel.name] += size_bytes
        self._merge.push(channel.name, arrived)


class MsgStreamFactory(Protocol):
    """Makes streams over one message queue; each kind of queue has a factory."""

    def new_msg_stream(self) -> MsgStream:
        """Return a stream that hands messages on as they arrive."""

    def new_tt_msg_stream(self) -> TtMsgStream:
        """Return a stream that hands messages on by ticks."""

    def new_disposer(self, channels: Sequence[str], subscription: str) -> Disposer:
        """Return what ends a subscription to these channels for good: it keeps no message any more. It may be repeated."""


class RmqMsgStreamFactory:
    """Streams over the topics of a node: `RmqMsgStreamFactory(node.mq)`. What is written is kept with the topics.

    `new_dispatcher` makes the templates of each stream; those of a channel have to agree.
    """

    def __init__(
        self,
        queue: MessageQueue,
        *,
        new_dispatcher: DispatcherFactory = proto_dispatcher,
        options: StreamOptions | None = None,
    ) -> None:
        self._queue, self._new_dispatcher = queue, new_dispatcher
        self._options = options or StreamOptions()

    def new_msg_stream(self) -> MsgStream:
        """See `MsgStreamFactory.new_msg_stream`."""
        return MsgStream(self._queue, self._new_dispatcher(), self._options)

    def new_tt_msg_stream(self) -> TtMsgStream:
        """See `MsgStreamFactory.new_tt_msg_stream`."""
        return TtMsgStream(self._queue, self._new_dispatcher(), self._options)

    def new_disposer(self, channels: Sequence[str], subscription: str) -> Disposer:
        """See `MsgStreamFactory.new_disposer`."""

        async def dispose() -> None:
            for channel in channels:
                with suppress(TopicNotFound, GroupNotFound):
                    await self._queue.destroy_consumer_group(channel, subscription)

        return dispose
