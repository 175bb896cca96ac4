"""What the log says about one channel, up to one position: catalog, growing segments, row offsets, ids, cuts. Pure.

The state changes only by `apply`, which the live append path feeds with what it just queued, and `observe`, which recovery
and the flusher feed with what they read: one set of rules, so that all copies agree at the same position. A message is
applied once, whoever repeats it. Bodies of a transaction enter at their commit.

What does not fit (a segment or collection unknown here) is counted and skipped, never fatal: a state that was damaged once
must not stop every later start.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Self

import msgspec

from interceptors.shard.catalog import Catalog, CollectionInfo
from wal.errors import Corrupt, UnsupportedFormat
from wal.headers import (
    BodyAssignment,
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
from wal.message import AnyMessage, Change, TransactionMessage

# --- stats ---
#
# How full a growing segment is, against its own limits. Pure.
#
# The limits are soft: the insert that crosses one is taken, and the segment takes no more after it. So no insert is ever
# too large for a segment, and hitting a limit exactly keeps the segment open.


class SegmentStats(msgspec.Struct, array_like=True):
    """Rows and payload bytes of one segment; a `rows_max` of 0 is no limit, `changed_tick` is 0 before the first rows."""

    bytes_max: int
    rows_max: int = 0
    rows: int = 0
    bytes: int = 0
    changed_tick: int = 0

    @property
    def reached(self) -> bool:
        """Whether a limit is crossed and the segment takes no more."""
        return self.bytes > self.bytes_max or 0 < self.rows_max < self.rows

    def add(self, rows: int, size_bytes: int, tick: int) -> Self:
        """Count rows that are in the segment since `tick`."""
        self.rows += rows
        self.bytes += size_bytes
        self.changed_tick = tick
        return self


# --- segment ---
#
# A growing segment: the place where the rows of one partition of one vchannel collect until it is sealed. Pure.


class SegmentKey(NamedTuple):
    """Whose rows a segment takes."""

    vchannel: str
    collection_id: int
    partition_id: int


class GrowingSegment(msgspec.Struct, array_like=True):
    """One growing segment; rows enter it at ticks above `created_tick` only."""

    segment_id: int
    vchannel: str
    collection_id: int
    partition_id: int
    schema_version: int
    created_tick: int
    stats: SegmentStats

    @property
    def key(self) -> SegmentKey:
        """Whose rows the segment takes."""
        return SegmentKey(self.vchannel, self.collection_id, self.partition_id)


def segment_of(header: CreateSegmentHeader, vchannel: str, tick: int) -> GrowingSegment:
    """Return the empty segment that a CREATE_SEGMENT at `tick` opens."""
    return GrowingSegment(
        segment_id=header.segment_id,
        vchannel=vchannel,
        collection_id=header.collection_id,
        partition_id=header.partition_id,
        schema_version=header.schema_version,
        created_tick=tick,
        stats=SegmentStats(header.bytes_max, header.rows_max),
    )


# --- snapshot ---
#
# Bytes of a shard state in a checkpoint: MessagePack with a format number. Pure.
#
# Fields are named, so a release may add one with a default; a change that older releases would read wrongly raises the
# number.


SNAPSHOT_FORMAT = 1


class ShardSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a shard state remembers, in an order that does not depend on its history."""

    format: int = SNAPSHOT_FORMAT
    position: int
    tick: int
    collections: tuple[CollectionInfo, ...]
    segments: tuple[GrowingSegment, ...]
    next_offsets: dict[str, int]
    next_id: int
    cut_number: int
    cut_tick: int
    changes_since_cut: int


class _Format(msgspec.Struct):
    format: int


