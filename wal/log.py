"""The contract of a log store, which those on RocksDB and in memory keep, and the append groups that they take.

`tests/wal/log_contract.py` is the contract as tests; every store passes it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from wal.errors import InvalidArgument
from wal.failpoint import failpoint
from wal.headers import DDL, DML, MAKES_ROOM, MessageType
from wal.message import LogEntry, Message, MutableMessage
from wal.position import MessageId, Place, ProducerStamp, message_id_kind


class AppendTicket(msgspec.Struct, frozen=True):
    """A group that has its place in the log.

    `written` is done when the store's durability mode says the append is acknowledged: it is the appender's own, who may
    wait for it and be cancelled. `durable` is done when the append is synced, never later than an acknowledgement that
    promises it; nobody cancels it, so it decides the outcome whoever listens. Both fail with `Indeterminate` when the write
    failed.
    """

    first_position: int
    crc32c: int
    size_bytes: int
    written: asyncio.Future[None]
    durable: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class AppendGroup:
    """The messages of one append, on one pchannel: written as one entry, at one tick, or not at all.

    The chain stamps it: `row_offsets` maps each vchannel to the first offset and the count of the rows inserted there,
    `ticket` is set once the group has its place in the log. `producer` says which write this is, for those that may be
    retried; `draw` gives it the producer's next sequence where it has none yet, and `place` keeps that of a write with a
    sequence. `other_try` is another try at the same write, which this one waits for or was repeated by.
    """

    messages: list[MutableMessage]
    time_tick: int = 0
    row_offsets: dict[str, tuple[int, int]] = field(default_factory=dict)
    ticket: AppendTicket | None = None
    producer: ProducerStamp | None = None
    place: Place | None = None
    draw: Callable[[], None] | None = None
    other_try: "AppendGroup | None" = None

    @property
    def begun(self) -> bool:
        """Whether the write has, or may have, its place in the log: by this group or by the one that stands for it."""
        return self.ticket is not None or (self.other_try is not None and self.other_try.begun)

    @property
    def vchannels(self) -> tuple[str, ...]:
        """The distinct vchannels of the messages, in the order in which locks are taken."""
        return tuple(sorted({message.vchannel for message in self.messages}))

    @property
    def exclusive(self) -> bool:
        """Whether the group takes its vchannels for itself; DDL comes with nothing else."""
        return self.messages[0].type in DDL

    @property
    def makes_room(self) -> bool:
        """Whether log can be given up because of the group, so that a disk short of space still takes it."""
        return self.messages[0].type in MAKES_ROOM

    @property
    def size_bytes(self) -> int:
        """The messages' sizes added up."""
        messages = self.messages
        return messages[0].size_bytes if len(messages) == 1 else sum(message.size_bytes for message in messages)

    @property
    def has_books_to_close(self) -> bool:
        """Whether the chain has something to do for the group after its place in the log's queue.

        Rows that are a whole by themselves need nothing more than their ticket; a transaction's session, and who else has
        an exclusive message's vchannels, wait for the end of the append.
        """
        head = self.messages[0]
        if head.type is MessageType.BEGIN_TXN:
            return len(self.messages) == 1
        return bool(head.txn_id) or head.type not in DML

    def copier(self) -> "Callable[[], AppendGroup]":
        """Return what makes a group as this one is now, but for a sequence it was given: that is the write's."""
        unstamped = [(message.header, message.txn_id) for message in self.messages]

        def copy() -> AppendGroup:
            messages = [
                replace(message, header=header, txn_id=txn_id)
                for message, (header, txn_id) in zip(self.messages, unstamped, strict=True)
            ]
            return AppendGroup(messages, producer=self.producer, place=self.place)

        return copy

    def stamp_time_tick(self, time_tick: int, last_confirmed: int | None) -> None:
        """Give every message the group's tick and last-confirmed position (None: its own)."""
        self.time_tick = time_tick
        for message in self.messages:
            message.with_time_tick(time_tick).with_last_confirmed(last_confirmed)

    def entry(self, wal_name: str) -> LogEntry:
        """Return the entry that the group is in its log, frozen: its messages may be used again afterwards."""
        ticket, head = self.ticket, self.messages[0]
        assert ticket is not None, "the group has its place"
        first = ticket.first_position
        last_confirmed = first if head.last_confirmed is None else head.last_confirmed
        return LogEntry(
            first_position=first,
            time_tick=head.time_tick,
            last_confirmed_position=last_confirmed,
            wal_term=head.wal_term,
            crc32c=ticket.crc32c,
            size_bytes=ticket.size_bytes,
            messages=tuple(
                Message(
                    type=message.type,
                    header=message.header,
                    vchannel=message.vchannel,
                    payload=message.payload,
                    txn_id=message.txn_id,
                    wal_name=wal_name,
                    position=position,
                    last_confirmed_position=last_confirmed,
                    time_tick=head.time_tick,
                    wal_term=head.wal_term,
                )
                for position, message in enumerate(self.messages, first)
            ),
            producer=self.producer,
        )

    def result(self, kind: type[MessageId]) -> "AppendResult":
        """Return what its appender is told once the log has acknowledged it; `kind` is that of the log's ids."""
        ticket, head = self.ticket, self.messages[0]
        assert ticket is not None, "the group has its place"
        first = ticket.first_position
        return AppendResult(
            first_message_id=kind(first),
            count=len(self.messages),
            time_tick=self.time_tick,
            last_confirmed=kind(first if head.last_confirmed is None else head.last_confirmed),
            txn_id=head.txn_id,
            row_offsets=self.row_offsets,
            durable=ticket.durable.done(),
        )

    def require_tick_above(self, last_tick: int) -> None:
        """Raise `InvalidArgument` unless the group's tick is above that of the entry before it; every log asks first.

        A log whose order is not that of its ticks cannot be read any more: readers release by tick and resume by position.
        """
        tick = self.messages[0].time_tick
        if tick <= last_tick:
            raise InvalidArgument(
                f"tick {tick} is not above {last_tick}, the last one in the log; nothing was written — report it as a bug"
            )

    def stamp_wal_term(self, term: int) -> None:
        """Give every message the term of the WAL that writes it."""
        for message in self.messages:
            message.with_wal_term(term)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What became of an append group of `count` messages that is in the log.

    `txn_id` is 0 outside a transaction; `durable` says whether it was synced when it was acknowledged.
    """

    first_message_id: MessageId
    count: int
    time_tick: int
    last_confirmed: MessageId
    txn_id: int = 0
    row_offsets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    durable: bool = True

    @property
    def message_id(self) -> MessageId:
        """The position of the group's last message."""
        return self.message_ids[-1]

    @property
    def message_ids(self) -> tuple[MessageId, ...]:
        """The positions of the group's messages, in order."""
        first = self.first_message_id
        return tuple(type(first)(first.position + i) for i in range(self.count))


