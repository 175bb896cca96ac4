"""Messages before and after the log, and the transactions that readers see of them. No I/O.

The frozen ones hold no cycles and are left out of garbage collection: a reader holds tens of thousands at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from wal.errors import Corrupt
from wal.headers import CommitTxnHeader, Header, MessageType
from wal.position import MessageId, ProducerStamp, message_id_kind

ALL_VCHANNELS = ""
"""The vchannel of a message that concerns every vchannel of its pchannel."""
MESSAGE_OVERHEAD_BYTES = 64
"""Charged for each message on top of its payload when sizes are added up: fixed fields and a typical header."""


@dataclass(slots=True, eq=False)
class MutableMessage:
    """A message on its way into the log, built by an appender; the chain stamps it, and again when an append is redone."""

    type: MessageType
    header: Header
    vchannel: str = ALL_VCHANNELS
    payload: bytes | memoryview = b""
    txn_id: int = 0
    time_tick: int = 0
    wal_term: int = 0
    last_confirmed: int | None = None

    def with_time_tick(self, time_tick: int) -> Self:
        """Stamp the tick and return the message."""
        assert time_tick > 0, "zero is no tick"
        self.time_tick = time_tick
        return self

    def with_wal_term(self, term: int) -> Self:
        """Stamp the term of the WAL that writes the message; one that never had its place may come again in a later one."""
        assert self.wal_term <= term, f"term {self.wal_term} is already stamped"
        self.wal_term = term
        return self

    def with_last_confirmed(self, position: int | None) -> Self:
        """Stamp where a reader of this message resumes; None means the message's own position."""
        self.last_confirmed = position
        return self

    @property
    def size_bytes(self) -> int:
        """The size this message counts for against limits, in bytes."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES


class _Placed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What has its place in a log; readers resume at `last_confirmed` and miss nothing at or above its tick."""

    wal_name: str
    position: int
    last_confirmed_position: int
    time_tick: int
    txn_id: int

    @property
    def message_id(self) -> MessageId:
        """The position in the log."""
        return message_id_kind(self.wal_name)(self.position)

    @property
    def last_confirmed(self) -> MessageId:
        """Where a reader must resume."""
        return message_id_kind(self.wal_name)(self.last_confirmed_position)


class Message(_Placed, frozen=True, kw_only=True, gc=False):
    """A message as the log keeps it; many readers share one object."""

    type: MessageType
    header: Header
    vchannel: str
    payload: bytes | memoryview
    wal_term: int

    @property
    def bodies(self) -> tuple["Message"]:
        """The message alone, for who goes through messages and transactions alike."""
        return (self,)

    @property
    def size_bytes(self) -> int:
        """The size this message counts for in buffers, in bytes."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES


class TransactionMessage(_Placed, frozen=True, kw_only=True, gc=False):
    """A transaction as readers see it: its bodies in order, at the tick and position of its commit.

    Bodies keep their own positions but carry the commit's tick, segments and offsets.
    """

    type: ClassVar[MessageType] = MessageType.TXN

    bodies: tuple[Message, ...]
    commit: Message

    @property
    def size_bytes(self) -> int:
        """The bodies' sizes added up."""
        return sum(body.size_bytes for body in self.bodies)


AnyMessage = Message | TransactionMessage


class LogEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One atomic entry of a log: the messages of one append group at consecutive positions, at one tick.

    `size_bytes` is its stored size; `crc32c` its checksum, which the next entry repeats; `producer` the write it is.
    """

    first_position: int
    time_tick: int
    last_confirmed_position: int
    wal_term: int
    crc32c: int
    size_bytes: int
    messages: tuple[Message, ...]
    producer: ProducerStamp | None = None

    @property
    def last_position(self) -> int:
        """Position of the entry's last message."""
        return self.first_position + len(self.messages) - 1


class Change(NamedTuple):
    """What one message changes, without its payload: made before the log by appends, behind it by recovery and the flusher.

    `payload_bytes` is what its rows or keys count for in segments and transactions.
    """

    type: MessageType
    vchannel: str
    header: Header
    payload_bytes: int

    @classmethod
    def of(cls, message: MutableMessage | Message) -> Self:
        """Return the change of a message, before or after the log."""
        return cls(message.type, message.vchannel, message.header, len(message.payload))


class OpenTransaction(NamedTuple):
    """A transaction whose commit or rollback has not been seen yet."""

    begin: Message
    bodies: list[Message]


class TransactionBuffer:
    """The transactions in flight at one place of one log: each comes out whole at its commit, or not at all.

    Entries come in, in log order, from any position on; plain messages and assembled transactions go out in the same order.
    Nothing expires here: the node logs a rollback. Of a transaction whose begin lies before the first entry nothing comes
    out; `begin_missing` is called with its commit, and may raise.
    """

    def __init__(self, *, begin_missing: Callable[[Message], None] = lambda _commit: None) -> None:
        self._begin_missing = begin_missing
        self._open: dict[int, OpenTransaction] = {}
        self._first_tick = 0
        self.size_bytes = 0

    @property
    def open_transactions(self) -> tuple[OpenTransaction, ...]:
        """The transactions begun and not ended, in the order of their begins."""
        return tuple(self._open.values())

    def observe(self, entry: LogEntry) -> Sequence[AnyMessage]:
        """Return what `entry` makes visible, in order: its plain messages, or the transaction that it commits.

        Raises `Corrupt` for a commit that fits nothing observed.
        """
        if not self._first_tick:
            self._first_tick = entry.time_tick
        messages = entry.messages
        head = messages[0]
        if not head.txn_id and (len(messages) == 1 or not any(message.txn_id for message in messages)):
            return messages
        last = messages[-1]
        if head.type is MessageType.BEGIN_TXN and last.type is MessageType.COMMIT_TXN and head.txn_id == last.txn_id:
            return (assemble_transaction(messages[1:-1], last),)
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
                    raise Corrupt(f"transaction {message.txn_id} commits at {message.position} without its begin")
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
    """Return the transaction of a commit, each body carrying the commit's tick and what the commit assigned to it."""
    header = commit.header
    assert isinstance(header, CommitTxnHeader)
    if len(bodies) != len(header.assignments):
        raise Corrupt(f"commit at position {commit.position} is of {len(header.assignments)} bodies, not {len(bodies)}")
    stamped: list[Message] = []
    for body, assigned in zip(bodies, header.assignments, strict=True):
        if body.type is MessageType.INSERT:
            place = {"segment_id": assigned.segment_id, "first_offset": assigned.offset}
        else:
            place = {"next_offset": assigned.offset}
        stamped.append(
            replace(
                body,
                header=replace(body.header, **place),
                time_tick=commit.time_tick,
                last_confirmed_position=commit.last_confirmed_position,
            )
        )
    return TransactionMessage(
        wal_name=commit.wal_name,
        position=commit.position,
        last_confirmed_position=commit.last_confirmed_position,
        time_tick=commit.time_tick,
        txn_id=commit.txn_id,
        bodies=tuple(stamped),
        commit=commit,
    )
