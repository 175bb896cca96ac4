"""Atomic log entries as readers get them, and the assembly of transactions from entries. No I/O, no
Arrow.

An entry holds either messages at one tick, or the packed rows of many writes: one batch for each
collection, shard and kind, with boundaries beside it, and a separate tick for each write. So a
thousand writes share the cost of one batch. `docs/format.md` has the layout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from wal.errors import Corrupt
from wal.headers import CommitTxnHeader, DeleteHeader, InsertHeader, MessageType
from wal.message import (
    ALL_VCHANNELS,
    MESSAGE_OVERHEAD_BYTES,
    AnyMessage,
    Message,
    Placed,
    TransactionMessage,
)
from wal.position import ProducerStamp

BOOL = np.dtype(bool)
U2 = np.dtype("<u2")
U4 = np.dtype("<u4")
U8 = np.dtype("<u8")
Numbers = npt.NDArray[Any]


@lru_cache(maxsize=1024)
def _number(value: int, kind: np.dtype[Any]) -> Numbers:
    (number := np.array([value], kind)).flags.writeable = False
    return number


def numbers(values: Sequence[int] | Numbers, kind: np.dtype[Any]) -> Numbers:
    """Return small numbers as an array that must not be changed. Arrays of one number are cached,
    because they take as long to make as arrays of ten.
    """
    return _number(int(values[0]), kind) if len(values) == 1 else np.array(values, kind)


class RowBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Rows of one kind, collection and shard. Boundary i has `counts[i]` rows of the payload, from
    row `starts[i]` on.

    A boundary is one message: number `places[i]` of group `groups[i]`, and part `parts[i]` of a
    write over several shards. `offsets[i]` is the first row offset of an insert, or the next row
    offset of a delete. Boundaries ascend by group and place. The arrays have the types of the log's
    format, so their bytes are stored as they are: U4, except `parts` U2 and `offsets` U8.
    """

    type: MessageType
    vchannel: str
    collection_id: int
    partition_id: int
    schema_version: int
    segment_id: int
    payload: bytes | memoryview
    groups: Numbers
    places: Numbers
    parts: Numbers
    starts: Numbers
    counts: Numbers
    offsets: Numbers
    rows: int
    """The number of rows of all boundaries."""

    @property
    def size_bytes(self) -> int:
        """The size of the batch in buffers, in bytes."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES

    def header(self, part: int, count: int, offset: int) -> InsertHeader | DeleteHeader:
        """Return the header of a boundary's message."""
        if self.type is MessageType.DELETE:
            return DeleteHeader(self.collection_id, count, offset, part)
        place = self.collection_id, self.partition_id, self.schema_version
        return InsertHeader(*place, count, self.segment_id, offset, part)

    def of_groups(self, chosen: npt.NDArray[np.bool_]) -> Self | None:
        """Return the boundaries of chosen groups, None when there are none."""
        kept = chosen[self.groups]
        if kept.all():
            return self
        if not kept.any():
            return None
        names = ("groups", "places", "parts", "starts", "counts", "offsets")
        columns: dict[str, Numbers] = {name: getattr(self, name)[kept] for name in names}
        return replace(self, rows=int(columns["counts"].sum()), **columns)


