"""What a queue of messages is to its users: `MessageQueue`, its consumers, what it tells of itself,
and its options.
"""

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
"""When what was delivered and not acknowledged comes again, unless the consumer says otherwise; in
seconds.
"""
CONSUME_BYTES_MAX = 16 << 20
"""Of one call, which ends with what takes it there."""
ITERATED_AT_ONCE = 100
ITERATION_WAIT_S = 60.0
"""An iterating consumer takes no more messages together, and waits so long before it asks again."""
ITERATED_S_MAX = 1.0
"""An iterating consumer takes as many messages as it works off in this time..."""
ITERATED_PART = 0.1
"""... and in this part of its `ack_timeout_s`."""


class GroupInfo(msgspec.Struct, frozen=True):
    """A consumer group: everything below `current_id` is acknowledged, `lag` messages are not,
    `held` are with consumers.
    """

    current_id: int
    lag: int
    held: int


class TopicInfo(msgspec.Struct, frozen=True):
    """A topic: its earliest kept id, its last one (one less when it is empty), what it holds, and
    its groups by name.

    `bytes` are those of payloads and properties, one where there are none. The counts go from the
    opening of the node on.
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
    """Return how long a consumer may hold messages, infinity for ever. Raises `InvalidArgument`."""
    try:
        lasts_s = math.inf if ack_timeout_s is None else ack_timeout_s + 0.0
        _ = wait_s + 0.0
    except (TypeError, OverflowError):  # no number, or one that is no time
        lasts_s = 0.0
    if not isinstance(count, int) or count < 1 or not lasts_s > 0:
        told = f"count={shown(count)}, wait_s={shown(wait_s)}, ack_timeout_s={shown(ack_timeout_s)}"
        raise InvalidArgument(
            f"{told} — ask for 1 message or more, give seconds, or None to hold for ever"
        )
    return lasts_s


def check_place(message_id: int, kept: tuple[int, int] | None = None) -> int:
    """Return a message id that a group may go to; `kept` are the first and last of its topic.
    Raises as `seek` does.
    """
    if type(message_id) is not int:
        raise InvalidArgument(
            f"{shown(message_id)} is no message id — pass one that consume or produce gave"
        )
    if kept and message_id < kept[0]:
        raise Truncated(message_id, kept[0])
    if kept and message_id > kept[1] + 1:
        raise InvalidArgument(f"{message_id} is yet to come — go to {kept[1] + 1} at most")
    return message_id


@dataclass(frozen=True, slots=True, kw_only=True)
class MqOptions:
    """Pages and retention of topics.

    A page ends with the message that takes it over `page_bytes`, or when retention finds all of it
    acknowledged. Pages that every group has acknowledged are given up `retention_s` after that,
    and, the oldest first, while a topic has more than `retention_bytes` of them. None: never for
    this reason. What a group has not acknowledged is always kept.
    """

    page_bytes: int = 64 << 20
    retention_s: float | None = 3 * 86_400.0
    retention_bytes: int | None = 8 << 30


def _checked(ids: Iterable[int]) -> list[int]:
    """Return ids as a connection takes them. Raises `InvalidArgument` for what is none."""
    try:
        return [index(each) for each in ids]
    except TypeError as error:
        raise InvalidArgument(f"ids={shown(ids)} — pass a list of ids that consume gave") from error


async def _all_of(ids: Sequence[int], _for_s: float) -> Sequence[int]:
    """Return all of them: what a consumer holds whose queue takes nothing back."""
    return ids


def _no_clock() -> float:
    """Return the time of a consumer without a clock: every iteration is a fast one."""
    return 0.0


@dataclass(eq=False)
class Consumer:
    """One consumer of a group. Used in `async with`; iterating yields messages, one by one, and
    waits for more.

    It holds what it got and did not acknowledge, until its time is over or the consumer is closed.

    Iterating takes several messages at a time from the queue: as many as the loop works off in a
    second and in a tenth of `ack_timeout_s`, at most 100. It yields a message only while the
    consumer holds it. It passes over a message whose time is over, that a seek has moved past, or
    that went to others with a lost connection. Over a connection it knows that as of 0.1 s ago at
    most, and of a time that is over at once. What one loop leaves is what the next one begins with.
    """

    _deliver: Callable[..., Awaitable[list[ConsumerMessage]]]
    _ack: Callable[[Sequence[int]], Awaitable[None]]
    _give_back: Callable[[Sequence[int] | None], Awaitable[None]]
    _closed: bool = False
    _held: Callable[[Sequence[int], float], Awaitable[Sequence[int]]] = _all_of
    _now: Callable[[], float] = _no_clock
    """Seconds of the clock that tells the pace of an iteration, and the age of an answer."""
    _lasts_s: float = math.inf
    """How long it may hold a message."""
    _trusted_s: float = 0.0
    """An iteration relies so long on what `_held` returned; 0: it asks before each message."""
    _fetched: deque[ConsumerMessage] = field(default_factory=deque)
    """What an iteration has taken and not yielded."""
    _own: AbstractSet[int] = frozenset()
    """Which of them it holds, as of an answer that is relied on until `_own_until`."""
    _own_until: float = -math.inf
    _taken: int = 0
    """How many an iteration took last, at `_taken_at`, and how many it takes at most."""
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
                continue  # another task iterates, too, and has it
            self._fetched.popleft()
            if is_own and not self._closed:  # closed, it has given the rest back
                yield message

    async def _fetch(self) -> None:
        """Take what an iteration yields next."""
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
        """As `MessageQueue.consume`; others do not get the same meanwhile. Raises `OnShutdown` once
        it is closed.

        Closing it ends a wait, which then returns nothing.
        """
        if self._closed:
            raise OnShutdown("the consumer is closed — register another one")
        return await self._deliver(count, wait_s=wait_s)

    async def ack(self, ids: Sequence[int]) -> None:
        """As `MessageQueue.ack`."""
        await self._ack(ids)

    async def give_back(self, ids: Sequence[int]) -> None:
        """Have messages that it holds come again, to whoever asks first; what it does not hold is
        passed over.
        """
        await self._give_back(_checked(ids))

    async def held(self, ids: Sequence[int]) -> list[int]:
        """Return which of these messages it holds: no others get them before their time is over.

        For who takes many with `consume` and works slowly. None once it is closed.
        """
        asked = _checked(ids)
        return [] if self._closed else list(await self._held(asked, 0.0))

    async def close(self) -> None:
        """Give back what is not acknowledged, so that others get it at once; idempotent."""
        if not self._closed:
            self._closed = True
            await self._give_back(None)


class MessageQueue(Protocol):
    """Topics, and consumer groups that each get every message of a topic at least once.

    What changes something is durable when it returns. Raises `InvalidArgument` for a name or number
    that cannot be, `TopicNotFound` and `GroupNotFound`, `OnShutdown` after closing, `LogReopening`
    and `StorageFull` when nothing was done, `Indeterminate` when that is not known. Cancelling
    undoes nothing that was begun.
    """

    async def create_topic(self, topic: str) -> None:
        """Make a topic; one that exists is fine."""

    async def destroy_topic(self, topic: str) -> None:
        """Remove a topic, its groups and its messages, and give their space back."""

    async def create_consumer_group(self, topic: str, group: str, *, at: int = 0) -> None:
        """Make a group, which begins at a message, or the nearest one that is kept. Raises
        `AlreadyExists`.
        """

    async def destroy_consumer_group(self, topic: str, group: str) -> None:
        """Remove a group: it keeps nothing from being given up any more."""

    async def exist_consumer_group(self, topic: str, group: str) -> bool:
        """Whether the topic has this group."""

    async def register_consumer(
        self, topic: str, group: str, *, ack_timeout_s: float | None = ACK_TIMEOUT_S
    ) -> Consumer:
        """Return a consumer; consumers of one group compete.

        What it got and did not acknowledge within `ack_timeout_s` others may get; None: not before
        it is closed.
        """

    async def produce(self, topic: str, messages: Sequence[ProducerMessage | bytes]) -> range:
        """Add messages, all or none, and return their ids, which follow on the last one. Raises
        `TooLarge`.
        """

    async def consume(
        self, topic: str, group: str, count: int, *, wait_s: float = 0.0
    ) -> list[ConsumerMessage]:
        """Return up to `count` messages, none behind 16 MiB; waits up to `wait_s` seconds for one.
        Cancelling loses none.

        What comes again comes first, the rest in the order of ids. It comes again unless it is
        acknowledged in time, and `delivery_count` of the message says how often it came. While
        consumers of the group hold 16,384 messages, it gets no others.
        """

    async def ack(self, topic: str, group: str, ids: Sequence[int]) -> None:
        """Acknowledge messages, in any order: the group never gets them again, unless it seeks.
        Repeating it is fine.

        Raises `TooLarge`, and `Overloaded` when the group would leave too many gaps; then none is
        acknowledged.
        """

    async def seek(self, topic: str, group: str, message_id: int) -> None:
        """Go to a message, in either direction: it is the next one, and all below it count as
        acknowledged.

        What consumers hold is forgotten. Raises `Truncated`, which names the earliest, for one no
        longer kept, and `InvalidArgument` for one that is yet to come, but for the very next.
        """

    async def force_seek(self, topic: str, group: str, message_id: int) -> None:
        """As `seek`; for an id that is not kept, the nearest one that is."""

    async def seek_to_latest(self, topic: str, group: str) -> None:
        """Go behind the last message."""
        await self.force_seek(topic, group, POSITION_MAX)

    async def get_latest_msg(self, topic: str) -> int:
        """Return the last id, -1 when the topic holds no message."""

    async def get_message(self, topic: str, message_id: int) -> ConsumerMessage | None:
        """Return a message, whatever groups have had, None for one that is not kept or yet to
        come.
        """

    async def check_topic_valid(self, topic: str) -> None:
        """Raise `TopicNotFound`, or `AlreadyExists` when it holds messages."""
        if await self.get_latest_msg(topic) >= 0:
            raise AlreadyExists(f"topic {topic!r} holds messages — use another one, or destroy it")

    async def notify(self, topic: str, group: str) -> None:
        """Have who waits for messages of the group look again."""

    async def info(self) -> dict[str, TopicInfo]:
        """Return what there is, by topic."""
