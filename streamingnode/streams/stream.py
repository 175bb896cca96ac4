"""Streams over the channels of a message queue: `MsgStream` hands on what was produced, as it arrived.

A channel is a topic, a subscription a consumer group of it. A pack counts as handled when the next one is asked for, or the
stream is closed without an error: then its messages are acknowledged, so each comes at least once. Nothing is read ahead of
what was asked for but what one call of the queue brings.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Self

import anyio

from streamingnode.errors import AccessDenied
from streamingnode.streams.messages import MessagePlace, MsgPack, MsgPosition, TsMsg, place_of, tick
from streamingnode.streams.repack import RepackFunc, repack
from streamingnode.streams.ticks import Arrived
from streamingnode.streams.unmarshal import MESSAGE_BYTES_MAX, UnmarshalDispatcher
from wal.errors import (
    AlreadyExists,
    ChannelNotFound,
    Corrupt,
    GroupNotFound,
    Indeterminate,
    InvalidArgument,
    LogReopening,
    OnShutdown,
    StorageFull,
    TopicNotFound,
    Truncated,
    shown,
)
from wal.headers import MessageType
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.runtime import mark_heard

READ_AT_ONCE = 64
"""Messages of the queue that are read together from one channel."""
READ_WAIT_S = 60.0
"""How long a call of the queue waits for messages before it is made again."""
PRODUCE_BYTES = MESSAGE_BYTES_MAX + (1 << 20)
"""What one call of the queue carries at most; more is several calls."""
TICK_INTERVAL_S = 0.2
"""How often a ticker writes a tick, unless it is told otherwise; in seconds."""


class SubscriptionPosition(Enum):
    """Where a subscription that is new to a channel begins; one that is there goes on where it is.

    UNKNOWN: nowhere; `seek` comes before `consume`.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """`idle_s`: after how long a stream of ticks reports a channel without ticks, in seconds; None: never.

    `ignore_bad_position`: seeking to what is no longer kept, or yet to come, goes to the end instead of raising.
    `buffer_bytes_max`: what a stream of ticks holds of one channel at most, encoded, while it waits for ticks.
    """

    idle_s: float | None = 30.0
    ignore_bad_position: bool = False
    buffer_bytes_max: int = 64 << 20


class Subscribed:
    """A channel that a stream consumes."""

    def __init__(self, name: str, consumer: Consumer, *, seek_first: bool) -> None:
        self.name, self.consumer, self.seek_first = name, consumer, seek_first
        self.reading: asyncio.Task[list[tuple[int, bytes]]] | None = None
        """It outlives a cancelled `consume`, so that nothing is lost."""
        self.backlog: deque[tuple[int, bytes]] = deque()
        """Read, and not looked at."""
        self.skip: MessagePlace | None = None
        """After a seek, the first message that counts."""


