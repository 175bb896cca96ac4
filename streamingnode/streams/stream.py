"""Message streams: producing to channels by hash keys, and consuming packs from many channels under
one subscription.

A channel is a topic of a `MessageQueue`, a subscription is one of its consumer groups. The
decisions are pure (`repack`, `merge`); this module does the waiting. Only reads and
acknowledgements that a `consume` began run in the background.
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
"""Maximum bytes of one produce call to the queue: messages up to this size are produced to a
channel atomically.
"""
ACK_EVERY_S = 0.1
"""Seconds between two acknowledgements of a busy stream; a stream acknowledges before it waits."""
LOOK_S = 1.0
"""A `consume` with a shorter timeout still gets this many seconds to return messages that already
exist.
"""
DECODED_BYTES_AT_ONCE = 1 << 20
"""Bytes decoded before other tasks of the event loop run."""

T = TypeVar("T")
_log = event_log(__name__)


class StartPosition(Enum):
    """Where a new subscription begins; with UNKNOWN it needs a `seek` first. An existing
    subscription continues where it was.
    """

    EARLIEST = "earliest"
    LATEST = "latest"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Above `buffer_bytes_max` bytes of messages that are not yet in a pack, a stream raises
    `Overloaded`. Idle channels are logged after `idle_after_s` seconds.

    With `ignore_bad_position`, a `seek` to a position that does not exist moves to the latest
    instead.
    """

    buffer_bytes_max: int = 256 << 20
    idle_after_s: float = 10.0
    ignore_bad_position: bool = False


DEFAULTS = StreamOptions()


