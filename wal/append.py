"""What goes into a log: groups, the packs they go in, and what becomes of them. No I/O."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import msgspec
import numpy as np

from wal.codec import encode_entry, encode_rows
from wal.entry import BOOL, U4, U8, LogEntry, PackedRows, RowBatch, numbers
from wal.errors import Indeterminate, InvalidArgument, StreamingNodeError
from wal.headers import DML, Header, MessageType
from wal.message import Message, MutableMessage
from wal.position import MessageId, Place, ProducerStamp
from wal.queue import Budget
from wal.rows import LaidOut, Piece


class AppendTicket(msgspec.Struct, frozen=True):
    """A pack that has its place in the log.

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


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """What became of an insert, upsert, delete, transaction or other group of messages that is in the log.

    Everything in it is at `time_tick`. `row_offsets` maps each vchannel to the first row offset and the number of rows
    inserted there; `message_ids` are the log positions of its `count` messages, of the log's `kind`, ascending; `txn_id` is
    0 outside a transaction. `durable` says whether it was synced when it was acknowledged; with `durability="os"` that
    follows within the sync interval.

    A write over the size of one append group was split into several, each atomic by itself, and `groups` has a result for
    each; `time_tick` is then the last one's, and the rows of a vchannel lie close together only within a group. A write of
    no rows did nothing: its tick is one that everything acknowledged before the call is at or below. One that is `spooled`
    is on the disk of its client and will be in the log: it has no tick, ids or offsets yet.
    It holds no cycles and is left out of garbage collection: a busy node makes a hundred thousand a second.
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
    groups: tuple["AppendResult", ...] = ()

    @property
    def first_message_id(self) -> MessageId:
        """The position of the group's first message."""
        return self.kind(self.first_position)

    @property
    def last_confirmed(self) -> MessageId:
        """Where a reader of the group resumes."""
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


class Waiter(Protocol):
    """Who is told what became of a write: a future, or what passes it on to another process."""

    def done(self) -> bool:
        """Whether it was told, or nobody listens any more."""

    def set_result(self, result: AppendResult, /) -> None:
        """Tell what became of it."""

    def set_exception(self, error: Exception, /) -> None:
        """Tell why it did not take place, or may not have."""


