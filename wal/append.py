"""Appends: groups, the packs that carry them into a log, and their results. No I/O."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np

from wal.codec import encode_entry
from wal.entry import BOOL, U4, U8, LogEntry, PackedRows, RowBatch, numbers
from wal.errors import Indeterminate, InvalidArgument, StreamingNodeError
from wal.headers import Header, MessageType
from wal.message import Message, MutableMessage
from wal.position import MESSAGE_ID_KINDS, MessageId, ProducerStamp
from wal.queue import Budget
from wal.rows import LaidOut, Piece
from wal.runtime import Running


class AppendTicket(msgspec.Struct, frozen=True):
    """The place of a pack in the log.

    `written` completes when the append is acknowledged under the store's durability mode, `durable`
    when it is synced; in a mode that promises durability, `durable` completes no later than
    `written`. Both fail with `Indeterminate` when the write failed. They must not be cancelled.
    """

    first_position: int
    written: asyncio.Future[None]
    durable: asyncio.Future[None]


class WriteResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of an insert, upsert, delete, transaction or other group of messages in the log.

    The whole write is at `time_tick`. `row_offsets` maps each vchannel to the first row offset and
    the number of rows inserted there. `message_ids` are the log positions of its `count` messages,
    of the log's `kind`, ascending. `txn_id` is 0 outside a transaction. `durable` tells whether the
    write was synced when it was acknowledged; with `durability="os"` the sync follows within the
    sync interval.

    A write over the size of one append group is split into several groups, each atomic by itself.
    Then `groups` has a result for each, `time_tick` is that of the last one, and the row offsets of
    a vchannel are consecutive only within a group. A write of no rows does nothing: everything
    acknowledged before the call is at or below its tick. A `spooled` write is on the disk of its
    client and will be in the log later: its tick, ids and offsets raise `InvalidArgument`. The
    class is excluded from garbage collection, as it has no reference cycles and a busy node makes a
    hundred thousand results a second.
    """

    kind: type[MessageId]
    first_position: int
    count: int
    time_tick: int
    last_confirmed_position: int
    txn_id: int = 0
    row_offsets: Mapping[str, tuple[int, int]] = {}
    durable: bool = True
    spooled: bool = False
    groups: tuple["WriteResult", ...] = ()

    @property
    def last_confirmed(self) -> MessageId:
        """The position where a reader of the group resumes."""
        return self.kind(self.last_confirmed_position)

    @property
    def message_id(self) -> MessageId:
        """The position of the group's last message."""
        return self.kind(self.first_position + self.count - 1)

    @property
    def message_ids(self) -> tuple[MessageId, ...]:
        """The positions of the write's messages, in order."""
        if self.groups:
            return tuple(message_id for group in self.groups for message_id in group.message_ids)
        return tuple(map(self.kind, range(self.first_position, self.first_position + self.count)))


class SpooledResult(WriteResult, frozen=True, array_like=True, gc=False):
    """The result of a write that is in the outbox of its client and not in the log yet."""

    def __repr__(self) -> str:
        return "WriteResult(spooled=True)"

    def __getattribute__(self, name: str) -> Any:
        """Raises `InvalidArgument` for attributes that only a write in the log has."""
        if (what := _OF_THE_LOG.get(name)) is not None:
            raise InvalidArgument(
                f"a spooled write has no {what} yet — await consistent_tick(): it waits "
                "until the write is in the log, and its tick is not below the write's"
            )
        return object.__getattribute__(self, name)


_OF_THE_LOG = {
    "first_position": "message id",
    "count": "message id",
    "time_tick": "tick",
    "last_confirmed_position": "message id",
    "last_confirmed": "message id",
    "message_id": "message id",
    "message_ids": "message ids",
    "txn_id": "transaction id",
    "row_offsets": "row offsets",
}
"""The attributes that a spooled result does not have, with their names in errors."""

AppendResult = WriteResult
"""The name of `WriteResult` inside the log."""


def results_of(
    entry: LogEntry, row_offsets: Sequence[Mapping[str, tuple[int, int]]], *, durable: bool = True
) -> list[AppendResult]:
    """Return the result of each group of an entry; `row_offsets` has those of each group."""
    rows = entry.rows
    last_confirmed = entry.last_confirmed_position
    if rows is None:
        head = entry.messages[0]
        positions = [entry.first_position]
        counts = [entry.count]
        ticks = [entry.time_tick]
        kind = MESSAGE_ID_KINDS[head.wal_name]
        txn_ids = [head.txn_id]
    else:
        positions = rows.positions.tolist()
        counts = rows.counts.tolist()
        ticks = rows.ticks.tolist()
        kind = MESSAGE_ID_KINDS[rows.wal_name]
        txn_ids = (rows.ticks * rows.transactions).tolist()
    return [
        AppendResult(
            kind=kind,
            first_position=position,
            count=count,
            time_tick=tick,
            last_confirmed_position=last_confirmed,
            txn_id=txn_id,
            row_offsets=offsets,
            durable=durable,
        )
        for position, count, tick, txn_id, offsets in zip(
            positions, counts, ticks, txn_ids, row_offsets, strict=True
        )
    ]