class MsgStream:
    """Producer and consumer of channels. Used in `async with`; every pack is one batch of one
    channel.

    Calls may come from several tasks of one event loop. Each pack is consumed once while the stream
    is open, and counts as processed when the next one is requested or the stream is closed. A
    subscription that is opened again begins with the messages that were not processed.
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
            self._last = ()  # possibly not processed: it is delivered again
        await self.close()

    async def start(self) -> None:
        """Raise `OnShutdown` if the stream is closed; does nothing else."""
        self._check_open()

    async def close(self) -> None:
        """Acknowledge consumed messages and return the others to the queue; idempotent. A cancelled
        call still finishes.
        """
        await outlast(self._close())

    async def _close(self) -> None:
        self._closed = True
        async with self._turn:
            try:
                self._note_handed_on()
                await self._acknowledged()
                # In a channel whose position is unknown, acknowledging would leave a hole in the
                # redelivered messages.
                placed = [
                    each for each in self._subscriptions.values() if each.handed_on and each.placed
                ]
                # already removed: nothing to acknowledge
                with suppress(TopicNotFound, GroupNotFound, OnShutdown):
                    await _all_of([each.acknowledge() for each in placed])
            finally:
                for each in self._subscriptions.values():
                    # a waiting `consume` then raises `OnShutdown`
                    await each.stop_fetching()
                    await each.consumer.close()
                self._subscriptions.clear()

    # --- producing --------------------------------------------------------------------------------

    async def as_producer(self, channels: Sequence[str]) -> None:
        """Add channels to produce to, created if new. The order of channels over all calls is the
        order of the buckets.
        """
        self._check_open()
        for name in _names(channels):
            await self._queue.create_topic(name)
            if name not in self._produced:
                self._produced.append(name)

    def get_produce_channels(self) -> list[str]:
        """Return the channels to produce to, in the order of buckets."""
        return list(self._produced)

    def set_repack_func(self, repack_func: RepackFunc | None) -> None:
        """Let `repack_func` assign messages to channels; None restores the rules by message
        type.
        """
        self._repack_func = repack_func

    def force_enable_produce(self, enabled: bool) -> None:  # noqa: FBT001  (the name asks for it)
        """Turn producing on or off, for example off while another producer writes the stream's
        messages.
        """
        self._produce_enabled = enabled

    async def produce(self, pack: MsgPack) -> dict[str, list[int]]:
        """Produce each message to the channel of its hash keys, in the order of the pack; return
        the ids of batches by channel. Durable on return.

        Not atomic across channels: after an error some may have their messages. Raises
        `InvalidArgument` and `TooLarge` before anything is produced, `AccessDenied` while producing
        is off.
        """
        self._check_producer(pack, enabled=self._produce_enabled)
        if not pack.messages:
            return {}
        buckets = repack(pack.messages, len(self._produced), self._repack_func)
        return await self._send(
            {self._produced[bucket]: self.dispatcher.encode(of) for bucket, of in buckets.items()}
        )

    async def broadcast(self, pack: MsgPack) -> dict[str, list[int]]:
        """Produce as `produce`, but each message to every channel. A single message that creates a
        collection is sent even while producing is off.
        """
        creates = [getattr(each, "type", None) for each in pack.messages] == [
            MessageType.CREATE_COLLECTION
        ]
        self._check_producer(pack, enabled=self._produce_enabled or creates)
        if not pack.messages:
            raise InvalidArgument("the pack is empty — broadcast at least one message")
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
        """Add channels to consume, all for one subscription. A new channel is created, and a new
        subscription begins at `position`.
        """
        async with self._turn:
            self._check_open()
            if self._subscription not in {"", subscription} or not isinstance(
                position, StartPosition
            ):
                raise InvalidArgument(
                    f"{shown(subscription)}, {position!r} — open a stream for each subscription, "
                    "at a StartPosition"
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
            with suppress(AlreadyExists):  # another stream has just created it
                # One write: a crash between two writes would leave the group at the earliest
                # message.
                at = POSITION_MAX if position is StartPosition.LATEST else 0
                await self._queue.create_consumer_group(channel, subscription, at=at)
        consumer = await self._queue.register_consumer(channel, subscription, ack_timeout_s=None)
        return Subscription(
            channel, consumer, placed=exists or position is not StartPosition.UNKNOWN
        )

    @property
    def waiting_for(self) -> Collection[str]:
        """The channels that the next pack waits for."""
        return self._merge.behind()

    async def consume(self, *, timeout: float | None = None) -> MsgPack:
        """Return the next pack, waiting up to `timeout` seconds; then raise `DeadlineExceeded`,
        naming the channels that it waits for.

        Even with a shorter timeout, existing messages are returned if the queue delivers them
        within `LOOK_S`. Cancelling loses nothing. An error of the queue, or of an unreadable
        message, is raised by every call until it is repaired. Raises `Overloaded` when the buffer
        is full and the channels have no tick in common.
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
                f"no messages in time from {named} — check that producer and ticker run"
            ) from None

    async def chan(self) -> AsyncIterator[MsgPack]:
        """Yield packs until the stream or its queue is closed."""
        with suppress(OnShutdown):
            while True:
                yield await self.consume()

    async def seek(
        self, positions: Sequence[MsgPosition], *, include_current: bool = False
    ) -> None:
        """Continue from these positions, at most one for each channel; other channels stay where
        they are.

        Both kinds of stream accept the positions of both: after a seek to a pack's end positions
        the following packs are returned again, exactly as before. With `include_current` a plain
        stream's position also includes its message. Raises `InvalidArgument`, before any channel
        has moved, for a position that is not one of a consumed channel. Raises `InvalidArgument`
        for a message that does not exist yet and `Truncated` for one no longer kept, after the
        channels named before it have moved. After a cancellation or `Indeterminate`, repeat it
        before the next `consume`.
        """
        sought = {each.channel for each in positions if _is_place(each)}
        if (
            not positions
            or len(sought) < len(positions)
            or not sought <= self._subscriptions.keys()
        ):
            raise InvalidArgument(
                f"{shown(positions)} — pass at most one position for each channel of as_consumer()"
            )
        async with self._turn:
            self._check_open()
            await self._acknowledged()  # otherwise it might arrive after the seek
            for position in positions:
                each = self._subscriptions[position.channel]
                # otherwise the read might take messages after the new position, which `forget`
                # would drop
                await each.stop_fetching()
                # after a cancellation or `Indeterminate` the position is unknown
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
        # Ids of a queue are dense: the next message has the next id, and may not exist yet.
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
        """Return the end tick of the last batch of a channel, 0 when no batch is kept."""
        last = await self._queue.get_message(channel, await self._queue.get_latest_msg(channel))
        return self.dispatcher.decode(last.payload, last.properties).end_ts if last else 0

    async def _next_pack(self, looked: Callable[[], None]) -> MsgPack:
        is_logged = False
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
            idle_after_s = None if is_logged else self._options.idle_after_s
            done, _ = await asyncio.wait(
                waits, timeout=idle_after_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                is_logged = True
                _log.warning(
                    "stream_waits",
                    channels=sorted(self.waiting_for),
                    subscription=self._subscription,
                )

    async def _pack_at_hand(self) -> MsgPack | None:
        """Return the next pack if the queue already has all of it, else None."""
        while (pack := self._merge.pop()) is None:
            behind = [self._subscriptions[channel] for channel in self._merge.behind()]
            # the queue delivers no more to a group
            full = max(len(each.merged) for each in behind) >= HELD_MAX
            if full or self._merge.held_bytes > self._options.buffer_bytes_max:
                raise Overloaded(
                    f"{self._merge.held_bytes} bytes wait for {shown(sorted(self.waiting_for))} — "
                    "write the same ticks to all channels, more often, or raise buffer_bytes_max"
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
        """Mark the last pack as processed: everything before its end positions may be
        acknowledged.
        """
        for position in self._last:
            each = self._subscriptions[position.channel]
            behind = position.message_id + (not position.inclusive)
            while each.merged and each.merged[0] < behind:
                each.handed_on.append(each.merged.popleft())
        self._last = ()

    def _acknowledge(self) -> asyncio.Task[list[None]] | None:
        """Begin to acknowledge processed messages, unless there are none or an acknowledgement is
        under way; return the task under way. Raises the error of the last one.
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
            self._acking.add_done_callback(mark_heard)  # the next `consume` raises the error
        return self._acking

    async def _acknowledged(self) -> None:
        """Wait until no acknowledgement is under way. After a failed one its messages are
        acknowledged later.
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
            raise InvalidArgument(f"{shown(pack.messages)} are not messages — pass a list of TsMsg")
        if not self._produced:
            raise InvalidArgument(
                "the stream has no channels to produce to — call as_producer() first"
            )
        if not enabled:
            raise AccessDenied(
                "producing is off in this stream — force_enable_produce(True) turns it on"
            )

    def _check_consumer(self) -> None:
        self._check_open()
        if not self._subscriptions:
            raise InvalidArgument(
                "the stream has no channels to consume — call as_consumer() first"
            )
        if lost := [name for name, each in self._subscriptions.items() if not each.placed]:
            raise InvalidArgument(f"the position in {shown(lost)} is unknown — call seek() first")


class TtMsgStream(MsgStream):
    """A stream whose packs are the messages of one time tick over all consumed channels. A `Ticker`
    writes the ticks.

    To continue later exactly after a pack, save its `end_positions` and `seek` to them. The
    subscription alone is not exact: it keeps only whole batches that are not acknowledged, and a
    batch may hold messages on both sides of the tick.
    """

    _merge_kind = TickMerge


def _is_place(position: object) -> bool:
    """Whether a position has a valid id and tick: with any other a stream would wait forever."""
    if not isinstance(position, MsgPosition):
        return False
    if type(position.message_id) is not int or type(position.timestamp) is not int:
        return False
    return 0 <= position.timestamp <= TICK_MAX


def _names(channels: Sequence[str]) -> list[str]:
    if isinstance(channels, str) or not all(isinstance(name, str) and name for name in channels):
        raise InvalidArgument(f"channels={shown(channels)} — pass a list of names")
    return list(dict.fromkeys(channels))


async def _all_of(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of all calls. If some fail, raise the first error after all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for failed in results:
        if isinstance(failed, BaseException):
            raise failed
    return cast(list[T], results)
