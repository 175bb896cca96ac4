"""The live channel: decides and stamps groups in the step of their tick, and keeps the state in step with the log.

Everything is checked before anything is stamped, so a refused group changes nothing, neither itself nor the state. A group
changes the state when it has its place in the log's queue, not before: until then it may still be refused.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from interceptors.shard.catalog import Catalog
from interceptors.shard.state import SegmentKey, SegmentLimits, ShardState
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
from wal.log import AppendGroup
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


def decide(state: ShardState, group: AppendGroup, bodies_of: BodiesOf) -> Decision:
    """Return what becomes of a group. Pure. Raises the typed error of the first message that does not fit."""
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
    return _assign(state, changes, tick=group.time_tick)


def _assign(state: ShardState, changes: Iterable[Change], *, tick: int) -> Decision:
    """Return inserts and deletes at `tick` with their segments and offsets, in their order; the state is not changed.

    Inserts advance their vchannel's next offset; a delete gets the next offset of that moment, so it removes what came
    before it and nothing after.
    """
    stamped: list[Change] = []
    next_offsets: dict[str, int] = {}
    row_offsets: dict[str, tuple[int, int]] = {}
    missing: dict[SegmentKey, None] = {}
    for kind, vchannel, header, payload_bytes in changes:
        offset = next_offsets.get(vchannel)
        if offset is None:
            offset = state.next_offsets[vchannel]
        if not isinstance(header, InsertHeader):
            deleted = msgspec.structs.replace(header, next_offset=offset)
            stamped.append(Change(kind, vchannel, deleted, payload_bytes))
            continue
        next_offsets[vchannel] = offset + header.rows
        segment = state.open_segment(vchannel, header.partition_id)
        if segment is None:
            missing[SegmentKey(vchannel, header.collection_id, header.partition_id)] = None
            continue
        assert segment.created_tick < tick, "a segment is older than the rows in it"
        first, count = row_offsets.get(vchannel, (offset, 0))
        row_offsets[vchannel] = (first, count + header.rows)
        inserted = InsertHeader(
            header.collection_id,
            header.partition_id,
            header.schema_version,
            header.rows,
            segment.segment_id,
            offset,
            header.part,
        )
        stamped.append(Change(kind, vchannel, inserted, payload_bytes))
    return Decision([change.header for change in stamped], stamped, row_offsets, tuple(missing))


def _decide_buffered(state: ShardState, group: AppendGroup) -> Decision:
    begin, *bodies, commit = group.messages
    assert commit.type is MessageType.COMMIT_TXN, "the txn interceptor lets no other shape through"
    changes = [_check_rows(state, body) for body in bodies]
    decision = _decide_commit(state, changes, tick=group.time_tick)
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


class ShardManager:
    """Wraps the state of one channel for the append path. Lives on the event loop; nothing here waits.

    `bodies_of` names the bodies of an open transaction; `draw` returns random numbers from 0 up to 1.
    """

    def __init__(
        self,
        state: ShardState,
        *,
        bodies_of: BodiesOf,
        limits: SegmentLimits | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits or SegmentLimits()
        self._state = state
        self._bodies_of = bodies_of
        self._draw = draw
        self._next_id = 0
        self._pending: tuple[AppendGroup, Sequence[Change]] | None = None
        """The group admitted last: its place is known once the log's end has run, and until then nothing else can run."""

    @property
    def state(self) -> ShardState:
        """The channel as of the last group in the log's queue."""
        self.settle()
        return self._state

    @property
    def catalog(self) -> Catalog:
        """What exists as of the last group in the log's queue."""
        return self.state.catalog

    @property
    def something_to_cut(self) -> bool:
        """Whether rows, deletes or drops came since the last cut."""
        return self.state.changes_since_cut > 0

    def allocate_id(self) -> int:
        """Return an id for a new collection, partition or segment, higher than every one in the log.

        An id that no message carries in the end is used again after a restart, which nobody can tell.
        """
        number = self.next_id
        self._next_id = number + 1
        return number

    @property
    def next_id(self) -> int:
        """The id that `allocate_id` gives out next."""
        return max(self._next_id, self.state.next_id)

    def skip_ids_below(self, next_id: int) -> None:
        """Give out no id below `next_id`: an earlier term of this log gave them to messages that may still come."""
        self._next_id = max(self._next_id, next_id)

    def admit(self, group: AppendGroup) -> tuple[SegmentKey, ...]:
        """Stamp a group and return (), or change nothing and return the segments it needs first.

        Raises the typed error of what does not fit, and changes nothing then.
        """
        headers, changes, row_offsets, missing = decide(self.state, group, self._bodies_of)
        if missing:
            return missing
        for message, header in zip(group.messages, headers, strict=True):
            message.header = header
        group.row_offsets = row_offsets or {}
        if changes is not None:
            self._pending = (group, changes)
        return ()

    def settle(self) -> None:
        """Apply the last admitted group once the log has it; one that the log refused is replaced by the next."""
        if self._pending is None or (ticket := self._pending[0].ticket) is None:
            return
        (group, changes), self._pending = self._pending, None
        position = ticket.first_position + len(group.messages) - 1
        self._state.apply(changes, tick=group.time_tick, position=position)

    def needs_segment(self, key: SegmentKey) -> bool:
        """Whether rows for `key` are welcome and there is no segment to take them."""
        state = self.state
        is_writable = state.catalog.is_writable(key.vchannel, key.partition_id)
        return is_writable and state.open_segment(key.vchannel, key.partition_id) is None

    def new_segment(self, key: SegmentKey) -> MutableMessage:
        """Return a CREATE_SEGMENT message for `key`, with an id of its own each time."""
        header = CreateSegmentHeader(
            collection_id=key.collection_id,
            partition_id=key.partition_id,
            segment_id=self.allocate_id(),
            schema_version=self.catalog.collection(key.collection_id).schema_version,
            bytes_max=self.limits.bytes_max_of_next(self._draw()),
            rows_max=self.limits.rows_max,
        )
        return MutableMessage(MessageType.CREATE_SEGMENT, header, key.vchannel)

    def forget_below(self, tick: int) -> None:
        """Forget what was dropped before `tick` and a cut has named; call once no reader starts below `tick`."""
        self.state.forget_below(tick)