def encode_snapshot(snapshot: ShardSnapshot) -> bytes:
    """Return the snapshot's bytes; equal states have equal bytes."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes) -> ShardSnapshot:
    """Return the snapshot in `data`. Raises `UnsupportedFormat` for a newer release's, `Corrupt` for anything else."""
    try:
        version = msgspec.msgpack.decode(data, type=_Format).format
        if version != SNAPSHOT_FORMAT:
            raise UnsupportedFormat(
                f"the checkpoint's shard state has format {version}, this release reads {SNAPSHOT_FORMAT} — "
                "open the node with the release that wrote it"
            )
        return msgspec.msgpack.decode(data, type=ShardSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the checkpoint's shard state does not decode: {error}") from error


class ShardState:
    """One channel as of `position` and `tick`; readers take what they need and change nothing."""

    def __init__(self) -> None:
        self.position = 0
        self.tick = 0
        self.catalog = Catalog()
        self.next_id = 1
        self.cut_number = 0
        self.cut_tick = 0
        self.changes_since_cut = 0
        self.skipped = 0
        """Messages that did not fit; anything but 0 means that something was lost before."""
        self._segments: dict[int, GrowingSegment] = {}
        self._open: dict[tuple[str, int], GrowingSegment] = {}
        """By vchannel and partition: the segment that takes rows, or did until it was full."""
        self._next_offsets: dict[str, int] = {}

    # --- reading --------------------------------------------------------------------------------------------------------

    @property
    def segments(self) -> Mapping[int, GrowingSegment]:
        """The growing segments by id."""
        return self._segments

    @property
    def next_offsets(self) -> Mapping[str, int]:
        """The row offset that the next row gets, for every live vchannel."""
        return self._next_offsets

    @property
    def something_to_cut(self) -> bool:
        """Whether rows, deletes or drops came since the last cut."""
        return self.changes_since_cut > 0

    @property
    def growing_bytes(self) -> int:
        """Payload bytes in all growing segments."""
        return sum(segment.stats.bytes for segment in self._segments.values())

    def open_segment(self, vchannel: str, partition_id: int) -> GrowingSegment | None:
        """Return the segment that takes the next rows of a partition on a vchannel, None if one has to be made."""
        segment = self._open.get((vchannel, partition_id))
        return None if segment is None or segment.stats.reached else segment

    # --- changing -------------------------------------------------------------------------------------------------------

    def observe(self, message: AnyMessage) -> None:
        """Apply a message as readers see it: plain, or a whole transaction. Repeating one does nothing."""
        if message.position <= self.position or message.type is MessageType.TIME_TICK:
            return
        if isinstance(message, TransactionMessage):
            changes = [Change.of(body) for body in message.bodies]
        else:
            assert not message.txn_id, "bodies are observed with their commit"
            changes = [Change.of(message)]
        self.apply(changes, tick=message.time_tick, position=message.position)

    def apply(self, changes: Iterable[Change], *, tick: int, position: int) -> None:
        """Apply stamped changes that are in the log at `tick`, the last of them at `position`."""
        for change in changes:
            if not self._evolve(change, tick):
                self.skipped += 1
        self.tick, self.position = tick, position

    def forget_below(self, tick: int) -> None:
        """Forget what was dropped before `tick` and before the last cut; call once no reader starts below `tick`."""
        self.catalog.forget_below(min(tick, self.cut_tick))

    # --- on disk --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the state for a checkpoint."""
        return encode_snapshot(
            ShardSnapshot(
                position=self.position,
                tick=self.tick,
                collections=self.catalog.collections(dropped=True),
                segments=tuple(segment for _, segment in sorted(self._segments.items())),
                next_offsets=dict(sorted(self._next_offsets.items())),
                next_id=self.next_id,
                cut_number=self.cut_number,
                cut_tick=self.cut_tick,
                changes_since_cut=self.changes_since_cut,
            )
        )

    @classmethod
    def restore(cls, data: bytes) -> Self:
        """Return the state that `snapshot` saved. Raises `UnsupportedFormat` for a newer one, `Corrupt` for damage."""
        saved = decode_snapshot(data)
        state = cls()
        state.position, state.tick = saved.position, saved.tick
        state.catalog = Catalog(saved.collections)
        state.next_id = saved.next_id
        state.cut_number, state.cut_tick = saved.cut_number, saved.cut_tick
        state.changes_since_cut = saved.changes_since_cut
        state._next_offsets = saved.next_offsets
        for segment in saved.segments:  # in the order of their ids: the youngest is the open one
            state._add_segment(segment)
        return state

    # --- the rules: False means that the message does not fit -------------------------------------------------------------

    def _evolve(self, change: Change, tick: int) -> bool:
        match change.header:
            case InsertHeader() as header:
                return self._insert(header, change, tick)
            case DeleteHeader() as header:
                return self._delete(header, change)
            case CreateSegmentHeader() as header:
                return self._create_segment(header, change.vchannel, tick)
            case FlushHeader() as header:
                return self._seal(header.segment_id)
            case CutHeader() as header:
                return self._cut(header, tick)
            case _:
                return self._evolve_catalog(change.header, tick)

    def _evolve_catalog(self, header: Header, tick: int) -> bool:
        match header:
            case CreateCollectionHeader():
                self._create_collection(header, tick)
                return True
            case CreatePartitionHeader():
                self.catalog.create_partition(header, tick)
                self._saw_id(header.partition_id)
            case DropCollectionHeader():
                self._drop_collection(header, tick)
            case DropPartitionHeader():
                self._drop_partition(header, tick)
            case _:
                raise AssertionError(f"{header!r} changes nothing that a channel keeps")
        return self.catalog.knows(header.collection_id)

    def _insert(self, header: InsertHeader, change: Change, tick: int) -> bool:
        next_offset = self._next_offsets.get(change.vchannel)
        if next_offset is None:
            return False
        self._next_offsets[change.vchannel] = max(next_offset, header.first_offset + header.rows)
        self.changes_since_cut += header.rows
        segment = self._segments.get(header.segment_id)
        if segment is None:
            return False
        segment.stats.add(header.rows, change.payload_bytes, tick)
        return True

    def _delete(self, header: DeleteHeader, change: Change) -> bool:
        if change.vchannel not in self._next_offsets:
            return False
        self.changes_since_cut += header.rows
        return True

    def _create_segment(self, header: CreateSegmentHeader, vchannel: str, tick: int) -> bool:
        self._saw_id(header.segment_id)
        if not self.catalog.is_writable(vchannel, header.partition_id):
            return False
        self._add_segment(segment_of(header, vchannel, tick))
        return True

    def _seal(self, segment_id: int) -> bool:
        segment = self._segments.pop(segment_id, None)
        if segment is None:
            return False
        if self._open.get((segment.vchannel, segment.partition_id)) is segment:
            del self._open[segment.vchannel, segment.partition_id]
        return True

    def _cut(self, header: CutHeader, tick: int) -> bool:
        sealed = [self._seal(segment_id) for segment_id in header.segment_ids]
        self.cut_number, self.cut_tick = header.number, tick
        self.changes_since_cut = 0
        return all(sealed)

    def _create_collection(self, header: CreateCollectionHeader, tick: int) -> None:
        self._saw_id(max(header.collection_id, *(number for number, _ in header.partitions)))
        if self.catalog.create_collection(header, tick):
            self._next_offsets.update(dict.fromkeys(header.vchannels, 0))

    def _drop_collection(self, header: DropCollectionHeader, tick: int) -> None:
        info = self.catalog.drop_collection(header, tick)
        if info is None:  # its message comes once for each vchannel
            return
        self.changes_since_cut += 1
        self._discard(lambda segment: segment.collection_id == info.id)
        for vchannel in info.vchannels:
            del self._next_offsets[vchannel]

    def _drop_partition(self, header: DropPartitionHeader, tick: int) -> None:
        if self.catalog.drop_partition(header, tick) is not None:
            self.changes_since_cut += 1
            self._discard(lambda segment: segment.partition_id == header.partition_id)

    def _discard(self, is_gone: Callable[[GrowingSegment], bool]) -> None:
        for segment in [segment for segment in self._segments.values() if is_gone(segment)]:
            self._seal(segment.segment_id)

    def _add_segment(self, segment: GrowingSegment) -> None:
        self._segments[segment.segment_id] = segment
        self._open[segment.vchannel, segment.partition_id] = segment

    def _saw_id(self, number: int) -> None:
        self.next_id = max(self.next_id, number + 1)


# --- assignment ---
#
# Which segment and which row offsets rows get, in their order inside one group or transaction. Pure.
#
# Inserts advance their vchannel's next offset; a delete gets the next offset of that moment, so it removes what came before
# it and nothing after. Rows of one partition of one vchannel go to one segment together: they are one allocation.


class Assignment(msgspec.Struct, frozen=True):
    """What rows get: one assignment for each change, offsets by vchannel as (first, count), segments yet to be made."""

    bodies: list[BodyAssignment] = []
    row_offsets: dict[str, tuple[int, int]] = {}
    missing: dict[SegmentKey, None] = {}


def assign(state: ShardState, changes: Iterable[Change], *, tick: int) -> Assignment:
    """Return what inserts and deletes get at `tick`; the state is not changed."""
    assignment = Assignment()
    next_offsets: dict[str, int] = {}
    for change in changes:
        vchannel, header = change.vchannel, change.header
        offset = next_offsets.get(vchannel)
        if offset is None:
            offset = next_offsets[vchannel] = state.next_offsets[vchannel]
        if isinstance(header, InsertHeader):
            next_offsets[vchannel] = offset + header.rows
            _assign_rows(state, assignment, vchannel, header, offset=offset, tick=tick)
        else:
            assignment.bodies.append(BodyAssignment(0, offset))
    return assignment


def stamp(change: Change, assigned: BodyAssignment) -> Change:
    """Return the change with what it was assigned in its header."""
    kind, vchannel, header, payload_bytes = change
    if isinstance(header, InsertHeader):
        return Change(kind, vchannel, _stamp_insert(header, assigned), payload_bytes)
    assert isinstance(header, DeleteHeader), "only inserts and deletes are assigned anything"
    return Change(kind, vchannel, msgspec.structs.replace(header, next_offset=assigned.offset), payload_bytes)


def _stamp_insert(header: InsertHeader, assigned: BodyAssignment) -> InsertHeader:
    return InsertHeader(
        header.collection_id,
        header.partition_id,
        header.schema_version,
        header.rows,
        assigned.segment_id,
        assigned.offset,
        header.part,
    )


def _assign_rows(
    state: ShardState, assignment: Assignment, vchannel: str, header: InsertHeader, *, offset: int, tick: int
) -> None:
    segment = state.open_segment(vchannel, header.partition_id)
    if segment is None:
        assignment.missing[SegmentKey(vchannel, header.collection_id, header.partition_id)] = None
        return
    assert segment.created_tick < tick, "a segment is older than the rows in it"
    first, count = assignment.row_offsets.get(vchannel, (offset, 0))
    assignment.row_offsets[vchannel] = (first, count + header.rows)
    assignment.bodies.append(BodyAssignment(segment.segment_id, offset))