class MsgStream:
    """Produces into channels and consumes from channels; used on one event loop, `consume` by one task at a time.

    Every call raises `OnShutdown` once it is closed, and what the queue raises. Used in `async with`, which starts and
    closes it.
    """

    def __init__(self, queue: MessageQueue, dispatcher: UnmarshalDispatcher, options: StreamOptions) -> None:
        self._queue, self._dispatcher, self._options = queue, dispatcher, options
        self._channels: dict[str, None] = {}
        self._subscribed: dict[str, Subscribed] = {}
        self._subscription = ""
        self._rule: RepackFunc | None = None
        self._produces, self._started, self._closed, self._consuming = True, False, False, False
        self._ticker: asyncio.Task[None] | None = None
        self._arrived: deque[tuple[str, Sequence[Arrived]]] = deque()
        self._handed: dict[str, list[int]] = {}
        """Messages of the queue that the packs handed on have brought, until they are acknowledged."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close(handled=kind is None)

    async def start(self) -> None:
        """Allow `consume`; idempotent."""
        self._check_open()
        self._started = True

    async def close(self, *, handled: bool = True) -> None:
        """End the ticker and the consumers; idempotent. The last pack comes again when it was not `handled`."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            await self._end([self._ticker, *(each.reading for each in self._subscribed.values())])
            try:
                if handled:
                    with suppress(OnShutdown, TopicNotFound, GroupNotFound):  # nothing is left to acknowledge it to
                        await self._acknowledge()
            finally:
                for each in self._subscribed.values():
                    await each.consumer.close()

    # --- producing --------------------------------------------------------------------------------------------------------

    async def as_producer(self, channels: Sequence[str]) -> None:
        """Produce into these channels, too, which are made if they are new; their order is that of the buckets.

        Raises `InvalidArgument` for a name that no topic may have.
        """
        self._check_open()
        for channel in _names(channels):
            await self._queue.create_topic(channel)
            self._channels[channel] = None

    def get_produce_channels(self) -> list[str]:
        """Return the channels that the stream produces into, in the order of the buckets."""
        return list(self._channels)

    def set_repack_func(self, rule: RepackFunc | None) -> None:
        """Have `rule` choose the bucket of every message; None: the rules by type."""
        self._rule = rule

    def force_enable_produce(self, enabled: bool) -> None:  # noqa: FBT001  (a switch, named so elsewhere)
        """Switch producing on or off; while it is off, only a `CREATE_COLLECTION` alone, or a tick, is broadcast."""
        self._produces = enabled

    async def produce(self, pack: MsgPack) -> dict[str, list[bytes]]:
        """Produce each message into the channel of its hash keys, durably, and return their ids by channel.

        In one channel order is kept; channels are written side by side, so a failure may leave some of them written. Raises
        `InvalidArgument` and `TooLarge`, when nothing was, as `repack` does and without a producer; `AccessDenied`.
        """
        self._check_producing(pack.msgs, denied=not self._produces)
        channels = list(self._channels)
        found = repack(pack.msgs, len(channels), self._rule)
        return await self._write({channels[bucket]: messages for bucket, messages in sorted(found.items())})

    async def broadcast(self, pack: MsgPack) -> dict[str, list[bytes]]:
        """Produce every message into every channel, and return their ids by channel; as `produce` does.

        Raises `InvalidArgument` for an empty pack.
        """
        alone = len(pack.msgs) == 1 and pack.msgs[0].type in {MessageType.CREATE_COLLECTION, tick(0).type}
        self._check_producing(pack.msgs, denied=not (self._produces or alone))
        if not pack.msgs:
            raise InvalidArgument("the pack to broadcast is empty — give it messages")
        return await self._write(dict.fromkeys(self._channels, pack.msgs))

    def start_ticker(self, next_tick: Callable[[], int], *, interval_s: float = TICK_INTERVAL_S) -> None:
        """Write a tick to every channel each `interval_s` seconds, until the stream is closed.

        `next_tick` returns it: nothing at or below it is produced from then on, by anybody; one that is not above the last
        is not written. When writing one fails, the next is tried; what `next_tick` raises ends the ticker, and is raised by
        `produce` and `broadcast`.
        """
        self._check_producing([], denied=False)
        if not interval_s > 0:
            raise InvalidArgument(f"interval_s={interval_s!r} is no interval — give seconds above 0")
        if self._ticker is not None:
            raise InvalidArgument("the stream has a ticker — close the stream to end it")
        self._ticker = asyncio.get_running_loop().create_task(self._tick(next_tick, interval_s))
        self._ticker.add_done_callback(mark_heard)  # producing tells it

    async def _tick(self, next_tick: Callable[[], int], interval_s: float) -> None:
        last = -1
        while True:
            ts = next_tick()
            if ts > last:
                with suppress(LogReopening, StorageFull, Indeterminate):  # the next tick says all that this one would
                    ticks = [tick(ts)]
                    await self._write(dict.fromkeys(self._channels, ticks))
                    last = ts
            await anyio.sleep(interval_s)

    async def _write(self, messages: dict[str, Sequence[TsMsg]]) -> dict[str, list[bytes]]:
        # All is encoded before anything is produced: what cannot be leaves nothing behind.
        packed: dict[int, list[tuple[bytes, int]]] = {}
        for each in messages.values():
            if id(each) not in packed:  # a broadcast is encoded once
                packed[id(each)] = self._dispatcher.pack(each)
        writing = [self._write_channel(channel, packed[id(each)]) for channel, each in messages.items()]
        results = await asyncio.gather(*writing, return_exceptions=True)  # none is left behind by another's failure
        for failed in results:
            if isinstance(failed, BaseException):
                raise failed
        return {channel: ids for channel, ids in zip(messages, results, strict=True) if isinstance(ids, list)}

    async def _write_channel(self, channel: str, packed: list[tuple[bytes, int]]) -> list[bytes]:
        ids: list[bytes] = []
        for call in _calls(packed):
            written = await self._queue.produce(channel, [payload for payload, _ in call])
            for queue_id, (_, count) in zip(written, call, strict=True):
                ids += [MessagePlace(queue_id, at, count).message_id for at in range(count)]
        return ids

    # --- consuming --------------------------------------------------------------------------------------------------------

    async def as_consumer(
        self,
        channels: Sequence[str],
        subscription: str,
        position: SubscriptionPosition = SubscriptionPosition.EARLIEST,
    ) -> None:
        """Consume these channels, too, as the group `subscription`, both made where they are new.

        Streams of one subscription share its messages. Raises `InvalidArgument` for another subscription than before.
        """
        self._check_open()
        if self._subscription not in {"", subscription}:
            raise InvalidArgument(
                f"the stream consumes as {self._subscription!r} — open another stream for {shown(subscription)}"
            )
        position = SubscriptionPosition(position)
        for channel in _names(channels):
            if channel in self._subscribed:
                continue
            await self._queue.create_topic(channel)
            is_new = True
            try:
                await self._queue.create_consumer_group(channel, subscription)
            except AlreadyExists:
                is_new = False
            if is_new and position is SubscriptionPosition.LATEST:
                await self._queue.seek_to_latest(channel, subscription)
            consumer = await self._queue.register_consumer(channel, subscription, ack_timeout_s=None)
            seek_first = is_new and position is SubscriptionPosition.UNKNOWN
            self._subscribed[channel] = Subscribed(channel, consumer, seek_first=seek_first)
            self._subscription = subscription
            self._joined(channel)

    async def consume(self) -> MsgPack:
        """Return what comes next: what was produced together for one channel; waits for it, and cancelling loses none.

        It acknowledges the pack before. Raises `InvalidArgument` without a subscription, before `start`, and before `seek`
        when the position is unknown; `Corrupt`, again and again until a seek, for what is no message.
        """
        if self._consuming:
            raise InvalidArgument("another task is consuming — take turns, or open a stream for each")
        self._check_consuming()
        self._consuming = True
        try:
            await self._acknowledge()
            while True:
                if (pack := self._next_pack()) is not None:
                    return pack
                await self._read()
        finally:
            self._consuming = False

    async def chan(self) -> AsyncIterator[MsgPack]:
        """Yield packs for ever, as `consume` returns them; ends when the stream is closed."""
        with suppress(OnShutdown):
            while True:
                yield await self.consume()

    async def seek(self, positions: Sequence[MsgPosition]) -> None:
        """Go on behind these messages, each in its channel; what was handed on before them counts as acknowledged.

        Nothing moves unless every position can be. Raises `ChannelNotFound` for a channel without a subscription,
        `InvalidArgument` for what is no position or is yet to come, `Truncated` for one no longer kept.
        """
        await self._seek({position.channel: place_of(position).behind for position in self._check_positions(positions)})

    async def get_latest_msg_id(self, channel: str) -> bytes:
        """Return the id that a seek goes to the end with, b"" for an empty channel. Raises `TopicNotFound`."""
        self._check_open()
        last = await self._queue.get_latest_msg(channel)
        return b"" if last < 0 else MessagePlace(last).message_id

    def _joined(self, channel: str) -> None:
        """Take note of a channel that is consumed from now on."""

    def _next_pack(self) -> MsgPack | None:
        """Return a pack that is complete, and note what it ends with in `_handed`."""
        if not self._arrived:
            return None
        channel, arrived = self._arrived.popleft()
        self._handed.setdefault(channel, []).append(arrived[0].queue_id)
        messages = [each.message for each in arrived]
        positions = [each.position for each in arrived]
        return MsgPack(
            msgs=messages,
            begin_ts=min(message.begin_ts for message in messages),
            end_ts=max(message.end_ts for message in messages),
            positions=positions,
            start_positions=positions[:1],
            end_positions=positions[-1:],
        )

    async def _read(self) -> None:
        """Wait until something has arrived."""
        await self._read_from(self._subscribed.values())

    def _take(self, channel: Subscribed, arrived: list[Arrived], size_bytes: int) -> None:
        """Take what one message of the queue has brought."""
        self._arrived.append((channel.name, arrived))

    async def _read_from(self, channels: Iterable[Subscribed], timeout_s: float | None = None) -> bool:
        """Take what has arrived in any of these channels, and return whether they brought anything in time."""
        channels = list(channels)
        if not any(channel.backlog for channel in channels):
            waiting: dict[asyncio.Task[list[tuple[int, bytes]]], Subscribed] = {}
            for channel in channels:
                if channel.reading is None:
                    channel.reading = asyncio.get_running_loop().create_task(_messages(channel.consumer))
                waiting[channel.reading] = channel
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            self._check_open()  # closing cancels what is waited for
            if not done:
                return False
            for task in done:
                waiting[task].reading = None
                waiting[task].backlog.extend(task.result())
        for channel in channels:
            while channel.backlog:  # one that is no message stays the first
                queue_id, payload = channel.backlog[0]
                if arrived := self._unpack(channel, queue_id, payload):
                    self._take(channel, arrived, len(payload))
                else:
                    self._handed.setdefault(channel.name, []).append(queue_id)
                channel.backlog.popleft()
        return True

    def _unpack(self, channel: Subscribed, queue_id: int, payload: bytes) -> list[Arrived]:
        try:
            messages = self._dispatcher.unpack(payload)
        except Corrupt as error:
            raise Corrupt(
                f"message {queue_id} of channel {channel.name!r}: {error.happened} — seek behind it"
            ) from error
        found = [
            Arrived(
                message,
                MsgPosition(channel.name, MessagePlace(queue_id, at, len(messages)).message_id, message.begin_ts),
                queue_id,
            )
            for at, message in enumerate(messages)
        ]
        skip = channel.skip
        return found if skip is None or queue_id != skip.queue_id else found[skip.at :]

    async def _acknowledge(self) -> None:
        while self._handed:
            channel, ids = next(iter(self._handed.items()))
            await self._subscribed[channel].consumer.ack(ids)
            del self._handed[channel]

    async def _seek(self, places: dict[str, MessagePlace]) -> None:
        topics = await self._queue.info()
        for channel, place in places.items():
            topic = topics.get(channel)
            if topic is None:
                raise TopicNotFound(f"there is no topic {shown(channel)}")
            kept = topic.begin_id <= place.queue_id <= topic.end_id + 1
            if not kept and not self._options.ignore_bad_position:
                if place.queue_id < topic.begin_id:
                    raise Truncated(f"message {place.queue_id} of channel {channel!r}", topic.begin_id)
                raise InvalidArgument(
                    f"message {place.queue_id} of channel {channel!r} is yet to come — seek to a pack's"
                )
            if not kept:
                places[channel] = MessagePlace(topic.end_id + 1)
        self._arrived = deque(each for each in self._arrived if each[0] not in places)
        for channel in places:
            self._subscribed[channel].seek_first = True  # a seek that is cut short has to be made again
        for channel, place in places.items():
            subscribed = self._subscribed[channel]
            await self._end([subscribed.reading])
            subscribed.reading = None
            subscribed.backlog.clear()
            self._handed.pop(channel, None)
            await self._queue.seek(channel, self._subscription, place.queue_id)
            subscribed.skip, subscribed.seek_first = place, False

    def _check_positions(self, positions: Sequence[MsgPosition]) -> Sequence[MsgPosition]:
        self._check_open()
        if self._consuming:
            raise InvalidArgument("another task is consuming — cancel it before a seek")
        if not positions or not all(isinstance(position, MsgPosition) for position in positions):
            raise InvalidArgument(f"positions={shown(positions)} — pass a list of MsgPosition, as a pack gave them")
        for position in positions:
            if position.channel not in self._subscribed:
                raise ChannelNotFound(f"the stream is not subscribed to channel {shown(position.channel)}")
        return positions

    def _check_open(self) -> None:
        if self._closed:
            raise OnShutdown("the stream is closed — open another one")

    def _check_consuming(self) -> None:
        self._check_open()
        if not self._started or not self._subscribed:
            raise InvalidArgument(
                "nothing is consumed yet — call as_consumer and start, or use the stream in async with"
            )
        if waiting := [each.name for each in self._subscribed.values() if each.seek_first]:
            raise InvalidArgument(f"the position in {shown(waiting)} is unknown — seek first")

    def _check_producing(self, messages: Sequence[TsMsg], *, denied: bool) -> None:
        self._check_open()
        if denied:
            raise AccessDenied(
                "producing is switched off for this stream — switch it on with force_enable_produce(True)"
            )
        if not self._channels:
            raise InvalidArgument("the stream produces into no channel — call as_producer first")
        if self._ticker is not None and self._ticker.done():
            self._ticker.result()

    async def _end(self, tasks: Iterable[asyncio.Task[object] | None]) -> None:
        for task in tasks:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
                mark_heard(task)


def _calls(packed: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """Yield what one call of the queue takes each."""
    call: list[tuple[bytes, int]] = []
    size_bytes = 0
    for each in packed:
        if call and size_bytes + len(each[0]) > PRODUCE_BYTES:
            yield call
            call, size_bytes = [], 0
        call.append(each)
        size_bytes += len(each[0])
    if call:
        yield call


async def _messages(consumer: Consumer) -> list[tuple[int, bytes]]:
    while True:
        found = await consumer.consume(READ_AT_ONCE, wait_s=READ_WAIT_S)
        if found:
            return [(message.message_id, message.payload) for message in found]


def _names(channels: Sequence[str]) -> Sequence[str]:
    if isinstance(channels, str) or not isinstance(channels, Sequence):
        raise InvalidArgument(f"channels={shown(channels)} — pass a list of names")
    return channels