Append = Callable[[AppendGroup], Awaitable[AppendResult]]
"""Append a group. Once the log has said yes, nothing on the way back turns it into an error."""


class Interceptor(ABC):
    """One concern of the append path, wrapped around the rest of it.

    Only redo and lock may suspend before they call `append`; from the tick on, everything up to the log's queue runs in
    one step, so that position order is tick order. An interceptor that would have to wait raises `Redo` instead.
    """

    name: str
    """What measurements call it."""

    @abstractmethod
    def do_append(self, group: AppendGroup, append: Append) -> Awaitable[AppendResult]:
        """Do this concern's part before and after `append`."""

    async def ready(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Return once appends may pass: at once unless said otherwise."""

    async def close(self) -> None:  # noqa: B027 - nor anybody to send away
        """Send away who waits; new appends are already refused, and what waits for nothing ends by itself. Idempotent."""


class AppendObserver(Protocol):
    """Where measurements of the append path go; must be cheap and must not raise."""

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        """An interceptor took `before_s` seconds until it called the next, and `after_s` after that returned."""

    def append_ended(self, group: AppendGroup, seconds: float, status: str) -> None:
        """An append of `group` ended as `ok`, `cancel` or `error` after `seconds`."""


class Log(Protocol):
    """One ordered log. Positions are dense from 1, ids ascend in append order, entries are atomic.

    All methods are called on the event loop; none blocks it.
    """

    name: str
    wal_name: str
    """The kind of log, as message ids name it."""
    first_position: int
    """Position of the earliest message still kept; `next_position` when none is."""
    next_position: int
    last_tick: int
    """Tick of the last entry in the log, 0 for an empty one."""

    @property
    def durable_position(self) -> int:
        """Position of the last message known to be synced; 0 when none is."""

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait until the queue has room for `size_bytes`; back-pressure, first come first served.

        Raises `StorageFull` when the disk is below its low-water mark (what `makes_room` only when nothing can be written
        any more), `OnShutdown` when closed, `LogReopening` when an earlier write failed and the store refuses more.
        Cancelling gives the place in the queue back.
        """

    def append(self, group: AppendGroup) -> AppendTicket:
        """Give a stamped group its positions and queue it; never suspends, so call order is position order.

        Entries become durable in call order; when one fails, all after it fail too. Raises as `admit` does, and
        `InvalidArgument`, before anything is queued, for a tick that is not above the one before it.
        """

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return consecutive synced entries from the one that holds `position`, at least one if there is one.

        Stops after the entry that reaches `bytes_max`. Empty when `position` is past the last synced entry. Every entry is
        checked: checksum, chain, density. Raises `Truncated` below `first_position`, `Corrupt` with the range for damage
        or an early end.
        """

    async def wait_beyond(self, position: int) -> None:
        """Wait, without polling, until a message after `position` is synced. Raises `OnShutdown` on close."""

    async def truncate(self, position: int) -> None:
        """Give up everything before the entry that holds `position`, and its disk space; idempotent."""


class LogStore(Protocol):
    """Owner of a node's logs, one for each pchannel, and of the small map of state beside them."""

    node_id: str
    """Identity of the node's data, made at first open and kept for ever."""
    term: int
    """Number of this ownership, above every earlier one."""
    promised_tick: int
    """The highest tick any earlier term may have given to a reader; new ticks start above it."""

    @property
    def short_of_space(self) -> bool:
        """Whether log should be given up before appends have to be refused."""

    async def promise_tick(self, tick: int) -> None:
        """Remember that ticks up to `tick` may be given to readers without an entry in the log; durable on return."""

    async def open_log(self, name: str) -> Log:
        """Return the log of pchannel `name`, made if it is new, verified if not."""

    async def get_meta(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, in key order."""

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys (None removes) all at once; durable when it returns."""

    @property
    def condition(self) -> str:
        """The store's own state, for people."""

    @property
    def taking_writes(self) -> bool:
        """Whether writes are taken: no write has failed since the store was opened, or reopened, and it is not closed."""

    async def wait_failed(self) -> None:
        """Wait until the store takes no writes because one has failed, or because another owner has taken over."""

    async def reopen(self) -> None:
        """Take writes again after one failed, under the next term; returns at once when writes are taken.

        Everything is verified as at a start. Logs that were opened stay the same objects: reads wait meanwhile,
        `append` goes on behind what is found. Raises `Corrupt` when something that was synced is missing,
        `ChannelFenced` when another owner has taken over, and what opening raises; it may be called again then. Not cut
        short by cancellation.
        """

    async def close(self) -> None:
        """Write what is queued, sync, and release the directory; idempotent."""


def log_end(log: Log) -> Append:
    """Return the innermost append: queue the group, wait until the log's durability mode acknowledges it.

    Up to the queue it does not suspend. Raises `Indeterminate` when nobody knows whether the group is in the log.
    """
    kind = message_id_kind(log.wal_name)

    async def append_to_log(group: AppendGroup) -> AppendResult:
        if group.draw is not None:
            group.draw()  # in the step of the queue: so a producer's own sequences ascend with positions, without gaps
        ticket = group.ticket = log.append(group)
        failpoint("append.queued")
        await ticket.written
        return group.result(kind)

    return append_to_log
