"""What becomes of an append group: its stamped headers and what it will change, or why it may not be appended. Pure.

Everything is checked before anything is stamped, so a refused group changes nothing, neither itself nor the state. What a
decision needs from outside is the state as of the group's tick and, for the commit of a streamed transaction, its bodies.
"""

from collections.abc import Callable, Sequence

import msgspec

from interceptors.change import Change
from interceptors.shard.assignment import assign, stamp
from interceptors.shard.segment import SegmentKey
from interceptors.shard.state import ShardState
from wal.append import AppendGroup
from wal.errors import InvalidArgument
from wal.headers import (
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
)
from wal.message import ALL_VCHANNELS, MutableMessage
from wal.message_type import DDL, DML, MessageType

BodiesOf = Callable[[int], Sequence[Change]]
"""The bodies of an open transaction, in log order."""


class Decision(msgspec.Struct, frozen=True):
    """A group that may be appended, or that has to wait until `missing` segments are made.

    `headers` are the messages' headers, stamped. `changes` is what the state applies once the log has the group; None for
    what readers do not see by itself: a tick, a begin, a body, a rollback.
    """

    headers: Sequence[Header] = ()
    row_offsets: dict[str, tuple[int, int]] = {}
    changes: Sequence[Change] | None = None
    missing: Sequence[SegmentKey] = ()


def decide(state: ShardState, group: AppendGroup, bodies_of: BodiesOf) -> Decision:
    """Return what becomes of a group. Raises the typed error of the first message that does not fit."""
    messages = group.messages
    head = messages[0]
    kind = head.type
    if kind in DML:
        return _decide_rows(state, group)
    if kind is MessageType.BEGIN_TXN and len(messages) > 1:
        return _decide_buffered(state, group)
    if len(messages) > 1 and any(message.type is not kind for message in messages):
        raise InvalidArgument(f"{kind.name} does not share a group with other types — append them apart")
    if kind in DDL:
        return _decide_ddl(state, messages)
    match kind:
        case MessageType.COMMIT_TXN:
            return _decide_commit(state, bodies_of(head.txn_id), tick=group.time_tick)
        case MessageType.CUT:
            return _decide_cut(state, messages)
        case MessageType.CREATE_SEGMENT:
            return _decide_create_segments(state, messages)
        case MessageType.FLUSH:
            return _decide_flush(state, messages)
        case _:  # ticks, begins and rollbacks concern no shard
            return Decision([message.header for message in messages])


def _decide_rows(state: ShardState, group: AppendGroup) -> Decision:
    changes = [_check_rows(state, message) for message in group.messages]
    if group.messages[0].txn_id:
        return Decision([change.header for change in changes])  # assigned at the commit
    assignment = assign(state, changes, tick=group.time_tick)
    if assignment.missing:
        return Decision(missing=tuple(assignment.missing))
    stamped = [stamp(change, assigned) for change, assigned in zip(changes, assignment.bodies, strict=True)]
    return Decision([change.header for change in stamped], assignment.row_offsets, stamped)


def _decide_buffered(state: ShardState, group: AppendGroup) -> Decision:
    begin, *bodies, commit = group.messages
    changes = [_check_rows(state, body) for body in bodies]
    decision = _decide_commit(state, changes, tick=group.time_tick)
    if decision.missing:
        return decision
    assert commit.type is MessageType.COMMIT_TXN, "the txn interceptor lets no other shape through"
    headers = [begin.header, *(change.header for change in changes), *decision.headers]
    return Decision(headers, decision.row_offsets, decision.changes)


def _decide_commit(state: ShardState, bodies: Sequence[Change], *, tick: int) -> Decision:
    assignment = assign(state, bodies, tick=tick)
    if assignment.missing:
        return Decision(missing=tuple(assignment.missing))
    vchannels = tuple(sorted({body.vchannel for body in bodies}))
    stamped = [stamp(body, assigned) for body, assigned in zip(bodies, assignment.bodies, strict=True)]
    return Decision([CommitTxnHeader(vchannels, tuple(assignment.bodies))], assignment.row_offsets, stamped)


def _check_rows(state: ShardState, message: MutableMessage) -> Change:
    header = message.header
    if isinstance(header, InsertHeader) and message.type is MessageType.INSERT:
        state.catalog.check_insert(message.vchannel, header)
    elif isinstance(header, DeleteHeader) and message.type is MessageType.DELETE:
        state.catalog.check_delete(message.vchannel, header)
    else:
        raise InvalidArgument(
            f"{message.type.name} with {type(header).__name__} does not belong among rows — append it by itself"
        )
    return Change.of(message)


def _decide_ddl(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    head = messages[0]
    if any(message.header != head.header for message in messages):
        raise InvalidArgument(f"the parts of one {head.type.name} carry several headers — give all of them the same")
    vchannels = _check_ddl(state, head.header)
    if sorted(message.vchannel for message in messages) != sorted(vchannels):
        raise InvalidArgument(
            f"{head.type.name} misses vchannels of its collection, or names others — "
            f"send one message to each of {list(vchannels)}"
        )
    return _unstamped(messages)


def _check_ddl(state: ShardState, header: Header) -> tuple[str, ...]:
    """Raise unless the change may happen; return the vchannels it concerns."""
    catalog = state.catalog
    match header:
        case CreateCollectionHeader():
            catalog.check_create_collection(header)
            return header.vchannels
        case DropCollectionHeader():
            catalog.check_drop_collection(header)
        case CreatePartitionHeader():
            catalog.check_create_partition(header)
        case DropPartitionHeader():
            catalog.check_drop_partition(header)
        case _:
            raise InvalidArgument(f"{type(header).__name__} is no header of a DDL message — use that of its type")
    return catalog.collection(header.collection_id).vchannels


def _decide_cut(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    if len(messages) > 1 or messages[0].vchannel != ALL_VCHANNELS:
        raise InvalidArgument("a cut has several messages, or names a vchannel — send one message to all vchannels")
    header = CutHeader(state.cut_number + 1, tuple(sorted(state.segments)))
    return Decision([header], changes=[Change.of(messages[0])._replace(header=header)])


def _decide_create_segments(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    ids = set()
    for message in messages:
        header = message.header
        if not isinstance(header, CreateSegmentHeader):
            raise InvalidArgument("a CREATE_SEGMENT carries another header — give it that of one")
        state.catalog.collection(header.collection_id).partition(header.partition_id)
        if not state.catalog.is_writable(message.vchannel, header.partition_id):
            raise InvalidArgument(
                f"partition {header.partition_id} has no vchannel {message.vchannel!r} — use one of its collection"
            )
        if header.segment_id in state.segments or header.segment_id in ids:
            raise InvalidArgument(f"segment {header.segment_id} exists — allocate a new id")
        ids.add(header.segment_id)
    return _unstamped(messages)


def _decide_flush(state: ShardState, messages: Sequence[MutableMessage]) -> Decision:
    for message in messages:
        if not isinstance(message.header, FlushHeader) or message.header.segment_id not in state.segments:
            raise InvalidArgument(f"{message.header!r} names no growing segment — it is sealed already")
    return _unstamped(messages)


def _unstamped(messages: Sequence[MutableMessage]) -> Decision:
    return Decision([message.header for message in messages], changes=[Change.of(message) for message in messages])