class AppendGroup(msgspec.Struct, eq=False):
    """One write, on one pchannel: at one tick and in the log as a whole, or not at all.

    It is messages, or rows: `pieces` that go with those of others, as a transaction where `is_transaction`. `producer` says
    which write of a named producer this is, with sequence 0 for its next one, whichever that will be, and `place`
    keeps that of a write with a sequence. `pack` is what it goes with; `outcome` is what its appender is told, who may wait
    in `waiter`. `earlier` is the try that this one repeats, which then hears of the outcome.
    """

    messages: Sequence[MutableMessage] = ()
    pieces: Sequence[Piece] = ()
    is_transaction: bool = False
    rows_bytes: int = 0
    producer: ProducerStamp | None = None
    place: Place | None = None
    pack: "Pack | None" = None
    outcome: "AppendResult | Exception | None" = None
    waiter: Waiter | None = None
    earlier: "AppendGroup | None" = None
    other_try: "AppendGroup | None" = None
    memory: Budget | None = None
    """What holds its bytes while it waits and is on its way."""
    doubt: Indeterminate | None = None
    """What an earlier try ended with: a refusal that does not answer for that one leaves the outcome open."""
    waits_until_s: float = 0.0
    """When an append that has to come again gives up, by the loop's clock; 0 before it first has to."""

    @property
    def begun(self) -> bool:
        """Whether the write has, or may have, its place in the log: by this group or by the one that stands for it."""
        tried: AppendGroup | None = self
        while tried is not None:
            if isinstance(tried.outcome, AppendResult) or (tried.pack is not None and tried.pack.begun):
                return True
            tried = tried.other_try
        return False

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more, by this try or by the one that it repeats."""
        if self.waiter is not None and self.waiter.done():
            return True
        return self.earlier is not None and self.earlier.cancelled

    @property
    def size_bytes(self) -> int:
        """The messages' sizes added up."""
        return self.rows_bytes or sum(message.size_bytes for message in self.messages)

    def settle(self, outcome: "AppendResult | Exception") -> None:
        """Tell the appender what became of the group; the first outcome stands."""
        self.release()
        tried: AppendGroup | None = self
        while tried is not None:
            if tried.doubt is not None and isinstance(outcome, StreamingNodeError) and not outcome.decides:
                outcome = in_doubt(tried.doubt, outcome)
            if tried.outcome is None:
                tried.outcome = outcome
            waiter = None if tried.waiter is None or tried.waiter.done() else tried.waiter
            if isinstance(outcome, AppendResult):
                tried.pack = None  # nobody asks any more, and what refers to itself would wait for garbage collection
                if waiter is not None:
                    waiter.set_result(outcome)
            elif waiter is not None:
                waiter.set_exception(outcome)
            tried = tried.earlier

    def release(self) -> None:
        """Give back the memory it holds, by this try or by the one that it repeats."""
        tried: AppendGroup | None = self
        while tried is not None:
            memory, tried.memory = tried.memory, None
            if memory is not None:
                memory.give_back(tried.rows_bytes)
            tried = tried.earlier

    def result(self) -> "AppendResult":
        """Return the outcome, or raise it."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None, "it has ended"
        return self.outcome

    def copy(self, unstamped: Sequence[tuple[Header, int]], doubt: Indeterminate) -> "AppendGroup":
        """Return another try of this write, with the headers and transaction ids that its messages came with.

        A sequence it was given stays: that is the write's.
        """
        messages = [
            replace(message, header=header, txn_id=txn_id)
            for message, (header, txn_id) in zip(self.messages, unstamped, strict=True)
        ]
        again = self.other_try = AppendGroup(
            messages,
            self.pieces,
            self.is_transaction,
            self.rows_bytes,
            producer=self.producer,
            place=self.place,
            earlier=self,
            doubt=doubt,
        )
        return again


def in_doubt(doubt: Indeterminate, error: StreamingNodeError) -> Indeterminate:
    """Return the doubt about a write whose next try was refused by one that does not know of the first."""
    if error is not doubt:
        doubt.__cause__ = error
    return doubt


class Pack(msgspec.Struct, eq=False):
    """Groups that go into the log as one entry: rows of any number of groups, or the messages of one.

    The chain settles single groups, or lets them leave and come again (`come_again`); what is left when the pack gets its
    `ticket` is in the entry. `producer` and `place` are those of the entry as a whole, a write of the node's own.
    """

    groups: list[AppendGroup]
    come_again: "Callable[[AppendGroup], None] | None" = None
    producer: ProducerStamp | None = None
    place: Place | None = None
    check: "Callable[[Pack], None] | None" = None
    """Lets those groups leave that `draw` could not give a sequence; called before anything is stamped."""
    draw: "Callable[[Pack], None] | None" = None
    """Gives the entry and its groups the next sequences of their producers, where they have none yet."""
    wal_term: int = 0
    time_tick: int = 0
    """Of the last group; the others have those before it."""
    last_confirmed: int | None = None
    """Where readers of the entry resume; None for the entry itself."""
    message_count: int = 0
    """How many messages the entry has."""
    message_counts: Sequence[int] = ()
    batches: Sequence[RowBatch] = ()
    row_offsets: Sequence[Mapping[str, tuple[int, int]]] = ()
    """Of each group."""
    logged: "Sequence[MutableMessage] | PackedRows" = ()
    """What its entry has, which may have been tried before."""
    ticket: AppendTicket | None = None
    sent: bool = False
    """Whether it is on its way to the node of another process, which may have it in its log."""
    refused: int = 0
    """How many groups left it with an error."""
    messages: Sequence[MutableMessage] = ()
    """Those of its only group; none for rows."""

    def __post_init__(self) -> None:
        self.messages = self.logged = self.groups[0].messages
        self.message_count, self.row_offsets = len(self.messages), ({},)
        for group in self.groups:
            assert group.pack is None or group.pack.ticket is None, "a group is appended once; build a new one"
            group.pack = self

    @property
    def begun(self) -> bool:
        """Whether it has, or may have, its place in a log."""
        return self.sent or self.ticket is not None

    @property
    def has_packed_rows(self) -> bool:
        """Whether it is rows that go together, not the messages of one group."""
        return not self.messages

    @property
    def message(self) -> MutableMessage | None:
        """The first message; None for rows."""
        return self.messages[0] if self.messages else None

    @property
    def first_type(self) -> MessageType | None:
        """The type of its first message, in `DML` that of them all; None for rows."""
        return self.messages[0].type if self.messages else None

    @property
    def size_bytes(self) -> int:
        """The groups' sizes added up."""
        return sum([group.rows_bytes for group in self.groups]) or sum([each.size_bytes for each in self.messages])

    @property
    def has_books_to_close(self) -> bool:
        """Whether the chain has something to do after its place in the log's queue.

        Rows that are a whole by themselves need nothing more than their ticket; a transaction's session, and who else has
        an exclusive message's vchannels, wait for the end of the append.
        """
        message = self.message
        return message is not None and (bool(message.txn_id) or message.type not in DML)

    def leave(self, group: AppendGroup, outcome: "AppendResult | Exception | None" = None) -> None:
        """Take out a group, settled or to come again, before the pack has its place."""
        assert self.ticket is None, "what has its place in the log stays"
        self.groups.remove(group)
        left: AppendGroup | None = group
        while left is not None:  # none of its tries is in the log
            left.pack, left = None, left.earlier
        if outcome is not None:
            self.refused += isinstance(outcome, Exception)
            group.settle(outcome)

    def drop_cancelled(self) -> None:
        """Leave out the groups that nobody wants any more."""
        for group in [group for group in self.groups if group.cancelled]:
            group.release()
            self.leave(group)

    def stamp(self, time_tick: int, last_confirmed: int | None) -> None:
        """Give the groups their ticks, the last one of them `time_tick`, and all of them the position to resume at."""
        self.time_tick, self.last_confirmed = time_tick, last_confirmed
        for message in self.messages:
            message.with_time_tick(time_tick).with_last_confirmed(last_confirmed)

    @property
    def first_tick(self) -> int:
        """The tick of the first group; each of the others has the next one."""
        return self.time_tick - len(self.groups) + 1

    def take_rows(self, laid_out: LaidOut) -> None:
        """Have the rows of the groups as they are laid out."""
        self.message_counts, self.batches, self.row_offsets = laid_out
        self.message_count = sum(laid_out.counts)

    def stamp_wal_term(self, term: int) -> None:
        """Give the pack the term of the WAL that writes it; one that never had its place may come again in a later one."""
        assert self.wal_term <= term, f"term {self.wal_term} is already stamped"
        self.wal_term = term
        for message in self.messages:
            message.with_wal_term(term)

    @property
    def stamp_of_entry(self) -> ProducerStamp | None:
        """Which write the entry is as a whole: rows of several writes have stamps of their own beside it."""
        return self.producer or (None if isinstance(self.logged, PackedRows) else self.groups[0].producer)

    def encode(self, wal_name: str, *, first_position: int, previous_crc32c: int) -> bytes:
        """Return the entry's bytes at a position."""
        self.logged = logged = self.messages or self._alone() or self._packed(wal_name, first_position)
        if isinstance(logged, PackedRows):
            return encode_rows(logged, previous_crc32c=previous_crc32c, producer=self.producer)
        return encode_entry(
            logged, first_position=first_position, previous_crc32c=previous_crc32c, producer=self.stamp_of_entry
        )

    def _alone(self) -> Sequence[MutableMessage]:
        """Return the message that rows are which went alone, of one kind to one shard: without boundaries to look at.

        Nothing for others, and for those of a named producer that came with others: their entry has the stamp of those.
        """
        if self.message_count > 1 or (self.producer and self.groups[0].producer):
            return ()
        batch = self.batches[0]
        header = batch.header(0, batch.rows, batch.offsets.item(0))
        stamps = 0, self.time_tick, self.wal_term, self.last_confirmed
        return (MutableMessage(batch.type, header, batch.vchannel, batch.payload, *stamps),)

    def _packed(self, wal_name: str, first_position: int) -> PackedRows:
        groups, counts = self.groups, self.message_counts
        assert len(counts) == len(groups), "rows are laid out before they come to the log"
        producers = tuple([group.producer for group in groups])
        return PackedRows(
            wal_name=wal_name,
            wal_term=self.wal_term,
            last_confirmed_position=first_position if self.last_confirmed is None else self.last_confirmed,
            ticks=np.arange(self.first_tick, self.time_tick + 1, dtype=U8),
            positions=np.array([*accumulate(counts[:-1], initial=first_position)], U8),
            counts=numbers(counts, U4),
            transactions=numbers([group.is_transaction for group in groups], BOOL),
            batches=tuple(self.batches),
            producers=producers if any(producers) else (),
            time_tick=self.time_tick,
            position=first_position + self.message_count - 1,
        )

    def entry(self, wal_name: str) -> LogEntry:
        """Return the entry that the pack is in its log, frozen: its messages may be used again afterwards."""
        ticket = self.ticket
        assert ticket is not None, "the pack has its place"
        first = ticket.first_position
        last_confirmed = first if self.last_confirmed is None else self.last_confirmed
        messages, rows = ((), self.logged) if isinstance(self.logged, PackedRows) else (self.logged, None)
        return LogEntry(
            first_position=first,
            time_tick=self.time_tick,
            last_confirmed_position=last_confirmed,
            wal_term=self.wal_term,
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
                    time_tick=self.time_tick,
                    wal_term=self.wal_term,
                )
                for position, message in enumerate(messages, first)
            ),
            rows=rows,
            producer=self.stamp_of_entry,
        )

    def results(self, kind: type[MessageId]) -> list[AppendResult]:
        """Return what the appenders are told once the log has acknowledged the pack; `kind` is that of the log's ids."""
        ticket = self.ticket
        assert ticket is not None, "the pack has its place"
        first, durable = ticket.first_position, ticket.durable.done()
        last_confirmed = first if self.last_confirmed is None else self.last_confirmed
        message, counts = self.message, self.message_counts or (self.message_count,)
        places = zip(self.groups, accumulate(counts[:-1], initial=first), counts, self.row_offsets, strict=True)
        return [
            AppendResult(
                kind=kind,
                first_position=position,
                count=count,
                time_tick=tick,
                last_confirmed_position=last_confirmed,
                txn_id=(tick if group.is_transaction else 0) if message is None else message.txn_id,
                row_offsets=row_offsets,
                durable=durable,
            )
            for tick, (group, position, count, row_offsets) in enumerate(places, self.first_tick)
        ]

    def settle(self, kind: type[MessageId]) -> None:
        """Tell the appenders that the log has acknowledged the pack; `kind` is that of the log's ids."""
        memory, freed_bytes = self.groups[0].memory, 0
        for group, result in zip(self.groups, self.results(kind), strict=True):
            if group.memory is not memory or group.earlier is not None or group.outcome is not None:
                group.settle(result)
                continue
            group.outcome = result  # from here on as that does, in fewer steps
            group.pack = group.memory = None
            freed_bytes += group.rows_bytes
            if group.waiter is not None and not group.waiter.done():
                group.waiter.set_result(result)
        if memory is not None:
            memory.give_back(freed_bytes)

    def require_tick_above(self, last_tick: int) -> None:
        """Raise `InvalidArgument` unless the first tick is above that of the entry before it; every log asks first.

        A log whose order is not that of its ticks cannot be read any more: readers release by tick and resume by position.
        """
        tick = self.first_tick
        if tick <= last_tick:
            raise InvalidArgument(
                f"tick {tick} is not above {last_tick}, the last one in the log; nothing was written — report it as a bug"
            )


Append = Callable[[AppendGroup], Awaitable[AppendResult]]
"""Append a group. Once the log has said yes, nothing on the way back turns it into an error."""
AppendPack = Callable[[Pack], Awaitable[None]]
"""Append a pack: settle each of its groups, or let it leave; what it raises is of all groups that are left."""


class AppendObserver(Protocol):
    """Where measurements of the append path go; must be cheap and must not raise."""

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        """An interceptor took `before_s` seconds until it called the next, and `after_s` after that returned."""

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """An append of `pack` ended as `ok`, `cancel` or `error` after `seconds`."""
