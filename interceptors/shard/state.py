"""The state of one channel at one position of its log: catalog, growing segments, row offsets, ids,
cuts. Pure.

The state changes only by `apply`, for messages that the live append path just queued, and
`observe`, for messages that recovery and the flusher read. Both use one set of rules, so that all
copies agree at the same position. A repeated message is applied once. `due_seals` decides which
growing segments are sealed before a cut seals them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec

from interceptors.shard.catalog import Catalog, CollectionInfo
from wal.codec import decode_versioned
from wal.entry import PackedRows, RowBatch, Visible
from wal.errors import InvalidArgument
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    CreateSegmentHeader,
    CutHeader,
    DeleteHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    InsertHeader,
    MessageType,
)
from wal.message import Change, TransactionMessage
from wal.timetick import physical_ms


class SegmentStats(msgspec.Struct, array_like=True):
    """Rows and payload bytes of one segment; a `rows_max` of 0 means no limit, and `changed_tick`
    is 0 before the first rows.
    """

    bytes_max: int
    rows_max: int = 0
    rows: int = 0
    bytes: int = 0
    changed_tick: int = 0

    @property
    def reached(self) -> bool:
        """Whether a limit is crossed and the segment takes no more."""
        # The insert that crosses a limit is still taken, so every insert fits in an empty segment.
        return self.bytes > self.bytes_max or 0 < self.rows_max < self.rows


class SegmentKey(NamedTuple):
    """The vchannel and partition whose rows a segment takes."""

    vchannel: str
    collection_id: int
    partition_id: int


class GrowingSegment(msgspec.Struct, array_like=True):
    """A segment that takes rows of one partition of one vchannel until it is sealed; all its rows
    have ticks above `created_tick`.
    """

    segment_id: int
    vchannel: str
    collection_id: int
    partition_id: int
    schema_version: int
    created_tick: int
    stats: SegmentStats


SNAPSHOT_FORMAT = 1


class ShardSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a shard state remembers, in an order that does not depend on its history.

    Fields are named, so a release may add one with a default. A change that older releases would
    misread needs a higher format number.
    """

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


