"""What goes into a log: groups, the packs they go in, and what becomes of them. No I/O."""

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
    """A pack that has its place in the log.

    `written` is done when the store's durability mode says that the append is acknowledged, and
    `durable` when it is synced, never later than an acknowledgement that promises it. Both fail
    with `Indeterminate` when the write failed. Nobody cancels them.
    """

    first_position: int
    written: asyncio.Future[None]
    durable: asyncio.Future[None]


class WriteResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What became of an insert, upsert, delete, transaction or other group of messages that is in
    the log.

    Everything in it is at `time_tick`. `row_offsets` maps each vchannel to the first row offset and
    the number of rows inserted there; `message_ids` are the log positions of its `count` messages,
    of the log's `kind`, ascending; `txn_id` is 0 outside a transaction. `durable` says whether it
    was synced when it was acknowledged; with `durability="os"` that follows within the sync
    interval.

    A write over the size of one append group was split into several, each atomic by itself, and
    `groups` has a result for each; `time_tick` is then the last one's, and the rows of a vchannel
    lie close together only within a group. A write of no rows did nothing: its tick is one that
    everything acknowledged before the call is at or below. One that is `spooled` is on the disk of
    its client and will be in the log: its tick, ids and offsets raise `InvalidArgument`. It holds
    no cycles and is left out of garbage collection: a busy node makes a hundred thousand a second.
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


