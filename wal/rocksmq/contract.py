"""The contract of a message queue: `MessageQueue`, its consumers, statistics and options."""

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import index
from typing import Protocol, Self

import msgspec

from wal.errors import AlreadyExists, InvalidArgument, OnShutdown, Truncated, shown
from wal.position import POSITION_MAX
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage

ACK_TIMEOUT_S = 30.0
"""After how many seconds an unacknowledged message is delivered again; a consumer may set another
time.
"""
CONSUME_BYTES_MAX = 16 << 20
"""One call returns messages until their size reaches this."""
ITERATED_AT_ONCE = 100
ITERATION_WAIT_S = 60.0
"""An iterating consumer takes at most `ITERATED_AT_ONCE` messages in one call, and waits up to
`ITERATION_WAIT_S` seconds for them.
"""
ITERATED_S_MAX = 1.0
"""An iterating consumer takes as many messages as it processes in this many seconds..."""
ITERATED_PART = 0.1
"""... and in this part of its `ack_timeout_s`."""


class GroupInfo(msgspec.Struct, frozen=True):
    """A consumer group: everything below `current_id` is acknowledged, `lag` messages are
    unacknowledged, and consumers hold `held` of them.
    """

    current_id: int
    lag: int
    held: int


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic: its first kept id, its last id (`begin_id` - 1 when empty), its content, and its
    groups by name.

    `bytes` counts payloads and properties, at least 1 for each message. `produced`, `delivered` and
    `acked` count from the opening of the node.
    """

    begin_id: int
    end_id: int
    bytes: int
    pages: int
    acked_pages: int
    groups: dict[str, GroupInfo]
    produced: int = 0
    delivered: int = 0
    acked: int = 0


def check_numbers(
    *, count: int = 1, wait_s: float = 0.0, ack_timeout_s: float | None = None
) -> float:
    """Return how many seconds a consumer may hold messages; infinity means until it closes. Raises
    `InvalidArgument`.
    """
    try:
        lasts_s = math.inf if ack_timeout_s is None else ack_timeout_s + 0.0
        _ = wait_s + 0.0
    except (TypeError, OverflowError):  # not a number, or one that is not a time
        lasts_s = 0.0
    if not isinstance(count, int) or count < 1 or not lasts_s > 0:
        given = (
            f"count={shown(count)}, wait_s={shown(wait_s)}, ack_timeout_s={shown(ack_timeout_s)}"
        )
        raise InvalidArgument(
            f"{given} — request at least 1 message, and give seconds above 0, or None to hold "
            "until closing"
        )
    return lasts_s


def check_place(message_id: int, kept: tuple[int, int] | None = None) -> int:
    """Return a message id that a group may seek to; `kept` holds the first and the last id of its
    topic. Raises as `seek` does.
    """
    if type(message_id) is not int:
        raise InvalidArgument(
            f"{shown(message_id)} is not a message id — pass one that consume or produce returned"
        )
    if kept and message_id < kept[0]:
        raise Truncated(message_id, kept[0])
    if kept and message_id > kept[1] + 1:
        raise InvalidArgument(f"{message_id} does not exist yet — seek to {kept[1] + 1} at most")
    return message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class MqOptions:
    """Pages and retention of topics.

    A page ends with the message that takes it over `page_bytes`, or when retention finds all of it
    acknowledged. Pages that every group has acknowledged are deleted `retention_s` seconds after
    that, and, oldest first, while a topic has more than `retention_bytes` of them. None disables
    that limit. Pages that a group has not acknowledged are always kept.
    """

    page_bytes: int = 64 << 20
    retention_s: float | None = 3 * 86_400.0
    retention_bytes: int | None = 8 << 30


def _checked(ids: Iterable[int]) -> list[int]:
    """Return ids as plain integers. Raises `InvalidArgument` for anything else."""
    try:
        return [index(each) for each in ids]
    except TypeError as error:
        raise InvalidArgument(
            f"ids={shown(ids)} — pass a list of ids that consume returned"
        ) from error


async def _all_of(ids: Sequence[int], _for_s: float) -> Sequence[int]:
    """Return all ids, for a consumer whose queue never takes messages back."""
    return ids


def _no_clock() -> float:
    """Return the time of a consumer without a clock: every iteration counts as fast."""
    return 0.0


@dataclass(eq=False)
class Consumer:
    """One consumer of a group. Used in `async with`; iterating yields messages, one by one, and
    waits for more.

    It holds the messages that it got and did not acknowledge, until `ack_timeout_s` is over or the
    consumer is closed.

    Iterating takes several messages at a time from the queue: as many as the loop processes in a
    second and in a tenth of `ack_timeout_s`, at most 100. It yields a message only while the
    consumer holds it. It skips a message whose time is over, that a seek has passed, or that other
    consumers got after a lost connection. Over a connection this check is at most 0.1 s old, except
    that the end of the time is noticed at once. Messages left over by one loop are yielded first by
    the next one.
    """

    _deliver: Callable[..., Awaitable[list[ConsumerMessage]]]
    _ack: Callable[[Sequence[int]], Awaitable[None]]
    _give_back: Callable[[Sequence[int] | None], Awaitable[None]]
    _closed: bool = False
    _held: Callable[[Sequence[int], float], Awaitable[Sequence[int]]] = _all_of
    _now: Callable[[], float] = _no_clock
    """The clock, in seconds, that measures the pace of an iteration and the age of answers."""
    _lasts_s: float = math.inf
    """How many seconds it may hold a message."""
    _trusted_s: float = 0.0
    """How many seconds an iteration relies on an answer of `_held`; with 0 it asks before each
    message.
    """
    _fetched: deque[ConsumerMessage] = field(default_factory=deque)
    """Messages that an iteration has taken and not yet yielded."""
    _own: AbstractSet[int] = frozenset()
    """Ids of `_fetched` that the consumer holds, by an answer that is relied on until `_own_until`.
    """
    _own_until: float = -math.inf
    _taken: int = 0
    """How many messages an iteration took last, at the time `_taken_at`; it takes at most
    `_at_once`.
    """
    _taken_at: float = 0.0
    _at_once: int = 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[ConsumerMessage]:
        while not self._closed:
            if not self._fetched:
                await self._fetch()
                continue
            message = self._fetched[0]
            is_own = await self._is_own(message.message_id)
            if not self._fetched or self._fetched[0] is not message:
                continue  # another task iterates too and has taken it
            self._fetched.popleft()
            if is_own and not self._closed:  # closing has returned the rest
                yield message

    async def _fetch(self) -> None:
        """Take the messages that an iteration yields next."""
        asked_at = self._now()
        pace_s = min(ITERATED_S_MAX, ITERATED_PART * self._lasts_s)
        worked_s = asked_at - self._taken_at
        if self._taken and worked_s > pace_s:
            self._at_once = max(int(self._taken * pace_s / worked_s), 1)
        elif self._taken == self._at_once:
            self._at_once = min(2 * self._at_once, ITERATED_AT_ONCE)
        taken = await self.consume(self._at_once, wait_s=ITERATION_WAIT_S)
        self._fetched.extend(taken)
        self._taken = len(taken)
        self._taken_at = self._now()
        self._own = {message.message_id for message in taken}
        self._own_until = asked_at + self._trusted_s

    async def _is_own(self, message_id: int) -> bool:
        """Whether an iteration may yield a message that it has fetched."""
        if not self._trusted_s:
            return message_id in await self._held([message_id], 0.0)
        asked_at = self._now()
        if asked_at >= self._own_until:
            ids = [message.message_id for message in self._fetched]
            self._own = set(await self._held(ids, self._trusted_s))
            self._own_until = asked_at + self._trusted_s
        return message_id in self._own

    async def consume(self, count: int, *, wait_s: float = 0.0) -> list[ConsumerMessage]:
        """Consume as `MessageQueue.consume`; other consumers do not get the same messages
        meanwhile. Raises `OnShutdown` once it is closed.

        Closing the consumer ends a wait, which then returns an empty list.
        """
        if self._closed:
            raise OnShutdown("the consumer is closed — register another one")
        return await self._deliver(count, wait_s=wait_s)

    async def ack(self, ids: Sequence[int]) -> None:
        """As `MessageQueue.ack`."""
        await self._ack(ids)

    async def give_back(self, ids: Sequence[int]) -> None:
        """Return messages that it holds to the group, for immediate delivery to any consumer. Ids
        that it does not hold are ignored.
        """
        await self._give_back(_checked(ids))

    async def held(self, ids: Sequence[int]) -> list[int]:
        """Return which of these messages it still holds. No other consumer gets them before their
        time is over.

        For callers that take many messages with `consume` and process them slowly. Empty once the
        consumer is closed.
        """
        asked = _checked(ids)
        return [] if self._closed else list(await self._held(asked, 0.0))

    async def close(self) -> None:
        """Return unacknowledged messages, so that other consumers get them at once; idempotent."""
        if not self._closed:
            self._closed = True
            await self._give_back(None)


class MessageQueue(Protocol):
    """Topics, and consumer groups that each get every message of a topic at least once.

    Every change is durable when its call returns. Raises `InvalidArgument` for an invalid name or
    number, `TopicNotFound` and `GroupNotFound`, `OnShutdown` after closing, `LogReopening` and
    `StorageFull` when nothing was changed, `Indeterminate` when the outcome is open. Cancelling
    does not undo a change that has begun.
    """

    async def create_topic(self, topic: str) -> None:
        """Create a topic; does nothing if it exists."""

    async def destroy_topic(self, topic: str) -> None:
        """Remove a topic, its groups and its messages, and reclaim their space."""

    async def create_consumer_group(self, topic: str, group: str, *, at: int = 0) -> None:
        """Create a group that begins at message `at`, or at the nearest kept one. Raises
        `AlreadyExists`.
        """

    async def destroy_consumer_group(self, topic: str, group: str) -> None:
        """Remove a group: retention no longer keeps messages for it."""

    async def exist_consumer_group(self, topic: str, group: str) -> bool:
        """Whether the topic has this group."""

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        """Return a consumer; consumers of one group compete.

        Other consumers may get messages that this one does not acknowledge within `ack_timeout_s`
        seconds; with None, only after it is closed.
        """

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        """Add messages, all or none, and return their ids, which continue from the last id. Raises
        `TooLarge`.
        """

    async def consume(
        self, topic: str, group: str, count: int, *, wait_s: float = 0.0
    ) -> list[ConsumerMessage]:
        """Return up to `count` messages, and none after their size reaches 16 MiB; waits up to
        `wait_s` seconds for the first. Cancelling loses no message.

        Messages are returned in the order of ids, so redelivered ones come before new ones. A
        message is delivered again unless it is acknowledged in time; its `delivery_count` counts
        the deliveries. While consumers of the group hold 16,384 messages, the group gets no others.
        """

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        """Acknowledge messages, in any order: the group never gets them again, unless it seeks.
        Repeating an acknowledgement changes nothing.

        Raises `TooLarge`, and `Overloaded` when the group would leave too many gaps; then no
        message is acknowledged.
        """

    async def seek(self, topic: str, group: str, message_id: int) -> None:
        """Move the group to a message, in either direction: it is delivered next, and all below it
        count as acknowledged.

        Messages that consumers hold are released. Raises `Truncated`, which names the first kept
        id, for a message no longer kept, and `InvalidArgument` for an id above the next one.
        """

    async def force_seek(self, topic: str, group: str, message_id: int) -> None:
        """Move the group as `seek`, but for an id that is not kept to the nearest kept one."""

    async def seek_to_latest(self, topic: str, group: str) -> None:
        """Move the group behind the last message."""
        await self.force_seek(topic, group, POSITION_MAX)

    async def get_latest_msg(self, topic: str) -> int:
        """Return the last id, -1 when the topic holds no message."""

    async def get_message(self, topic: str, message_id: int) -> ConsumerMessage | None:
        """Return a message, independent of groups; None if it is no longer kept or does not exist
        yet.
        """

    async def check_topic_valid(self, topic: str) -> None:
        """Raise `TopicNotFound`, or `AlreadyExists` when it holds messages."""
        if await self.get_latest_msg(topic) >= 0:
            raise AlreadyExists(f"topic {topic!r} holds messages — use another one, or destroy it")

    async def notify(self, topic: str, group: str) -> None:
        """Wake the consumers that wait for messages of the group, to check again."""

    async def info(self) -> dict[str, TopicInfo]:
        """Return the statistics of all topics, by name."""
