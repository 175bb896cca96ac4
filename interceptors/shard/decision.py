"""What becomes of an append group: its stamped headers and what it will change, or why it may not be appended. Pure.

Everything is checked before anything is stamped, so a refused group changes nothing, neither itself nor the state.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from interceptors.shard.state import SegmentKey, ShardState
from wal.errors import InvalidArgument
from wal.headers import (
    DDL,
    DML,
    BodyAssignment,
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

BodiesOf = Callable[[int], Sequence[Change]]
"""The bodies of an open transaction, in log order."""


class Decision(NamedTuple):
    """A group that may be appended, or that has to wait until `missing` segments are made.

    `headers` are the messages' headers, stamped. `changes` is what the state applies once the log has the group; None for
    what readers do not see by itself: a tick, a begin, a body, a rollback.
    """

    headers: Sequence[Header]
    changes: Sequence[Change] | None = None
    row_offsets: dict[str, tuple[int, int]] | None = None
    missing: tuple[SegmentKey, ...] = ()


def decide(state: ShardState, messages: Sequence[MutableMessage], bodies_of: BodiesOf, *, tick: int) -> Decision:
    """Return what becomes of a group at `tick`. Raises the typed error of the first message that does not fit.

    Its shape is the business of whoever builds it: a wrong one is a bug.
    """
    head = messages[0]
    kind = head.type
    if kind in DML:
        return _decide_rows(state, messages, tick=tick)
    if kind is MessageType.BEGIN_TXN and len(messages) > 1:
        return _decide_buffered(state, messages, tick=tick)
    assert all(message.type is kind for message in messages), "types other than rows share no group"
    if kind in DDL:
        return _decide_ddl(state, messages)
    match kind:
        case MessageType.COMMIT_TXN:
            return _decide_commit(state, bodies_of(head.txn_id), tick=tick)
        case MessageType.CUT:
            return _decide_cut(state, messages)
        case MessageType.CREATE_SEGMENT | MessageType.FLUSH:
            return _decide_segments(state, messages)
        case _:  # ticks, begins and rollbacks concern no shard
            return Decision([message.header for message in messages])


def _decide_rows(state: ShardState, messages: Sequence[MutableMessage], *, tick: int) -> Decision:
    changes = [_check_rows(state, message) for message in messages]
    if messages[0].txn_id:
        return Decision([change.header for change in changes])  # assigned at the commit
    return _assign(state, changes, tick=tick)


def _assign(state: ShardState, changes: Iterable[Change], *, tick: int) -> Decision:
    """Return inserts and deletes at `tick` with their segments and offsets, in their order; the state is not changed."""
    stamped: list[Change] = []
    next_offsets: dict[str, int] = {}
    row_offsets: dict[str, tuple[int, int]] = {}
    missing: dict[SegmentKey, None] = {}
    for kind, vchannel, header, payload_bytes in changes:
        offset = next_offsets.get(vchannel)
        if offset is None:
            offset = state.next_offsets[vchannel]
        if isinstance(header, DeleteHeader):
            # The next offset of this moment: it removes what came before it and nothing after.
            stamped.append(Change(kind, vchannel, replace(header, next_offset=offset), payload_bytes))
            continue
        assert isinstance(header, InsertHeader), "only rows are assigned anything"
        next_offsets[vchannel] = offset + header.rows
        segment = state.open_segment(vchannel, header.partition_id)
        if segment is None:
            missing[SegmentKey(vchannel, header.collection_id, header.partition_id)] = None
            continue
        assert segment.created_tick < tick, "a segment is older than the rows in it"
        first, count = row_offsets.get(vchannel, (offset, 0))
        row_offsets[vchannel] = (first, count + header.rows)
        assigned = replace(header, segment_id=segment.segment_id, first_offset=offset)
        stamped.append(Change(kind, vchannel, assigned, payload_bytes))
    return Decision([change.header for change in stamped], stamped, row_offsets, tuple(missing))


def _decide_buffered(state: ShardState, messages: Sequence[MutableMessage], *, tick: int) -> Decision:
    begin, *bodies, commit = messages
    assert commit.type is MessageType.COMMIT_TXN, "the txn interceptor lets no other shape through"
    changes = [_check_rows(state, body) for body in bodies]
    decision = _decide_commit(state, changes, tick=tick)
    return decision._replace(headers=[begin.header, *(change.header for change in changes), *decision.headers])


def _decide_commit(state: ShardState, bodies: Sequence[Change], *, tick: int) -> Decision:
    decision = _assign(state, bodies, tick=tick)
    vchannels = tuple(sorted({body.vchannel for body in bodies}))
    assignments = tuple(
        BodyAssignment(header.segment_id, header.first_offset)
        if isinstance(header, InsertHeader)
        else BodyAssignment(0, header.next_offset)
        for header in decision.headers
        if isinstance(header, InsertHeader | DeleteHeader)
    )
    return decision._replace(headers=[CommitTxnHeader(vchannels, assignments)])


def _check_rows(state: ShardState, message: MutableMessage) -> Change:
    if isinstance(message.header, InsertHeader):
        state.catalog.check_insert(message.vchannel, message.header)
    else:
        assert isinstance(message.header, DeleteHeader), "rows come apart from everything else"
        state.catalog.check_delete(message.vchannel, message.header)
    return Change.of(message)


def _decide_ddl(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    header, catalog = messages[0].header, state.catalog
    assert all(message.header == header for message in messages), "the parts of one change say the same"
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
    assert sorted(message.vchannel for message in messages) == sorted(vchannels), "one part for each vchannel"
    return _unstamped(messages)


def _decide_cut(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    (message,) = messages
    assert message.vchannel == ALL_VCHANNELS, "a cut is one message to all vchannels"
    header = CutHeader(state.cut_number + 1, tuple(sorted(state.segments)))
    return Decision([header], changes=[Change.of(message)._replace(header=header)])


def _decide_segments(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    for message in messages:
        header = message.header
        assert isinstance(header, CreateSegmentHeader | FlushHeader), "these have headers of their own"
        is_there = header.segment_id in state.segments
        if isinstance(header, FlushHeader) and not is_there:
            raise InvalidArgument(f"{header!r} names no growing segment — it is sealed already")
        if isinstance(header, CreateSegmentHeader):
            assert not is_there, "a segment gets a new id"
            if not state.catalog.is_writable(message.vchannel, header.partition_id):
                raise InvalidArgument(f"{header!r} is of a partition that was dropped — make no segment")
    return _unstamped(messages)


def _unstamped(messages: Sequence[MutableMessage]) -> Decision:
    return Decision([message.header for message in messages], changes=[Change.of(message) for message in messages])