class PackedRows(Placed, frozen=True, kw_only=True, eq=False, gc=False):
    """The groups of one entry, in tick order, and their rows. `position` and `time_tick` are those
    of the last message.

    Group i has tick `ticks[i]` and `counts[i]` messages from position `positions[i]` on. If
    `transactions[i]`, these are a begin, its bodies and a commit, and readers get them as one
    transaction. `producers` is empty, or has the stamp or None for each group. The arrays are U8,
    except `counts` U4 and `transactions` BOOL.
    """

    wal_term: int
    ticks: Numbers
    positions: Numbers
    counts: Numbers
    transactions: Numbers
    batches: tuple[RowBatch, ...]
    producers: tuple[ProducerStamp | None, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the batches."""
        return sum(batch.size_bytes for batch in self.batches)

    @property
    def count(self) -> int:
        """The number of messages that readers get: one for each boundary in `batches`."""
        return sum([len(batch.groups) for batch in self.batches])

    def only(
        self,
        chosen: npt.NDArray[np.bool_],
        whole: Callable[[RowBatch], bool] = lambda _batch: False,
    ) -> Self | None:
        """Return the rows of chosen groups, with all rows of batches for which `whole` is true;
        None when there are none.
        """
        kept = [batch if whole(batch) else batch.of_groups(chosen) for batch in self.batches]
        batches = tuple([batch for batch in kept if batch is not None])
        return replace(self, batches=batches) if batches else None

    def within(self, *, above: int = 0, upto: int | None = None) -> Self | None:
        """Return the rows of the groups with ticks in (`above`, `upto`]; None when there are
        none.
        """
        if self.ticks[0] > above and (upto is None or self.ticks[-1] <= upto):
            return self
        chosen = self.ticks > above
        return self.only(chosen if upto is None else chosen & (self.ticks <= upto))

    def groups_where(self, wanted: Callable[[RowBatch], bool]) -> npt.NDArray[np.bool_]:
        """Return a mask of the groups that have rows in wanted batches."""
        chosen = np.zeros(len(self.ticks), bool)
        for batch in self.batches:
            if wanted(batch):
                chosen[batch.groups] = True
        return chosen

    def messages(self) -> Iterator[AnyMessage]:
        """Yield the messages of the groups as objects, in order."""
        for group, bodies in groupby(self._bodies(), itemgetter(0)):
            yield from self._whole(group, [body for _, body in bodies])

    def _whole(self, group: int, bodies: list[Message]) -> Sequence[AnyMessage]:
        if not self.transactions[group]:
            return bodies
        tick = int(self.ticks[group])
        commit = Message(
            type=MessageType.COMMIT_TXN,
            header=CommitTxnHeader.of([(body.vchannel, body.header) for body in bodies]),
            vchannel=ALL_VCHANNELS,
            payload=b"",
            wal_term=self.wal_term,
            wal_name=self.wal_name,
            position=int(self.positions[group] + self.counts[group]) - 1,
            last_confirmed_position=self.last_confirmed_position,
            time_tick=tick,
            txn_id=tick,
        )
        return (transaction_of(bodies, commit),)

    def _bodies(self) -> Iterator[tuple[int, Message]]:
        ticks = self.ticks.tolist()
        positions = self.positions.tolist()
        transactions = self.transactions.tolist()
        made: list[tuple[int, int, int, int, int, int, RowBatch]] = []
        for batch in self.batches:
            columns = (
                batch.groups,
                batch.places,
                batch.parts,
                batch.starts,
                batch.counts,
                batch.offsets,
            )
            made += zip(*[column.tolist() for column in columns], repeat(batch))
        made.sort(key=itemgetter(0, 1))
        for group, place, part, start, count, offset, batch in made:
            yield (
                group,
                Message(
                    type=batch.type,
                    header=batch.header(part, count, offset),
                    vchannel=batch.vchannel,
                    payload=batch.payload,
                    first_row=start,
                    wal_term=self.wal_term,
                    wal_name=self.wal_name,
                    position=positions[group] + place,
                    last_confirmed_position=self.last_confirmed_position,
                    time_tick=ticks[group],
                    txn_id=ticks[group] if transactions[group] else 0,
                ),
            )


Visible = AnyMessage | PackedRows
"""What an entry makes visible to readers."""


def messages_of(visible: Iterable[Visible]) -> Iterator[AnyMessage]:
    """Yield messages as objects; those of packed rows are built on demand."""
    for each in visible:
        if isinstance(each, PackedRows):
            yield from each.messages()
        else:
            yield each


def up_to(visible: Visible, tick: int) -> Visible | None:
    """Return the part at or below a tick, None when it is empty."""
    if isinstance(visible, PackedRows):
        return visible.within(upto=tick)
    return visible if visible.time_tick <= tick else None


def row_batches(visible: Visible) -> Iterator[tuple[RowBatch, Numbers]]:
    """Yield each batch of rows or deletes with the ticks of its groups. A message becomes a batch
    of one group.
    """
    if isinstance(visible, PackedRows):
        for batch in visible.batches:
            yield batch, visible.ticks
        return
    for body in visible.bodies:
        match body.header:
            case InsertHeader() as header:
                place = (header.partition_id, header.schema_version, header.segment_id)
                offset = header.first_offset
            case DeleteHeader() as header:
                place = (0, 0, 0)
                offset = header.next_offset
            case _:
                continue
        partition_id, schema_version, segment_id = place
        batch = RowBatch(
            type=body.type,
            vchannel=body.vchannel,
            collection_id=header.collection_id,
            partition_id=partition_id,
            schema_version=schema_version,
            segment_id=segment_id,
            payload=body.payload,
            groups=numbers((0,), U4),
            places=numbers((0,), U4),
            parts=numbers((header.part,), U2),
            starts=numbers((body.first_row,), U4),
            counts=numbers((header.rows,), U4),
            offsets=np.array((offset,), U8),
            rows=header.rows,
        )
        yield batch, np.array((body.time_tick,), U8)


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """One atomic entry: the messages of one group at consecutive positions and one tick, or the
    packed rows of many groups.

    `first_tick` is the tick of the first group and `time_tick` that of the last. `size_bytes` is
    the stored size, `crc32c` the checksum, which the next entry repeats. `producer` is the stamp of
    the write when the whole entry is one write.
    """

    first_position: int
    last_position: int
    first_tick: int
    time_tick: int
    last_confirmed_position: int
    wal_term: int
    crc32c: int = 0
    size_bytes: int = 0
    messages: tuple[Message, ...] = ()
    rows: PackedRows | None = None
    producer: ProducerStamp | None = None

    @property
    def count(self) -> int:
        """The number of messages in the entry."""
        return self.last_position - self.first_position + 1

    def tick_at(self, position: int) -> int:
        """Return the tick of the group that holds a position."""
        if (rows := self.rows) is None:
            return self.time_tick
        return int(rows.ticks[int(np.searchsorted(rows.positions, position, side="right")) - 1])


class OpenTransaction(NamedTuple):
    """A transaction whose commit or rollback has not been observed yet."""

    begin: Message
    bodies: list[Message]


class TransactionBuffer:
    """The open transactions at one place of a log; each comes out whole at its commit, or never.

    Takes entries in log order, from any position on, and returns plain messages and assembled
    transactions in the same order. Transactions do not expire here: the node logs a rollback. A
    transaction whose begin lies before the first entry is left out; `begin_missing` is called with
    its commit and may raise.
    """

    def __init__(self, *, begin_missing: Callable[[Message], None] = lambda _commit: None) -> None:
        self._begin_missing = begin_missing
        self._open: dict[int, OpenTransaction] = {}
        self._first_tick = 0
        self.size_bytes = 0

    @property
    def open_transactions(self) -> tuple[OpenTransaction, ...]:
        """The transactions that have begun and not ended, in the order of their begins."""
        return tuple(self._open.values())

    def observe(self, entry: LogEntry) -> Sequence[Visible]:
        """Return what `entry` makes visible, in order: its rows, its plain messages, or the
        transaction that it commits.

        Raises `Corrupt` for a commit that does not match the observed messages.
        """
        if not self._first_tick:
            self._first_tick = entry.first_tick
        if entry.rows is not None:
            return (entry.rows,)
        messages = entry.messages
        if not messages[0].txn_id:
            return messages
        outcomes = map(self._observe_message, messages)
        return [outcome for outcome in outcomes if outcome is not None]

    def _observe_message(self, message: Message) -> AnyMessage | None:
        if not message.txn_id:
            return message
        match message.type:
            case MessageType.BEGIN_TXN:
                self._open.setdefault(message.txn_id, OpenTransaction(message, []))
            case MessageType.COMMIT_TXN:
                if (transaction := self._take(message.txn_id)) is not None:
                    return assemble_transaction(transaction.bodies, message)
                # A transaction's id is its begin's tick, and ticks ascend with positions.
                if message.txn_id >= self._first_tick:
                    raise Corrupt(
                        f"transaction {message.txn_id} commits at {message.position} without its "
                        "begin"
                    )
                self._begin_missing(message)
            case MessageType.ROLLBACK_TXN:
                self._take(message.txn_id)
            case _:
                if (transaction := self._open.get(message.txn_id)) is not None:
                    transaction.bodies.append(message)
                    self.size_bytes += message.size_bytes
        return None

    def _take(self, txn_id: int) -> OpenTransaction | None:
        transaction = self._open.pop(txn_id, None)
        if transaction is not None:
            self.size_bytes -= sum(body.size_bytes for body in transaction.bodies)
        return transaction


def assemble_transaction(bodies: Sequence[Message], commit: Message) -> TransactionMessage:
    """Return the transaction of a commit, each body carrying the commit's tick and what the commit
    assigned to it.
    """
    header = commit.header
    assert isinstance(header, CommitTxnHeader)
    if len(bodies) != len(header.assignments):
        raise Corrupt(
            f"commit at position {commit.position} has {len(header.assignments)} bodies, the log "
            f"has {len(bodies)}"
        )
    stamped: list[Message] = []
    for body, assigned in zip(bodies, header.assignments, strict=True):
        if body.type is MessageType.INSERT:
            place = {"segment_id": assigned.segment_id, "first_offset": assigned.offset}
        else:
            place = {"next_offset": assigned.offset}
        placed = replace(body.header, **place)
        confirmed = commit.last_confirmed_position
        stamped.append(
            replace(
                body, header=placed, time_tick=commit.time_tick, last_confirmed_position=confirmed
            )
        )
    return transaction_of(stamped, commit)


def transaction_of(bodies: Sequence[Message], commit: Message) -> TransactionMessage:
    """Return the transaction of a commit and its bodies, which already carry the commit's
    assignments.
    """
    return TransactionMessage(
        wal_name=commit.wal_name,
        position=commit.position,
        last_confirmed_position=commit.last_confirmed_position,
        time_tick=commit.time_tick,
        txn_id=commit.txn_id,
        bodies=tuple(bodies),
        commit=commit,
    )
