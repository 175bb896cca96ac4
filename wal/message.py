"""Messages before and after the log, and transactions as readers see them. No I/O.

The frozen ones hold no cycles and are left out of garbage collection: a reader holds tens of
thousands at a time.
"""

from typing import ClassVar, NamedTuple, Self

import msgspec

from wal.headers import CreateCollectionHeader, Header, MessageType
from wal.position import MessageId, message_id_kind

ALL_VCHANNELS = ""
"""The vchannel of a message that concerns every vchannel of its pchannel."""
MESSAGE_OVERHEAD_BYTES = 64
"""Charged for each message on top of its payload when sizes are added up: fixed fields and a
typical header.
"""
TRANSACTION_OVERHEAD_BYTES = 2 * MESSAGE_OVERHEAD_BYTES
"""What begin and commit add to the bodies between them."""


class MutableMessage(msgspec.Struct, eq=False):
    """A message on its way into the log, built by an appender; the chain stamps it, and again when
    an append is redone.
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
        """Stamp the term of the WAL that writes the message, and return it."""
        self.wal_term = term
        return self

    def with_last_confirmed(self, position: int | None) -> Self:
        """Stamp where a reader of this message resumes, None for the message's own position, and
        return it.
        """
        self.last_confirmed = position
        return self

    @property
    def size_bytes(self) -> int:
        """The size this message counts for against limits, in bytes; of headers, only a schema may
        be large.
        """
        schema = self.header.schema if isinstance(self.header, CreateCollectionHeader) else b""
        return len(self.payload) + len(schema) + MESSAGE_OVERHEAD_BYTES


class Placed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What has its place in a log; readers resume at `last_confirmed` and miss nothing at or above
    its tick.
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
        """Where a reader must resume."""
        return message_id_kind(self.wal_name)(self.last_confirmed_position)


class Message(Placed, frozen=True, kw_only=True, gc=False):
    """A message as the log keeps it; many readers share one object."""

    type: MessageType
    header: Header
    vchannel: str
    payload: bytes | memoryview
    wal_term: int
    first_row: int = 0
    """Where its rows begin in the payload, which has rows of others too when it was packed with
    them.
    """

    count: ClassVar[int] = 1

    @property
    def bodies(self) -> tuple["Message"]:
        """The message alone, for who goes through messages and transactions alike."""
        return (self,)

    @property
    def size_bytes(self) -> int:
        """The size this message counts for in buffers, in bytes."""
        return len(self.payload) + MESSAGE_OVERHEAD_BYTES


class TransactionMessage(Placed, frozen=True, kw_only=True, gc=False):
    """A transaction as readers see it: its bodies in order, at the tick and position of its commit.

    Bodies keep their own positions but carry the commit's tick, segments and offsets.
    """

    type: ClassVar[MessageType] = MessageType.TXN
    count: ClassVar[int] = 1

    bodies: tuple[Message, ...]
    commit: Message

    @property
    def size_bytes(self) -> int:
        """The bodies' sizes added up."""
        return sum(body.size_bytes for body in self.bodies)


AnyMessage = Message | TransactionMessage


class Change(NamedTuple):
    """What one message changes, without its payload: made before the log by appends, behind it by
    recovery and the flusher.

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
