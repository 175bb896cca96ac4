"""Message streams: producing to channels by hash keys, and consuming packs from many channels under
one subscription.

A channel is a topic of a `MessageQueue`, a subscription a consumer group of it. What decides is
pure (`repack`, `merge`); here is what waits. Nothing runs in the background but the reads that a
`consume` has begun.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from time import monotonic
from typing import Any, Self, TypeVar, cast

from streamingnode.errors import AccessDenied, DeadlineExceeded
from streamingnode.streams.merge import Merge, PlainMerge, TickMerge
from streamingnode.streams.messages import (
    CONTENT_TYPE,
    MsgPack,
    MsgPosition,
    TsMsg,
    UnmarshalDispatcher,
    parts_within,
)
from streamingnode.streams.repack import RepackFunc, repack
from streamingnode.streams.subscription import Subscription
from wal.errors import (
    AlreadyExists,
    GroupNotFound,
    Indeterminate,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    StreamingNodeError,
    TopicNotFound,
    Truncated,
    brief,
    shown,
)
from wal.headers import MessageType
from wal.position import POSITION_MAX
from wal.rocksmq.contract import MessageQueue
from wal.rocksmq.group import HELD_MAX
from wal.rocksmq.messages import ProducerMessage
from wal.runtime import event_log, mark_heard, outlast
from wal.timetick import TICK_MAX

PRODUCE_BYTES_MAX = 7 << 20
"""Of one call of the queue: what is produced to a channel together is there or not, up to this
size.
"""
ACK_EVERY_S = 0.1
"""How often a busy stream acknowledges; one that waits does meanwhile."""
LOOK_S = 1.0
"""How long a `consume` with less time than that looks for what is there."""
DECODED_BYTES_AT_ONCE = 1 << 20
"""So much is decoded before other tasks of the event loop have their turn."""

T = TypeVar("T")
_log = event_log(__name__)


class StartPosition(Enum):
    """Where a new subscription begins, at UNKNOWN not before a `seek`; one that exists goes on
    where it was.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Above `buffer_bytes_max` of messages in no pack a stream is `Overloaded`; idle channels are
    told after `idle_after_s`.

    With `ignore_bad_position`, `seek` to a place that is not there goes to the latest instead.
    """

    buffer_bytes_max: int = 256 << 20
    idle_after_s: float = 10.0
    ignore_bad_position: bool = False


DEFAULTS = StreamOptions()


class MsgStream:
    """Producer and consumer of channels. Used in `async with`; every pack is one batch of one
    channel.

    Calls may come from several tasks of one event loop. Each pack is consumed once while the stream
    is open, and counts as worked off when the next one is asked for, or at `close`: a subscription
    that is opened again begins with what was not.
    """

    _merge_kind: type[Merge] = PlainMerge

    def __init__(
        self,
        queue: MessageQueue,
        dispatcher: UnmarshalDispatcher,
        options: StreamOptions = DEFAULTS,
    ) -> None:
        self._queue = queue
        self.dispatcher = dispatcher
        self._options = options
        self._merge: Merge = self._merge_kind()
        self._produced: list[str] = []
        self._repack_func: RepackFunc | None = None
        self._produce_enabled = True
        self._subscription = ""
        self._subscriptions: dict[str, Subscription] = {}
        self._turn = asyncio.Lock()
        self._last: Sequence[MsgPosition] = ()
        self._acking: asyncio.Task[list[None]] | None = None
        self._acked_s = monotonic()
        self._decoded_bytes = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, _error: object, _trace: object) -> None:
        if kind is not None:
            self._last = ()  # who knows whether that was worked off: it comes again
        await self.close()

    async def start(self) -> None:
        """Raise `OnShutdown` once the stream is closed; else there is nothing to do before packs
        are asked for.
        """
        self._check_open()

    async def close(self) -> None:
        """Acknowledge what was consumed, and give back what was not; idempotent. Cancellation waits
        for its end.
        """
        await outlast(self._close())

    async def _close(self) -> None:
        self._closed = True
        async with self._turn:
            try:
                self._note_handed_on()
                await self._acknowledged()
                # Of a channel in an unknown place that would leave a hole in what comes again.
                placed = [
                    each for each in self._subscriptions.values() if each.handed_on and each.placed
                ]
                # gone before: nobody asks for it again
                with suppress(TopicNotFound, GroupNotFound, OnShutdown):
                    await _all_of([each.acknowledge() for each in placed])
            finally:
                for each in self._subscriptions.values():
                    # whoever waits for it hears that the stream is closed
                    await each.stop_fetching()
                    await each.consumer.close()
                self._subscriptions.clear()

    # --- producing --------------------------------------------------------------------------------

    async def as_producer(self, channels: Sequence[str]) -> None:
        """Produce to these channels as well, made if they are new; their order, from all calls, is
        that of the buckets.
        """
        self._check_open()
        for name in _names(channels):
            await self._queue.create_topic(name)
            if name not in self._produced:
                self._produced.append(name)

    def get_produce_channels(self) -> list[str]:
        """Return the channels that are produced to, in the order of buckets."""
        return list(self._produced)

    def set_repack_func(self, repack_func: RepackFunc | None) -> None:
        """Have `repack_func` say where messages go; None: the rules of their types."""
        self._repack_func = repack_func

    def force_enable_produce(self, enabled: bool) -> None:  # noqa: FBT001  (the name asks for it)
        """Let the stream produce, or not, as one does whose messages another producer writes
        meanwhile.
        """
        self._produce_enabled = enabled

    async def produce(self, pack: MsgPack) -> dict[str, list[int]]:
        """Give each message to the channel of its hash keys, in the order of the pack; return the
        ids of batches, durable.

        Across channels it is not atomic: after an error some may have their part. Raises
        `InvalidArgument` and `TooLarge` before anything was produced, `AccessDenied` while
        producing is not enabled.
        """
        self._check_producer(pack, enabled=self._produce_enabled)
        if not pack.messages:
            return {}
        buckets = repack(pack.messages, len(self._produced), self._repack_func)
        return await self._send(
            {self._produced[bucket]: self.dispatcher.encode(of) for bucket, of in buckets.items()}
        )

    async def broadcast(self, pack: MsgPack) -> dict[str, list[int]]:
        """As `produce`, each message to every channel; one that creates a collection also while
        producing is not enabled.
        """
        creates = [getattr(each, "type", None) for each in pack.messages] == [
            MessageType.CREATE_COLLECTION
        ]
        self._check_producer(pack, enabled=self._produce_enabled or creates)
        if not pack.messages:
            raise InvalidArgument(
                "an empty pack says nothing to anybody — broadcast at least one message"
            )
        return await self._send(
            dict.fromkeys(self._produced, self.dispatcher.encode(pack.messages))
        )

    async def _send(self, batches: Mapping[str, Sequence[bytes]]) -> dict[str, list[int]]:
        sent = await _all_of([self._send_to(channel, each) for channel, each in batches.items()])
        return dict(zip(batches, sent, strict=True))

    async def _send_to(self, channel: str, batches: Sequence[bytes]) -> list[int]:
        messages = [ProducerMessage(batch, CONTENT_TYPE) for batch in batches]
        parts = parts_within(messages, PRODUCE_BYTES_MAX)
        return [
            message_id for part in parts for message_id in await self._queue.produce(channel, part)
        ]

    # --- consuming --------------------------------------------------------------------------------

    async def as_consumer(
        self,
        channels: Sequence[str],
        subscription: str,
        position: StartPosition = StartPosition.EARLIEST,
    ) -> None:
        """Consume these channels as well, for one subscription; both are made where they are new,
        that at `position`.
        """
        async with self._turn:
            self._check_open()
            if self._subscription not in {"", subscription} or not isinstance(
                position, StartPosition
            ):
                raise InvalidArgument(
                    f"{shown(subscription)}, {position!r} — open a stream for each, at a "
                    "StartPosition"
                )
            for name in [each for each in _names(channels) if each not in self._subscriptions]:
                self._subscriptions[name] = await self._join(name, subscription, position)
                self._subscription = subscription
                self._merge.add(name)

    async def _join(self, channel: str, subscription: str, position: StartPosition) -> Subscription:
        try:
            exists = await self._queue.exist_consumer_group(channel, subscription)
        except TopicNotFound:
            exists = False
            await self._queue.create_topic(channel)
        if not exists:
            with suppress(AlreadyExists):  # of another stream that begins at this moment
                # One write: a crash between two would leave it at the earliest.
                at = POSITION_MAX if position is StartPosition.LATEST else 0
                await self._queue.create_consumer_group(channel, subscription, at=at)
        consumer = await self._queue.register_consumer(channel, subscription, ack_timeout_s=None)
        return Subscription(
            channel, consumer, placed=exists or position is not StartPosition.UNKNOWN
        )

    @property
    def waiting_for(self) -> Collection[str]:
        """The channels of which something has to come before there is another pack."""
        return self._merge.behind()

    async def consume(self, *, timeout: float | None = None) -> MsgPack:
        """Return the next pack, waiting up to `timeout` seconds; then `DeadlineExceeded` names the
        channels without one.

        What is there is given however short that is, if the queue has it within `LOOK_S`.
        Cancelling loses nothing. An error of the queue, or of a message that cannot be read, is
        raised again and again until it is mended. Raises `Overloaded` when more is held than may be
        and channels have no tick in common.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + timeout
        deadline = asyncio.timeout(None if timeout is None else max(timeout, LOOK_S))
        try:
            async with deadline:
                return await self._next_pack(partial(deadline.reschedule, until))
        except TimeoutError:
            if not deadline.expired():
                raise
            named = brief(", ".join(sorted(self.waiting_for)))
            raise DeadlineExceeded(
                f"nothing came in time from {named} — see whether producer and ticker run"
            ) from None

    async def chan(self) -> AsyncIterator[MsgPack]:
        """Yield packs until the stream, or what it consumes from, is closed."""
        with suppress(OnShutdown):
            while True:
                yield await self.consume()

    async def seek(
        self, positions: Sequence[MsgPosition], *, include_current: bool = False
    ) -> None:
        """Go on from these positions, one for a channel at most; other channels stay where they
        are.

        Both kinds of stream take the positions of both: from end positions the packs that follow
        come once more, exactly as they were. `include_current` begins with the message itself also
        at a plain stream's position. Raises `InvalidArgument` for what is no position of a channel
        that is consumed, before any has moved; for a message yet to come, and `Truncated` for one
        no longer kept, when those named before it have. Cancelled or `Indeterminate`, it has to be
        repeated before the next `consume`.
        """
        sought = {each.channel for each in positions if _is_place(each)}
        if (
            not positions
            or len(sought) < len(positions)
            or not sought <= self._subscriptions.keys()
        ):
            raise InvalidArgument(
                f"{shown(positions)} — give one position for each channel that as_consumer() was "
                "given"
            )
        async with self._turn:
            self._check_open()
            await self._acknowledged()  # else it might come behind the new place
            for position in positions:
                each = self._subscriptions[position.channel]
                # else it might take what comes behind the new place, and be forgotten
                await each.stop_fetching()
                # cancelled or `Indeterminate`, it may have moved or not
                placed = each.placed
                each.placed = False
                try:
                    await self._seek_queue(position, include_current=include_current)
                except StreamingNodeError as error:
                    each.placed = placed and not isinstance(error, Indeterminate)
                    raise
                each.forget()
                each.placed = True
                self._last = [other for other in self._last if other.channel != position.channel]
                self._merge.seek(position)

    async def _seek_queue(self, position: MsgPosition, *, include_current: bool) -> None:
        # Ids of a queue are dense: behind a message is its id and one, which may be yet to come.
        message_id = position.message_id + (not (position.inclusive or include_current))
        try:
            await self._queue.seek(position.channel, self._subscription, message_id)
        except (InvalidArgument, Truncated):
            if not self._options.ignore_bad_position:
                raise
            _log.warning(
                "bad_position_ignored", channel=position.channel, message_id=position.message_id
            )
            await self._queue.seek_to_latest(position.channel, self._subscription)

    async def get_latest_msg_id(self, channel: str) -> int:
        """Return the id of the last batch of a channel, -1 for an empty one. Raises
        `TopicNotFound`.
        """
        return await self._queue.get_latest_msg(channel)

    async def last_ts(self, channel: str) -> int:
        """Return the end tick of the last batch of a channel, 0 when none is kept."""
        last = await self._queue.get_message(channel, await self._queue.get_latest_msg(channel))
        return self.dispatcher.decode(last.payload, last.properties).end_ts if last else 0

    async def _next_pack(self, looked: Callable[[], None]) -> MsgPack:
        told = False
        while True:
            async with self._turn:
                self._check_consumer()
                self._note_handed_on()
                if monotonic() - self._acked_s > ACK_EVERY_S:
                    self._acknowledge()
                if (pack := await self._pack_at_hand()) is not None:
                    self._last = pack.end_positions
                    return pack
                looked()
                waits: list[asyncio.Task[Any]] = [
                    self._subscriptions[each].fetching() for each in self._merge.behind()
                ]
                if (acking := self._acknowledge()) is not None:
                    waits.append(acking)
            idle_after_s = None if told else self._options.idle_after_s
            done, _ = await asyncio.wait(
                waits, timeout=idle_after_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                told = True
                _log.warning(
                    "stream_waits",
                    channels=sorted(self.waiting_for),
                    subscription=self._subscription,
                )

    async def _pack_at_hand(self) -> MsgPack | None:
        """Return the next pack of what the queue has, None when it has not all of it."""
        while (pack := self._merge.pop()) is None:
            behind = [self._subscriptions[channel] for channel in self._merge.behind()]
            # the queue gives a group no more than that
            full = max(len(each.merged) for each in behind) >= HELD_MAX
            if full or self._merge.held_bytes > self._options.buffer_bytes_max:
                raise Overloaded(
                    f"{self._merge.held_bytes} bytes wait for {shown(sorted(self.waiting_for))} — "
                    "write the same ticks to "
                    "all channels, and more of them, or raise buffer_bytes_max"
                )
            await _all_of([each.refill() for each in behind if not each.fetched])
            came = [each for each in behind if each.fetched]
            if not came:
                return None
            for each in came:
                self._decode_next(each)
                if self._decoded_bytes > DECODED_BYTES_AT_ONCE:
                    self._decoded_bytes = 0
                    await asyncio.sleep(0)
        return pack

    def _decode_next(self, of: Subscription) -> None:
        message = of.fetched[0]
        self._decoded_bytes += len(message.payload)
        try:
            batch = self.dispatcher.decode(message.payload, message.properties)
        except StreamingNodeError as error:
            error.add_note(f"in message {message.message_id} of channel {of.channel}")
            raise
        of.fetched.popleft()
        of.merged.append(message.message_id)
        self._merge.push(of.channel, message.message_id, batch)

    def _note_handed_on(self) -> None:
        """The last pack is worked off: everything before its end positions may be acknowledged."""
        for position in self._last:
            each = self._subscriptions[position.channel]
            behind = position.message_id + (not position.inclusive)
            while each.merged and each.merged[0] < behind:
                each.handed_on.append(each.merged.popleft())
        self._last = ()

    def _acknowledge(self) -> asyncio.Task[list[None]] | None:
        """Begin to acknowledge what was worked off, unless that is under way, or nothing was.
        Raises what it raised last.
        """
        if self._acking is not None and self._acking.done():
            acking = self._acking
            self._acking = None
            acking.result()
        if self._acking is None and (
            worked_off := [each for each in self._subscriptions.values() if each.handed_on]
        ):
            self._acked_s = monotonic()
            self._acking = asyncio.ensure_future(
                _all_of([each.acknowledge() for each in worked_off])
            )
            self._acking.add_done_callback(mark_heard)  # who consumes next meets it
        return self._acking

    async def _acknowledged(self) -> None:
        """Return when no acknowledgement is under way; what one that failed was for is acknowledged
        later.
        """
        if self._acking is not None:
            await asyncio.wait([self._acking])
            self._acking = None

    def _check_open(self) -> None:
        if self._closed:
            raise OnShutdown("the stream is closed — open another one")

    def _check_producer(self, pack: MsgPack, *, enabled: bool) -> None:
        self._check_open()
        if not all(isinstance(each, TsMsg) for each in pack.messages):
            raise InvalidArgument(f"{shown(pack.messages)} are no messages — give a list of TsMsg")
        if not self._produced:
            raise InvalidArgument(
                "the stream has no channels to produce to — as_producer() comes first"
            )
        if not enabled:
            raise AccessDenied(
                "producing is off in this stream — force_enable_produce(True) turns it on"
            )

    def _check_consumer(self) -> None:
        self._check_open()
        if not self._subscriptions:
            raise InvalidArgument(
                "the stream has no channels to consume — as_consumer() comes first"
            )
        if lost := [name for name, each in self._subscriptions.items() if not each.placed]:
            raise InvalidArgument(f"the place in {shown(lost)} is unknown — seek() comes first")


class TtMsgStream(MsgStream):
    """A stream whose packs are the messages of one time tick, over all channels that it consumes; a
    `Ticker` writes ticks.

    To go on later exactly where one was, save the `end_positions` of the last pack and `seek` to
    them: the subscription alone keeps what is not acknowledged, of which messages above the tick
    may be a part of a batch below.
    """

    _merge_kind = TickMerge


def _is_place(position: object) -> bool:
    """Whether it is a position of an id and a tick: a stream would wait for ever for any other."""
    if not isinstance(position, MsgPosition):
        return False
    if type(position.message_id) is not int or type(position.timestamp) is not int:
        return False
    return 0 <= position.timestamp <= TICK_MAX


def _names(channels: Sequence[str]) -> list[str]:
    if isinstance(channels, str) or not all(isinstance(name, str) and name for name in channels):
        raise InvalidArgument(f"channels={shown(channels)} — give a list of names")
    return list(dict.fromkeys(channels))


async def _all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return what all calls return; when some fail, raise the first error when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for failed in results:
        if isinstance(failed, BaseException):
            raise failed
    return cast(list[T], results)
