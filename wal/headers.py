"""Typed headers: the fields of a message beside its rows. They are stored as MessagePack arrays, so
new fields are only ever appended.

Fields that the node stamps (segment, offsets, cut number) default to a value that no stamped
message has.
"""

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Self

import msgspec


@unique
class MessageType(IntEnum):
    """The type of a message. The number is stored; it is that of Milvus, except `CUT`, which Milvus
    does not have.
    """

    TIME_TICK = 1
    INSERT = 2
    DELETE = 3
    FLUSH = 4
    CREATE_COLLECTION = 5
    DROP_COLLECTION = 6
    CREATE_PARTITION = 7
    DROP_PARTITION = 8
    CREATE_SEGMENT = 10
    CUT = 600
    BEGIN_TXN = 900
    COMMIT_TXN = 901
    ROLLBACK_TXN = 902
    TXN = 999
    """An assembled transaction; only readers make it, it is never in a log."""

    def __str__(self) -> str:
        return self.name


MESSAGE_VERSION = 2
"""The version of all messages that this release writes; (type, version) selects the layout of the
header.
"""

_T = MessageType

SYSTEM = frozenset({_T.TIME_TICK, _T.BEGIN_TXN, _T.COMMIT_TXN, _T.ROLLBACK_TXN, _T.TXN})
"""Processed by readers regardless of their type filter."""
DDL = frozenset({_T.CREATE_COLLECTION, _T.DROP_COLLECTION, _T.CREATE_PARTITION, _T.DROP_PARTITION})
"""Changes the catalog: locks its vchannels exclusively and ends the open transactions on them. A
cut does not end transactions.
"""
DML = frozenset({_T.INSERT, _T.DELETE})
"""Carry rows or keys."""
MAKES_ROOM = frozenset(
    {_T.TIME_TICK, _T.FLUSH, _T.CUT, _T.DROP_COLLECTION, _T.DROP_PARTITION, _T.ROLLBACK_TXN}
)
"""Small messages that allow log or files to be deleted afterwards. The first tick of a term is one:
without it nothing can be deleted.
"""
UNSTAMPED = -1


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Root of all headers; the class of a header follows from its message's type and version."""


class TimeTickHeader(Header, frozen=True, gc=False):
    """Everything at or below the message's tick is before it in the log. `source_id` names the node
    that wrote it.
    """

    source_id: str = ""


class InsertHeader(Header, frozen=True, gc=False):
    """Rows for one partition of one vchannel; `first_offset` is the row offset of the first row.

    An insert with rows on several vchannels is several consecutive messages; `part` numbers them
    from 0.
    """

    collection_id: int
    partition_id: int
    schema_version: int
    rows: int
    segment_id: int = UNSTAMPED
    first_offset: int = UNSTAMPED
    part: int = 0


class DeleteHeader(Header, frozen=True, gc=False):
    """Keys to delete on one vchannel: removes rows with these keys and an offset below
    `next_offset`.

    A delete on several vchannels is several messages, like an insert.
    """

    collection_id: int
    rows: int
    next_offset: int = UNSTAMPED
    part: int = 0


class CreateCollectionHeader(Header, frozen=True, gc=False):
    """A new collection; `schema` is an Arrow IPC schema message, `partitions` pairs of (id,
    name).
    """

    collection_id: int
    name: str
    schema: bytes
    schema_version: int
    primary_key: str
    vchannels: tuple[str, ...]
    partitions: tuple[tuple[int, str], ...]


class DropCollectionHeader(Header, frozen=True, gc=False):
    """Deletes a collection with everything in it."""

    collection_id: int


class CreatePartitionHeader(Header, frozen=True, gc=False):
    """A new partition of a collection."""

    collection_id: int
    partition_id: int
    name: str


class DropPartitionHeader(Header, frozen=True, gc=False):
    """Deletes a partition with its rows."""

    collection_id: int
    partition_id: int


class CreateSegmentHeader(Header, frozen=True, gc=False):
    """A growing segment is open for rows. The limits are soft: the insert that crosses one is
    accepted, then the segment is sealed.
    """

    collection_id: int
    partition_id: int
    segment_id: int
    schema_version: int
    bytes_max: int
    rows_max: int


class FlushHeader(Header, frozen=True, gc=False):
    """A segment is sealed; `reason` is the seal policy's name."""

    collection_id: int
    partition_id: int
    segment_id: int
    reason: str


class CutHeader(Header, frozen=True, gc=False):
    """Every growing segment is sealed at this message's tick; `segment_ids` are those it sealed."""

    number: int = UNSTAMPED
    segment_ids: tuple[int, ...] = ()


class BeginTxnHeader(Header, frozen=True, gc=False):
    """A transaction starts; its id is stamped into the message."""

    keepalive_ms: int


class BodyAssignment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a commit assigns to one body: segment and first offset of an insert, or segment 0 and
    next offset of a delete.
    """

    segment_id: int
    offset: int


class CommitTxnHeader(Header, frozen=True, gc=False):
    """A transaction takes effect at this message's tick; `assignments` are in the order of its
    bodies.
    """

    vchannels: tuple[str, ...] = ()
    assignments: tuple[BodyAssignment, ...] = ()

    @classmethod
    def of(cls, bodies: Sequence[tuple[str, Header]]) -> Self:
        """Return the header of a commit from the vchannels and stamped headers of its bodies."""
        vchannels = {vchannel for vchannel, _ in bodies}
        assignments = list[BodyAssignment]()
        for _, header in bodies:
            if isinstance(header, InsertHeader):
                assignments.append(BodyAssignment(header.segment_id, header.first_offset))
            elif isinstance(header, DeleteHeader):
                assignments.append(BodyAssignment(0, header.next_offset))
        return cls(tuple(sorted(vchannels)), tuple(assignments))


class RollbackTxnHeader(Header, frozen=True, gc=False):
    """A transaction never takes effect; `reason` is for people."""

    reason: str = ""


HEADERS: dict[tuple[MessageType, int], type[Header]] = {
    (_T.TIME_TICK, MESSAGE_VERSION): TimeTickHeader,
    (_T.INSERT, MESSAGE_VERSION): InsertHeader,
    (_T.DELETE, MESSAGE_VERSION): DeleteHeader,
    (_T.FLUSH, MESSAGE_VERSION): FlushHeader,
    (_T.CREATE_COLLECTION, MESSAGE_VERSION): CreateCollectionHeader,
    (_T.DROP_COLLECTION, MESSAGE_VERSION): DropCollectionHeader,
    (_T.CREATE_PARTITION, MESSAGE_VERSION): CreatePartitionHeader,
    (_T.DROP_PARTITION, MESSAGE_VERSION): DropPartitionHeader,
    (_T.CREATE_SEGMENT, MESSAGE_VERSION): CreateSegmentHeader,
    (_T.CUT, MESSAGE_VERSION): CutHeader,
    (_T.BEGIN_TXN, MESSAGE_VERSION): BeginTxnHeader,
    (_T.COMMIT_TXN, MESSAGE_VERSION): CommitTxnHeader,
    (_T.ROLLBACK_TXN, MESSAGE_VERSION): RollbackTxnHeader,
}
"""The registry of header layouts. A new version adds a row; existing rows never change."""
