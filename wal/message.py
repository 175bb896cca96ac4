"""Messages before and after the log, and transactions as readers get them. No I/O.

The frozen classes are excluded from garbage collection: they have no reference cycles, and a reader
holds tens of thousands at a time.
"""

from typing import ClassVar, NamedTuple, Self

import msgspec

from wal.headers import CreateCollectionHeader, Header, MessageType
from wal.position import MessageId, message_id_kind

ALL_VCHANNELS = ""
"""The vchannel of a message for every vchannel of its pchannel."""
MESSAGE_OVERHEAD_BYTES = 64
"""Added to the payload of each message when sizes are counted: fixed fields and a typical
header.
"""
TRANSACTION_OVERHEAD_BYTES = 2 * MESSAGE_OVERHEAD_BYTES
"""The size that begin and commit add to their bodies."""


class MutableMessage(msgspec.Struct, eq=False):
    """A message on its way into the log, built by an appender. The chain stamps it, and stamps it
    again when an append is redone.
    """

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
        self.time_tick = time_tick
        return self

    def with_wal_term(self, term: int) -> Self:
        """Stamp the term of the WAL that writes the message; return the message."""
        self.wal_term = term
        return self

    def with_last_confirmed(self, position: int | None) -> Self:
        """Stamp the position where a reader of this message resumes, None for its own position;
        return the message.
        """
        self.last_confirmed = position
        return self

    @property
    def size_bytes(self) -> int:
        """The size of this message against limits, in bytes; the only header that may be large is a
        schema.
        """
        schema = self.header.schema if isinstance(self.header, CreateCollectionHeader) else b""
        return len(self.payload) + len(schema) + MESSAGE_OVERHEAD_BYTES


class Placed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message or transaction with a place in a log. Readers that resume at `last_confirmed` miss
    nothing at or above its tick.
    """

    wal_name: str
    position: int
    last_confirmed_position: int
    time_tick: int
    txn_id: int = 0

    @property
    def message_id(self) -> MessageId:
        """The position in the log."""
        return message_id_kind(self.wal_name)(self.position)

    @property
    def last_confirmed(self) -> MessageId:
        """The position where a reader must resume."""
        return message_id_kind(self.wal_name)(self.last_confirmed_position)


class Message(Placed, frozen=True, kw_only=True, gc=False):
    """A message from the log; many readers share one object."""

    type: MessageType
    header: Header
    vchannel: str
    payload: bytes | memoryview
    wal_term: int
    first_row: int = 0
    """The index of its first row in the payload, which also has rows of other messages when they
    are packed.
    """

    count: ClassVar[int] = 1

    @property
    def bodies(self) -> tuple["Message"]:
        """The message itself, so that code can treat messages and transactions alike."""
        return (self,)

    @property
    def size_bytes(self) -> int:
        """The size of this message in buffers, in bytes."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES


class TransactionMessage(Placed, frozen=True, kw_only=True, gc=False):
    """A transaction as readers get it: its bodies in order, at the tick and position of its commit.

    Bodies keep their own positions but have the tick, segments and offsets of the commit.
    """

    type: ClassVar[MessageType] = MessageType.TXN
    count: ClassVar[int] = 1

    bodies: tuple[Message, ...]
    commit: Message

    @property
    def size_bytes(self) -> int:
        """The sum of the sizes of the bodies."""
        return sum(body.size_bytes for body in self.bodies)


AnyMessage = Message | TransactionMessage


class Change(NamedTuple):
    """The change that one message makes, without its payload. Appends make it before the log,
    recovery and the flusher after it.

    `payload_bytes` is the size of its rows or keys in segments and transactions.
    """

    type: MessageType
    vchannel: str
    header: Header
    payload_bytes: int

    @classmethod
    def of(cls, message: MutableMessage | Message) -> Self:
        """Return the change of a message, before or after the log."""
        return cls(message.type, message.vchannel, message.header, len(message.payload))