class Waiter(Protocol):
    """Receives the outcome of a write: a future, or an object that sends it to another process."""

    def done(self) -> bool:
        """Whether it has an outcome or is cancelled."""

    def set_result(self, result: AppendResult, /) -> None:
        """Complete it with the result."""

    def set_exception(self, error: Exception, /) -> None:
        """Complete it with an error: the write did not take place, or may not have."""


class AppendGroup(msgspec.Struct, eq=False):
    """One write on one pchannel: it is in the log completely and at one tick, or not at all.

    It is either `messages`, or rows: `pieces` that share a pack with other groups, as a transaction
    if `is_transaction`. `producer` is the stamp of a producer's write, with sequence 0 for its next
    one. If `settled` is not 0, all writes of the producer with lower sequences have ended. `pack`
    carries the group; `outcome` is its result or error, which is passed to `waiter`. `other_try` is
    an earlier group of the same write whose outcome this group waits for.
    """

    messages: Sequence[MutableMessage] = ()
    pieces: Sequence[Piece] = ()
    is_transaction: bool = False
    rows_bytes: int = 0
    producer: ProducerStamp | None = None
    settled: int = 0
    pack: "Pack | None" = None
    outcome: "AppendResult | Exception | None" = None
    waiter: Waiter | None = None
    other_try: "AppendGroup | None" = None
    memory: Budget | None = None
    """The budget that holds its bytes while it waits and is on its way."""
    doubt: Indeterminate | None = None
    """The error of another attempt of the same write that this group had joined. A later refusal
    that does not decide the earlier attempt leaves the outcome unknown.
    """
    waits_until_s: float = 0.0
    """The deadline of an append that must be repeated, by the loop's clock; 0 before the first
    repetition.
    """

    @property
    def begun(self) -> bool:
        """Whether the write has, or may have, a place in the log, through its pack or through
        `other_try`.
        """
        if self.pack is not None and self.pack.begun:
            return True
        return isinstance(self.outcome, AppendResult) or self.is_joined

    @property
    def is_joined(self) -> bool:
        """Whether `other_try` has begun."""
        return self.other_try is not None and self.other_try.begun

    @property
    def cancelled(self) -> bool:
        """Whether its caller has left."""
        return self.waiter is not None and self.waiter.done()

    @property
    def size_bytes(self) -> int:
        """The size of its rows, or the sum of the sizes of its messages, in bytes."""
        return self.rows_bytes or sum(message.size_bytes for message in self.messages)

    def settle(self, outcome: "AppendResult | Exception") -> None:
        """Complete the group with an outcome; the first one stands."""
        self.release()
        if (
            self.doubt is not None
            and isinstance(outcome, StreamingNodeError)
            and not outcome.decides
        ):
            outcome = in_doubt(self.doubt, outcome)
        if self.outcome is None:
            self.outcome = outcome
        waiter = None if self.waiter is None or self.waiter.done() else self.waiter
        if isinstance(outcome, AppendResult):
            # Break the reference cycle, which would wait for garbage collection: the pack is not
            # needed any more.
            self.pack = None
            if waiter is not None:
                waiter.set_result(outcome)
        elif waiter is not None:
            waiter.set_exception(outcome)

    def release(self) -> None:
        """Release the memory that the group holds."""
        memory = self.memory
        self.memory = None
        if memory is not None:
            memory.give_back(self.rows_bytes)

    def result(self) -> "AppendResult":
        """Return the outcome, or raise it."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None, "the group is settled"
        return self.outcome


def in_doubt(doubt: Indeterminate, error: StreamingNodeError) -> Indeterminate:
    """Return `doubt`, with `error` as its cause: the refusal of a later attempt that does not
    decide the first one.
    """
    if error is not doubt:
        doubt.__cause__ = error
    return doubt


class Pack(msgspec.Struct, eq=False):
    """Groups that go into the log as one entry: rows of any number of groups, or the messages of
    one group.

    The chain may settle single groups, or remove them to be appended again (`come_again`). The
    groups that remain when the pack gets its `ticket` are in the entry.
    """

    groups: list[AppendGroup]
    come_again: "Callable[[AppendGroup], None] | None" = None
    check: "Callable[[Pack], None] | None" = None
    """Removes the groups that `draw` could not give a sequence; called before anything is
    stamped.
    """
    draw: "Callable[[Pack], None] | None" = None
    """Assigns the next sequences of their producers to the groups without one."""
    wal_term: int = 0
    time_tick: int = 0
    """The tick of the last group; the other groups have the ticks before it."""
    last_confirmed: int | None = None
    """The position where readers of the entry resume; None for the entry itself."""
    message_count: int = 0
    """The number of messages in the entry."""
    message_counts: Sequence[int] = ()
    batches: Sequence[RowBatch] = ()
    row_offsets: Sequence[Mapping[str, tuple[int, int]]] = ()
    """The row offsets of each group."""
    entry: LogEntry | None = None
    """The immutable entry in the log; the pack's own messages may be stamped again."""
    ticket: AppendTicket | None = None
    sent: bool = False
    """Whether it is on its way to a node in another process, whose log may have it."""
    refused: int = 0
    """The number of groups that left it with an error."""
    messages: Sequence[MutableMessage] = ()
    """The messages of its only group; empty for rows."""
    first_type: MessageType | None = None
    """The type of the first message; if it is in `DML`, the type of all messages. None for rows."""
    unstamped: Sequence[tuple[Header, int]] = ()
    """The original headers and transaction ids of the messages."""
    asked_ms: int = 0
    """When the append of messages was requested, in ms of a steady clock."""
    sending: Running | None = None
    """The coroutine that sends it."""
    is_in_log: bool | None = None
    """Whether the log has it although its write failed; the next term sets this, None is
    unknown.
    """

    def __post_init__(self) -> None:
        if messages := self.groups[0].messages:
            self.messages = messages
            self.first_type = messages[0].type
            self.row_offsets = ({},)
            self.message_count = len(messages)
            self.unstamped = [(each.header, each.txn_id) for each in messages]
            self.asked_ms = time.monotonic_ns() // 1_000_000
        for group in self.groups:
            assert group.pack is None or group.pack.ticket is None, (
                "a group is appended once; build a new one"
            )
            group.pack = self

    @property
    def begun(self) -> bool:
        """Whether this attempt has, or may have, a place in a log."""
        return self.sent or self.ticket is not None

    @property
    def has_failed(self) -> bool:
        """Whether its write failed, which leaves open whether the log has it."""
        ticket = self.ticket
        if ticket is None or not ticket.durable.done():
            return False
        return ticket.durable.exception() is not None

    def come_anew(self) -> None:
        """Reset the pack, because the log does not have it: it gets a new place in the next term.
        Its groups keep the sequences that they were assigned.
        """
        self.ticket = None
        self.entry = None
        self.check = None
        self.draw = None
        self.is_in_log = None
        for group in self.groups:
            group.waits_until_s = 0.0
        for message, (header, txn_id) in zip(self.messages, self.unstamped, strict=True):
            message.header = header
            message.txn_id = txn_id

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the groups, in bytes."""
        return sum([group.rows_bytes for group in self.groups]) or sum(
            [each.size_bytes for each in self.messages]
        )

    def leave(self, group: AppendGroup, outcome: "AppendResult | Exception | None" = None) -> None:
        """Remove a group before the pack has its place; an outcome settles it."""
        assert self.ticket is None, "a group stays in a pack that has its place in the log"
        self.groups.remove(group)
        group.pack = None
        if outcome is not None:
            self.refused += isinstance(outcome, Exception)
            group.settle(outcome)

    def drop_cancelled(self) -> None:
        """Remove the groups whose callers have left."""
        # Inlines `cancelled`, to save a call for each group.
        for group in [
            each for each in self.groups if (waiter := each.waiter) is not None and waiter.done()
        ]:
            group.release()
            self.leave(group)

    def stamp(self, time_tick: int, last_confirmed: int | None) -> None:
        """Stamp the groups with consecutive ticks that end at `time_tick`, and with the position to
        resume at.
        """
        self.time_tick = time_tick
        self.last_confirmed = last_confirmed
        for message in self.messages:
            message.with_time_tick(time_tick).with_last_confirmed(last_confirmed)

    @property
    def first_tick(self) -> int:
        """The tick of the first group; the ticks of the groups are consecutive."""
        return self.time_tick - len(self.groups) + 1

    def take_rows(self, laid_out: LaidOut) -> None:
        """Set the laid-out rows of the groups."""
        self.message_counts, self.batches, self.row_offsets = laid_out
        self.message_count = sum(laid_out.counts)

    def stamp_wal_term(self, term: int) -> None:
        """Stamp the term of the WAL that writes the pack. A pack that got no place may be stamped
        again in a later term.
        """
        assert self.wal_term <= term, f"term {self.wal_term} is already stamped"
        self.wal_term = term
        for message in self.messages:
            message.with_wal_term(term)

    def encode(self, wal_name: str, *, first_position: int, previous_crc32c: int) -> bytes:
        """Set `entry` for this position and return its bytes."""
        last_confirmed = first_position if self.last_confirmed is None else self.last_confirmed
        logged = self.messages or self._alone()
        self.entry = LogEntry(
            first_position=first_position,
            last_position=first_position + self.message_count - 1,
            first_tick=self.first_tick,
            time_tick=self.time_tick,
            last_confirmed_position=last_confirmed,
            wal_term=self.wal_term,
            messages=tuple(
                [
                    Message(
                        type=message.type,
                        header=message.header,
                        vchannel=message.vchannel,
                        payload=message.payload,
                        txn_id=message.txn_id,
                        wal_name=wal_name,
                        position=position,
                        last_confirmed_position=last_confirmed,
                        time_tick=message.time_tick,
                        wal_term=message.wal_term,
                    )
                    for position, message in enumerate(logged, first_position)
                ]
            ),
            rows=None if logged else self._packed(wal_name, first_position, last_confirmed),
            # Packed rows carry the stamps of their writes themselves.
            producer=self.groups[0].producer if logged else None,
        )
        return encode_entry(self.entry, previous_crc32c=previous_crc32c)

    def _alone(self) -> Sequence[MutableMessage]:
        """Return the rows as a plain message if they are one message: one write of one kind to one
        shard. Readers then need no boundaries. Return nothing for other rows.
        """
        if self.message_count > 1:
            return ()
        batch = self.batches[0]
        header = batch.header(0, batch.rows, batch.offsets.item(0))
        stamps = 0, self.time_tick, self.wal_term
        return (MutableMessage(batch.type, header, batch.vchannel, batch.payload, *stamps),)

    def _packed(self, wal_name: str, first_position: int, last_confirmed: int) -> PackedRows:
        groups = self.groups
        counts = self.message_counts
        assert len(counts) == len(groups), "rows are laid out before they reach the log"
        producers = tuple([group.producer for group in groups])
        return PackedRows(
            wal_name=wal_name,
            wal_term=self.wal_term,
            last_confirmed_position=last_confirmed,
            ticks=np.arange(self.first_tick, self.time_tick + 1, dtype=U8),
            positions=np.array([*accumulate(counts[:-1], initial=first_position)], U8),
            counts=numbers(counts, U4),
            transactions=numbers([group.is_transaction for group in groups], BOOL),
            batches=tuple(self.batches),
            producers=producers if any(producers) else (),
            time_tick=self.time_tick,
            position=first_position + self.message_count - 1,
        )

    def results(self) -> list[AppendResult]:
        """Return the results of the groups after the log has acknowledged the pack."""
        assert self.ticket is not None, "the pack has its place"
        assert self.entry is not None, "a pack with a place has its entry"
        return results_of(self.entry, self.row_offsets, durable=self.ticket.durable.done())

    def settle(self) -> None:
        """Settle all groups: the log has acknowledged the pack."""
        memory = self.groups[0].memory
        freed_bytes = 0
        for group, result in zip(self.groups, self.results(), strict=True):
            if group.memory is not memory or group.outcome is not None:
                group.settle(result)
                continue
            group.outcome = result  # the same effect as `AppendGroup.settle`, in fewer steps
            group.pack = group.memory = None
            freed_bytes += group.rows_bytes
            if group.waiter is not None and not group.waiter.done():
                group.waiter.set_result(result)
        if memory is not None:
            memory.give_back(freed_bytes)

    def require_tick_above(self, last_tick: int) -> None:
        """Raise `InvalidArgument` unless the first tick is above that of the previous entry; every
        log checks this first.

        A log must be in tick order to be readable: readers release by tick and resume by position.
        """
        tick = self.first_tick
        if tick <= last_tick:
            raise InvalidArgument(
                f"tick {tick} is not above {last_tick}, the last one in the log; nothing was "
                "written — report it as a bug"
            )


Append = Callable[[AppendGroup], Awaitable[AppendResult]]
"""Appends a group. After the log has acknowledged it, no later step turns the result into an
error.
"""
AppendPack = Callable[[Pack], Coroutine[object, None, None]]
"""Appends a pack: settles or removes each of its groups. An error that it raises applies to all
remaining groups.
"""


class AppendObserver(Protocol):
    """Receives measurements of the append path; methods must be cheap and must not raise."""

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        """An interceptor took `before_s` seconds before it called the next one, and `after_s`
        seconds after that returned.
        """

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """An append of `pack` ended as `ok`, `cancel` or `error` after `seconds`."""