class ShardState:
    """One channel as of `position` and `tick`; readers change nothing.

    A change of an unknown segment or collection is skipped, never fatal: a state that was damaged
    once must not stop every later start.
    """

    def __init__(self) -> None:
        self.position = 0
        self.tick = 0
        self.catalog = Catalog()
        self.next_id = 1
        self.cut_number = 0
        self.cut_tick = 0
        self.changes_since_cut = 0
        self.segments: dict[int, GrowingSegment] = {}
        """The growing segments by id."""
        self._open: dict[tuple[str, int], GrowingSegment] = {}
        """By vchannel and partition: the segment that takes rows; it may be full by now."""
        self.next_offsets: dict[str, int] = {}
        """The row offset that the next row gets, for every live vchannel."""

    @property
    def growing_bytes(self) -> int:
        """Payload bytes in all growing segments."""
        return sum(segment.stats.bytes for segment in self.segments.values())

    def open_segment(self, vchannel: str, partition_id: int) -> GrowingSegment | None:
        """Return the segment that takes the next rows of a partition on a vchannel; None if a new
        one is needed.
        """
        segment = self._open.get((vchannel, partition_id))
        return None if segment is None or segment.stats.reached else segment

    def observe(self, message: Visible) -> None:
        """Apply what readers see: a message, a whole transaction, or the rows of an entry.

        It is idempotent: anything at or below `position` is skipped.
        """
        if message.position <= self.position:
            return
        if isinstance(message, PackedRows):
            self.apply_rows(message.batches, tick=message.time_tick, position=message.position)
            return
        if message.type is MessageType.TIME_TICK:
            return
        assert isinstance(message, TransactionMessage) or not message.txn_id, (
            "bodies are observed with their commit"
        )
        changes = [Change.of(body) for body in message.bodies]
        self.apply(changes, tick=message.time_tick, position=message.position)

    def apply(self, changes: Iterable[Change], *, tick: int, position: int) -> None:
        """Apply stamped changes that are in the log at `tick`, the last of them at `position`."""
        for change in changes:
            self._evolve(change, tick)
        self.tick = tick
        self.position = position

    def apply_rows(self, batches: Iterable[RowBatch], *, tick: int, position: int) -> None:
        """Apply the placed rows of an entry: its last group is at `tick`, its last message at
        `position`.
        """
        for batch in batches:
            if batch.type is MessageType.INSERT:
                end = int(batch.offsets[-1]) + int(batch.counts[-1])
                self._add_rows(
                    batch.vchannel, batch.segment_id, batch.rows, len(batch.payload), end, tick
                )
            else:
                self._delete(batch.rows, batch.vchannel)
        self.tick = tick
        self.position = position

    def forget_below(self, tick: int) -> None:
        """Remove collections and partitions dropped before `tick` and before the last cut.

        Call it once no reader starts below `tick`.
        """
        self.catalog.forget_below(min(tick, self.cut_tick))

    def snapshot(self) -> bytes:
        """Return the state for a checkpoint."""
        snapshot = ShardSnapshot(
            position=self.position,
            tick=self.tick,
            collections=self.catalog.collections(dropped=True),
            segments=tuple(segment for _, segment in sorted(self.segments.items())),
            next_offsets=dict(sorted(self.next_offsets.items())),
            next_id=self.next_id,
            cut_number=self.cut_number,
            cut_tick=self.cut_tick,
            changes_since_cut=self.changes_since_cut,
        )
        return msgspec.msgpack.encode(snapshot)

    @classmethod
    def restore(cls, data: bytes) -> Self:
        """Return the state that `snapshot` saved.

        Raises `UnsupportedFormat` for a newer format, and `Corrupt` for damage.
        """
        saved = decode_versioned(
            data, ShardSnapshot, SNAPSHOT_FORMAT, "the checkpoint's shard state"
        )
        state = cls()
        state.position = saved.position
        state.tick = saved.tick
        state.catalog = Catalog(saved.collections)
        state.next_id = saved.next_id
        state.cut_number = saved.cut_number
        state.cut_tick = saved.cut_tick
        state.changes_since_cut = saved.changes_since_cut
        state.next_offsets = saved.next_offsets
        for segment in saved.segments:  # in the order of their ids: the newest is the open one
            state._add_segment(segment)
        return state

    # --- the rules --------------------------------------------------------------------------------

    def _evolve(self, change: Change, tick: int) -> None:
        match change.header:
            case InsertHeader() as header:
                end = header.first_offset + header.rows
                self._add_rows(
                    change.vchannel, header.segment_id, header.rows, change.payload_bytes, end, tick
                )
            case DeleteHeader() as header:
                self._delete(header.rows, change.vchannel)
            case CreateSegmentHeader() as header:
                self._create_segment(header, change.vchannel, tick)
            case FlushHeader() as header:
                self._seal(header.segment_id)
            case CutHeader() as header:
                self._cut(header, tick)
            case CreateCollectionHeader() as header:
                self._create_collection(header, tick)
            case CreatePartitionHeader() as header:
                self.catalog.create_partition(header, tick)
                self._saw_id(header.partition_id)
            case DropCollectionHeader() as header:
                self._drop_collection(header, tick)
            case DropPartitionHeader() as header:
                self._drop_partition(header, tick)
            case header:
                raise AssertionError(f"{header!r} changes no state of a channel")

    def _add_rows(
        self, vchannel: str, segment_id: int, rows: int, size_bytes: int, end: int, tick: int
    ) -> None:
        """Count rows of one vchannel; their offsets are below `end`, their ticks at most `tick`."""
        next_offset = self.next_offsets.get(vchannel)
        if next_offset is None:
            return
        self.next_offsets[vchannel] = max(next_offset, end)
        self.changes_since_cut += rows
        if (segment := self.segments.get(segment_id)) is not None:
            segment.stats.rows += rows
            segment.stats.bytes += size_bytes
            segment.stats.changed_tick = tick

    def _delete(self, rows: int, vchannel: str) -> None:
        if vchannel in self.next_offsets:
            self.changes_since_cut += rows

    def _create_segment(self, header: CreateSegmentHeader, vchannel: str, tick: int) -> None:
        self._saw_id(header.segment_id)
        if not self.catalog.is_writable(vchannel, header.partition_id):
            return
        stats = SegmentStats(header.bytes_max, header.rows_max)
        segment = GrowingSegment(
            header.segment_id,
            vchannel,
            header.collection_id,
            header.partition_id,
            header.schema_version,
            tick,
            stats,
        )
        self._add_segment(segment)

    def _seal(self, segment_id: int) -> None:
        segment = self.segments.pop(segment_id, None)
        if (
            segment is not None
            and self._open.get((segment.vchannel, segment.partition_id)) is segment
        ):
            del self._open[segment.vchannel, segment.partition_id]

    def _cut(self, header: CutHeader, tick: int) -> None:
        for segment_id in header.segment_ids:
            self._seal(segment_id)
        self.cut_number = header.number
        self.cut_tick = tick
        self.changes_since_cut = 0

    def _create_collection(self, header: CreateCollectionHeader, tick: int) -> None:
        self._saw_id(max(header.collection_id, *(number for number, _ in header.partitions)))
        if self.catalog.create_collection(header, tick):
            self.next_offsets.update(dict.fromkeys(header.vchannels, 0))

    def _drop_collection(self, header: DropCollectionHeader, tick: int) -> None:
        info = self.catalog.drop_collection(header, tick)
        if info is None:  # its message comes once for each vchannel
            return
        self.changes_since_cut += 1
        self._discard_dropped()
        for vchannel in info.vchannels:
            del self.next_offsets[vchannel]

    def _drop_partition(self, header: DropPartitionHeader, tick: int) -> None:
        if self.catalog.drop_partition(header, tick):
            self.changes_since_cut += 1
            self._discard_dropped()

    def _discard_dropped(self) -> None:
        for segment in list(self.segments.values()):
            if not self.catalog.is_writable(segment.vchannel, segment.partition_id):
                self._seal(segment.segment_id)

    def _add_segment(self, segment: GrowingSegment) -> None:
        self.segments[segment.segment_id] = segment
        self._open[segment.vchannel, segment.partition_id] = segment

    def _saw_id(self, number: int) -> None:
        self.next_id = max(self.next_id, number + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """When segments are sealed before a cut seals all of them; every limit is soft.

    A `rows_max` of 0 means no limit. A segment is sealed at the age of `life_s_max`, or after
    `idle_s_max` without new rows if it has at least `idle_bytes_min`. When all growing segments
    together exceed `growing_bytes_high`, the largest are sealed until at most `growing_bytes_low`
    remain.
    """

    bytes_max: int = 128 << 20
    rows_max: int = 0
    life_s_max: float = 86_400
    idle_s_max: float = 600
    idle_bytes_min: int = 16 << 20
    growing_bytes_high: int = 512 << 20
    growing_bytes_low: int = 256 << 20

    def __post_init__(self) -> None:
        if self.growing_bytes_high <= self.growing_bytes_low:
            raise InvalidArgument(
                f"growing_bytes_high ({self.growing_bytes_high}) is not above growing_bytes_low "
                f"({self.growing_bytes_low}) — "
                "raise growing_bytes_high, or lower growing_bytes_low"
            )


def due_seals(
    segments: Iterable[GrowingSegment], limits: SegmentLimits, *, tick: int
) -> list[tuple[GrowingSegment, str]]:
    """Return the segments to be sealed at `tick`, each at most once, with the reason."""
    due: list[tuple[GrowingSegment, str]] = []
    staying: list[GrowingSegment] = []
    for segment in segments:
        reason = _seal_reason(segment, limits, physical_ms(tick))
        if reason is None:
            staying.append(segment)
        else:
            due.append((segment, reason))
    total = sum(segment.stats.bytes for segment in staying)
    if total > limits.growing_bytes_high:
        for segment in sorted(staying, key=lambda each: (-each.stats.bytes, each.segment_id)):
            if total <= limits.growing_bytes_low:
                break
            total -= segment.stats.bytes
            due.append((segment, "growing_bytes_hwm"))
    return due


def _seal_reason(segment: GrowingSegment, limits: SegmentLimits, now_ms: int) -> str | None:
    stats = segment.stats
    if stats.reached:
        return "capacity"
    if not stats.rows:
        return None
    if now_ms - physical_ms(segment.created_tick) >= limits.life_s_max * 1000:
        return "lifetime"
    is_idle = now_ms - physical_ms(stats.changed_tick) >= limits.idle_s_max * 1000
    return "idle" if is_idle and stats.bytes >= limits.idle_bytes_min else None
