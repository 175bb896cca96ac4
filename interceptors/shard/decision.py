"""Decides an append: returns its stamped headers, or the segments and offsets of its rows, or
raises why it is refused. Pure.

Everything is checked before anything is stamped, so a refused append changes neither itself nor the
state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from interceptors.shard.state import SegmentKey, ShardState
from wal.errors import InvalidArgument
from wal.headers import (
    DDL,
    DML,
    CommitTxnHeader,
    CreateCollectionHeader,
    CreatePartitionHeader,
    CreateSegmentHeader,
    CutHeader,
    DeleteHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    Header,
    InsertHeader,
    MessageType,
)
from wal.message import ALL_VCHANNELS, Change, MutableMessage
from wal.rows import Encoded, RowTarget

BodiesOf = Callable[[int], Sequence[Change]]
"""The bodies of an open transaction, in log order."""


class Decision(NamedTuple):
    """Messages that may be appended, or that have to wait until the `missing` segments exist.

    The state applies `changes` once the log has the group; None for messages that readers do not
    see by themselves: a tick, a begin, a body, a rollback. `header` replaces the header of a commit
    or a cut.
    """

    changes: Sequence[Change] | None = None
    header: Header | None = None
    row_offsets: Mapping[str, tuple[int, int]] = {}
    missing: tuple[SegmentKey, ...] = ()


def decide(
    state: ShardState, messages: Sequence[MutableMessage], bodies_of: BodiesOf, *, tick: int
) -> Decision:
    """Return the decision for messages at `tick`.

    Raises the typed error of the first message that does not fit. The shape of a group is asserted:
    a wrong one is a bug of its builder.
    """
    head = messages[0]
    kind = head.type
    if kind in DML:
        assert head.txn_id, "rows outside a streamed transaction are packed"
        for message in messages:
            _check_rows(state, message)
        return Decision()  # assigned at the commit
    assert all(message.type is kind for message in messages), "types other than rows share no group"
    if kind in DDL:
        _check_ddl(state, messages)
    elif kind in {MessageType.CREATE_SEGMENT, MessageType.FLUSH}:
        _check_segments(state, messages)
    elif kind is MessageType.COMMIT_TXN:
        return _decide_commit(state, bodies_of(head.txn_id), tick=tick)
    elif kind is MessageType.CUT:
        assert [message.vchannel for message in messages] == [ALL_VCHANNELS], (
            "a cut is one message to all vchannels"
        )
        header = CutHeader(state.cut_number + 1, tuple(sorted(state.segments)))
        return Decision([Change.of(head)._replace(header=header)], header)
    else:
        return Decision()  # ticks, begins and rollbacks concern no shard
    return Decision([Change.of(message) for message in messages])


def _decide_commit(state: ShardState, bodies: Iterable[Change], *, tick: int) -> Decision:
    """Assign segments and offsets to inserts and deletes at `tick`, in their order; the state stays
    unchanged.
    """
    stamped: list[Change] = []
    next_offsets: dict[str, int] = {}
    row_offsets: dict[str, tuple[int, int]] = {}
    missing: dict[SegmentKey, None] = {}
    for body in bodies:
        vchannel = body.vchannel
        header = body.header
        offset = next_offsets.setdefault(vchannel, state.next_offsets[vchannel])
        if isinstance(header, DeleteHeader):
            # A delete gets the current next offset: it removes rows below it and none from it on.
            stamped.append(body._replace(header=replace(header, next_offset=offset)))
            continue
        assert isinstance(header, InsertHeader), "bodies are inserts and deletes"
        next_offsets[vchannel] = offset + header.rows
        segment = state.open_segment(vchannel, header.partition_id)
        if segment is None:
            missing[SegmentKey(vchannel, header.collection_id, header.partition_id)] = None
            continue
        assert segment.created_tick < tick, "a segment is older than the rows in it"
        first, count = row_offsets.get(vchannel, (offset, 0))
        row_offsets[vchannel] = (first, count + header.rows)
        assigned = replace(header, segment_id=segment.segment_id, first_offset=offset)
        stamped.append(body._replace(header=assigned))
    header = CommitTxnHeader.of([(each.vchannel, each.header) for each in stamped])
    return Decision(stamped, header, row_offsets, tuple(missing))


def _check_rows(state: ShardState, message: MutableMessage) -> None:
    catalog = state.catalog
    if isinstance(message.header, InsertHeader):
        header = message.header
        catalog.check_insert(
            message.vchannel, header.collection_id, header.partition_id, header.schema_version
        )
    else:
        assert isinstance(message.header, DeleteHeader), (
            "a group of rows has inserts and deletes only"
        )
        catalog.check_delete(message.vchannel, message.header.collection_id)


def _check_ddl(state: ShardState, messages: Sequence[MutableMessage]) -> None:
    header = messages[0].header
    catalog = state.catalog
    assert all(message.header == header for message in messages), (
        "the parts of one change have the same header"
    )
    match header:
        case CreateCollectionHeader(vchannels=vchannels):
            catalog.check_create_collection(header)
        case DropCollectionHeader():
            vchannels = catalog.live(header.collection_id).vchannels
        case CreatePartitionHeader():
            vchannels = catalog.check_create_partition(header).vchannels
        case DropPartitionHeader():
            vchannels = catalog.check_drop_partition(header).vchannels
        case _:
            raise AssertionError(f"{header!r} is no header of a DDL message")
    assert sorted(message.vchannel for message in messages) == sorted(vchannels), (
        "one part for each vchannel"
    )


def _check_segments(state: ShardState, messages: Sequence[MutableMessage]) -> None:
    for message in messages:
        header = message.header
        assert isinstance(header, CreateSegmentHeader | FlushHeader), (
            "a segment message has its own header"
        )
        is_there = header.segment_id in state.segments
        if isinstance(header, FlushHeader) and not is_there:
            raise InvalidArgument(f"{header!r} names no growing segment — it is sealed already")
        if isinstance(header, CreateSegmentHeader):
            assert not is_there, "a segment gets a new id"
            if not state.catalog.is_writable(message.vchannel, header.partition_id):
                raise InvalidArgument(
                    f"{header!r} names a partition that was dropped — make no segment"
                )


# --- rows of many groups --------------------------------------------------------------------------


def check_target(state: ShardState, target: RowTarget) -> None:
    """Raise `CollectionNotFound`, `PartitionNotFound` or `SchemaMismatch` for rows that do not fit
    the current catalog.
    """
    if target.type is MessageType.DELETE:
        state.catalog.check_delete(target.vchannels[0], target.collection_id)
    else:
        state.catalog.check_insert(
            target.vchannels[0], target.collection_id, target.partition_id, target.schema_version
        )


def open_segments(
    state: ShardState, encoded: Iterable[Encoded]
) -> tuple[list[int], dict[SegmentKey, Encoded]]:
    """Return the id of the open segment for each batch, 0 for deletes, and the missing segments by
    key, each with a batch that needs it.

    All rows of a batch go to one segment: a limit that they cross is soft.
    """
    segments: list[int] = []
    missing: dict[SegmentKey, Encoded] = {}
    for batch in encoded:
        target = batch.target
        segment_id = 0
        if target.type is MessageType.INSERT:
            segment = state.open_segment(batch.vchannel, target.partition_id)
            if segment is None:
                missing[SegmentKey(batch.vchannel, target.collection_id, target.partition_id)] = (
                    batch
                )
            else:
                segment_id = segment.segment_id
        segments.append(segment_id)
    return segments, missing