class SpooledResult(WriteResult, frozen=True, array_like=True, gc=False):
    """What became of a write that the outbox of its client has, and the log does not have yet."""

    def __repr__(self) -> str:
        return "WriteResult(spooled=True)"

    def __getattribute__(self, name: str) -> Any:
        """Raises `InvalidArgument` for what only a write in the log has."""
        if (what := _OF_THE_LOG.get(name)) is not None:
            raise InvalidArgument(
                f"a write that is spooled has no {what} yet — await consistent_tick(): it waits "
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
"""Attributes of a `WriteResult` that a spooled one does not have, and what they are."""

AppendResult = WriteResult
"""What it is on the way through the log."""


def results_of(
    entry: LogEntry, row_offsets: Sequence[Mapping[str, tuple[int, int]]], *, durable: bool = True
) -> list[AppendResult]:
    """Return what each group of an entry has come to; `row_offsets` are theirs."""
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
    """Who is told what became of a write: a future, or what passes it on to another process."""

    def done(self) -> bool:
        """Whether it was told, or nobody listens any more."""

    def set_result(self, result: AppendResult, /) -> None:
        """Tell what became of it."""

    def set_exception(self, error: Exception, /) -> None:
        """Tell why it did not take place, or may not have."""


class AppendGroup(msgspec.Struct, eq=False):
    """One write, on one pchannel: at one tick and in the log as a whole, or not at all.

    It is messages, or rows: `pieces` that go with those of others, as a transaction where
    `is_transaction`. `producer` says which write of a named producer this is, with sequence 0 for
    its next one, whichever that will be. The producer has ended all of its writes with sequences
    below `settled`, where that is not 0. `pack` is what the group goes with; `outcome` is what its
    appender gets, who may wait in `waiter`. `other_try` is a group of the same write that came
    before, for whose outcome it waits.
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
    """What holds its bytes while it waits and is on its way."""
    doubt: Indeterminate | None = None
    """What a try of the same write ended with that this one had joined: a refusal that does not
    answer for that one leaves the outcome open.
    """
    waits_until_s: float = 0.0
    """When an append that has to come again gives up, by the loop's clock; 0 before it first has
    to.
    """

    @property
    def begun(self) -> bool:
        """Whether the write has, or may have, its place in the log: in its pack, or by the group
        that stands for it.
        """
        if self.pack is not None and self.pack.begun:
            return True
        return isinstance(self.outcome, AppendResult) or self.is_joined

    @property
    def is_joined(self) -> bool:
        """Whether a group that stands for it has begun."""
        return self.other_try is not None and self.other_try.begun

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self.waiter is not None and self.waiter.done()

    @property
    def size_bytes(self) -> int:
        """The messages' sizes added up."""
        return self.rows_bytes or sum(message.size_bytes for message in self.messages)

    def settle(self, outcome: "AppendResult | Exception") -> None:
        """Tell the appender what became of the group; the first outcome stands."""
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
            # nobody asks any more, and what refers to itself would wait for garbage collection
            self.pack = None
            if waiter is not None:
                waiter.set_result(outcome)
        elif waiter is not None:
            waiter.set_exception(outcome)

    def release(self) -> None:
        """Give back the memory it holds."""
        memory = self.memory
        self.memory = None
        if memory is not None:
            memory.give_back(self.rows_bytes)

    def result(self) -> "AppendResult":
        """Return the outcome, or raise it."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        assert self.outcome is not None, "it has ended"
        return self.outcome


def in_doubt(doubt: Indeterminate, error: StreamingNodeError) -> Indeterminate:
    """Return the doubt about a write whose next try was refused by one that does not know of the
    first.
    """
    if error is not doubt:
        doubt.__cause__ = error
    return doubt


class Pack(msgspec.Struct, eq=False):
    """Groups that go into the log as one entry: rows of any number of groups, or the messages of
    one.

    The chain settles single groups, or lets them leave and come again (`come_again`); what is left
    when the pack gets its `ticket` is in the entry.
    """

    groups: list[AppendGroup]
    come_again: "Callable[[AppendGroup], None] | None" = None
    check: "Callable[[Pack], None] | None" = None
    """Lets those groups leave that `draw` could not give a sequence; called before anything is
    stamped.
    """
    draw: "Callable[[Pack], None] | None" = None
    """Gives its groups the next sequences of their producers, where they have none yet."""
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
    entry: LogEntry | None = None
    """What it is in the log, frozen: its messages may be used again."""
    ticket: AppendTicket | None = None
    sent: bool = False
    """Whether it is on its way to the node of another process, which may have it in its log."""
    refused: int = 0
    """How many groups left it with an error."""
    messages: Sequence[MutableMessage] = ()
    """Those of its only group; none for rows."""
    first_type: MessageType | None = None
    """The type of the first message, in `DML` that of them all; None for rows."""
    unstamped: Sequence[tuple[Header, int]] = ()
    """The headers and transaction ids that they came with."""
    asked_ms: int = 0
    """Of messages: since when somebody waits for them, in ms of a steady clock."""
    sending: Running | None = None
    """What has it on its way."""
    is_in_log: bool | None = None
    """Whether the log has it although its write failed, as the next term found out; None for
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
        """Whether it has, or may have, its place in a log by this try."""
        return self.sent or self.ticket is not None

    @property
    def has_failed(self) -> bool:
        """Whether its write failed, so that the log may have it or not."""
        ticket = self.ticket
        if ticket is None or not ticket.durable.done():
            return False
        return ticket.durable.exception() is not None

    def come_anew(self) -> None:
        """Be as it first came, because the log does not have it: in the next term it has a new
        place. Sequences that were given to its groups are theirs and stay.
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
        """The groups' sizes added up."""
        return sum([group.rows_bytes for group in self.groups]) or sum(
            [each.size_bytes for each in self.messages]
        )

    def leave(self, group: AppendGroup, outcome: "AppendResult | Exception | None" = None) -> None:
        """Take out a group, settled or to come again, before the pack has its place."""
        assert self.ticket is None, "what has its place in the log stays"
        self.groups.remove(group)
        group.pack = None
        if outcome is not None:
            self.refused += isinstance(outcome, Exception)
            group.settle(outcome)

    def drop_cancelled(self) -> None:
        """Leave out the groups that nobody wants any more."""
        # `cancelled`, without a call for each.
        for group in [
            each for each in self.groups if (waiter := each.waiter) is not None and waiter.done()
        ]:
            group.release()
            self.leave(group)

    def stamp(self, time_tick: int, last_confirmed: int | None) -> None:
        """Give the groups their ticks, the last one of them `time_tick`, and all of them the
        position to resume at.
        """
        self.time_tick = time_tick
        self.last_confirmed = last_confirmed
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
        """Give the pack the term of the WAL that writes it; one that never had its place may come
        again in a later one.
        """
        assert self.wal_term <= term, f"term {self.wal_term} is already stamped"
        self.wal_term = term
        for message in self.messages:
            message.with_wal_term(term)

    def encode(self, wal_name: str, *, first_position: int, previous_crc32c: int) -> bytes:
        """Return the bytes of the `entry` that it is at a position."""
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
            # Rows of several writes have the stamps of these beside it.
            producer=self.groups[0].producer if logged else None,
        )
        return encode_entry(self.entry, previous_crc32c=previous_crc32c)

    def _alone(self) -> Sequence[MutableMessage]:
        """Return the message that rows are which went alone, of one kind to one shard: without
        boundaries to look at; nothing for others.
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
        assert len(counts) == len(groups), "rows are laid out before they come to the log"
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
        """Return what the appenders are told once the log has acknowledged the pack."""
        assert self.ticket is not None, "the pack has its place"
        assert self.entry is not None, "with its place"
        return results_of(self.entry, self.row_offsets, durable=self.ticket.durable.done())

    def settle(self) -> None:
        """Tell the appenders that the log has acknowledged the pack."""
        memory = self.groups[0].memory
        freed_bytes = 0
        for group, result in zip(self.groups, self.results(), strict=True):
            if group.memory is not memory or group.outcome is not None:
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
        """Raise `InvalidArgument` unless the first tick is above that of the entry before it; every
        log asks first.

        A log whose order is not that of its ticks cannot be read any more: readers release by tick
        and resume by position.
        """
        tick = self.first_tick
        if tick <= last_tick:
            raise InvalidArgument(
                f"tick {tick} is not above {last_tick}, the last one in the log; nothing was "
                "written — report it as a bug"
            )


Append = Callable[[AppendGroup], Awaitable[AppendResult]]
"""Append a group. Once the log has said yes, nothing on the way back turns it into an error."""
AppendPack = Callable[[Pack], Coroutine[object, None, None]]
"""Append a pack: settle each of its groups, or let it leave; what it raises is of all groups that
are left.
"""


class AppendObserver(Protocol):
    """Where measurements of the append path go; must be cheap and must not raise."""

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        """An interceptor took `before_s` seconds until it called the next, and `after_s` after that
        returned.
        """

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """An append of `pack` ended as `ok`, `cancel` or `error` after `seconds`."""
