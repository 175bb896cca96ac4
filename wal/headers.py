"""Typed headers: what a message says beside its rows. Stored as MessagePack arrays, so fields are
only ever appended.

Fields the node stamps on the way (segment, offsets, cut number) have a default that no stamped
message carries.
"""

from collections.abc import Sequence
from enum import IntEnum, unique
from typing import Self

import msgspec


@unique
class MessageType(IntEnum):
    """What a message is. The number is stored; it follows Milvus, except `CUT`, which has no
    counterpart there.
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
    """An assembled transaction: made by readers, never in a log."""

    def __str__(self) -> str:
        return self.name


MESSAGE_VERSION = 2
"""Version of every message this release writes; (type, version) names the header's layout."""

_T = MessageType

SYSTEM = frozenset({_T.TIME_TICK, _T.BEGIN_TXN, _T.COMMIT_TXN, _T.ROLLBACK_TXN, _T.TXN})
"""Handled whatever a reader's type filter says."""
DDL = frozenset({_T.CREATE_COLLECTION, _T.DROP_COLLECTION, _T.CREATE_PARTITION, _T.DROP_PARTITION})
"""Changes what exists: takes its vchannels for itself and ends the transactions in flight on them,
which a cut does not.
"""
DML = frozenset({_T.INSERT, _T.DELETE})
"""Carries rows or keys."""
MAKES_ROOM = frozenset(
    {_T.TIME_TICK, _T.FLUSH, _T.CUT, _T.DROP_COLLECTION, _T.DROP_PARTITION, _T.ROLLBACK_TXN}
)
"""Little data after which log or files may be given up; the first tick of a term, without which
nothing may, is one too.
"""
UNSTAMPED = -1


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Root of all headers; the class of a header follows from its message's type and version."""


class TimeTickHeader(Header, frozen=True, gc=False):
    """Everything at or below the message's tick is before it in the log. `source_id` names the node
    that says so.
    """

    source_id: str = ""


class InsertHeader(Header, frozen=True, gc=False):
    """Rows for one partition of one vchannel; `first_offset` is the row offset of the first row.

    An insert with rows on several vchannels is several messages, one right after the other; `part`
    numbers them from 0.
    """

    collection_id: int
    partition_id: int
    schema_version: int
    rows: int
    segment_id: int = UNSTAMPED
    first_offset: int = UNSTAMPED
    part: int = 0


class DeleteHeader(Header, frozen=True, gc=False):
    """Keys to delete on one vchannel: rows of those keys with an offset below `next_offset` are
    gone.

    A delete on several vchannels is several messages, as an insert is.
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
    """The collection and everything in it is gone."""

    collection_id: int


class CreatePartitionHeader(Header, frozen=True, gc=False):
    """A new partition of a collection."""

    collection_id: int
    partition_id: int
    name: str


class DropPartitionHeader(Header, frozen=True, gc=False):
    """The partition and the rows in it are gone."""

    collection_id: int
    partition_id: int


class CreateSegmentHeader(Header, frozen=True, gc=False):
    """A growing segment is open for rows; the limits are soft: one crossing insert is taken, then
    it is sealed.
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
    """What a commit gives one body: segment and first offset of an insert, or the next offset of a
    delete (segment 0).
    """

    segment_id: int
    offset: int


class CommitTxnHeader(Header, frozen=True, gc=False):
    """A transaction takes place at this message's tick; `assignments` follow the order of its
    bodies.
    """

    vchannels: tuple[str, ...] = ()
    assignments: tuple[BodyAssignment, ...] = ()

    @classmethod
    def of(cls, bodies: Sequence[tuple[str, Header]]) -> Self:
        """Return the header of a commit of bodies, given their vchannels and stamped headers."""
        vchannels = {vchannel for vchannel, _ in bodies}
        assignments = list[BodyAssignment]()
        for _, header in bodies:
            if isinstance(header, InsertHeader):
                assignments.append(BodyAssignment(header.segment_id, header.first_offset))
            elif isinstance(header, DeleteHeader):
                assignments.append(BodyAssignment(0, header.next_offset))
        return cls(tuple(sorted(vchannels)), tuple(assignments))


class RollbackTxnHeader(Header, frozen=True, gc=False):
    """A transaction never takes place; `reason` is for people."""

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
"""The registry of header layouts; adding a version means adding a row, never changing one."""
