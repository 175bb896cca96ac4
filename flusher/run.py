"""One run of the flusher: from its checkpoint through the log, until it is cancelled or fails.

It writes the rows that a scanner over the whole pchannel delivers into files, and makes a cut at
each cut message.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import msgspec
import pyarrow as pa
from anyio import CapacityLimiter
from anyio.abc import TaskGroup

from flusher.cuts import build_manifest, check_same_cut, publish_cut
from flusher.data_file import FileInProgress, Rows
from flusher.directory import Cut, NodeDirectory
from flusher.manifest import (
    Checkpoint,
    CutPosition,
    DeleteFile,
    SegmentFile,
    arrow_schema,
    checkpoint_key,
    delete_path,
    extend_history,
    segment_path,
)
from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import Catalog, CollectionInfo
from scanner.scanner import Scanner
from wal.entry import Visible, row_batches
from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.headers import (
    CutHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    FlushHeader,
    MessageType,
)
from wal.live_tail import LiveTail
from wal.log import Log, LogStore
from wal.message import Message
from wal.runtime import in_thread

STEPS_OF_A_FILE = 2
"""Tasks per file: one row group is decoded while the previous one is written."""
MESSAGES_PER_STEP = 256
"""Messages between two checks of memory and switches to other tasks; about 1 ms of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutScheduleOptions:
    """A cut every `interval_s` seconds (None: no cuts by time), and when `bytes_max` bytes of rows
    are unflushed.
    """

    interval_s: float | None = 10.0
    bytes_max: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How long log and cuts are kept at least, and the interval between two checks; in seconds.

    `min_age_s` is the least age of log and cuts. `min_age_short_s` replaces it for the log, but not
    for cuts, while the disk is short of space: log that is also in files then gives way to new
    appends. `taken_cuts_s`, where it is shorter, replaces it for a cut whose collections all have
    tables that have taken the cut.
    """

    min_age_s: float = 86_400.0
    taken_cuts_s: float = 3_600.0
    min_age_short_s: float = 0.0
    interval_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """Memory, threads and retries of the flusher.

    A file gets a row group when its encoded rows reach `row_group_bytes`; row groups twice as large
    were measured to take 50 % more processor time, in page faults. When all rows in memory reach
    `buffered_bytes_max`, the largest files are written first and reading waits. `threads` files are
    written at a time. After a few messages the flusher waits `gather_s` for more, unless a caller
    waits for a cut: single appends would otherwise each wake it on their shared event loop. After a
    failure it pauses for `retry_first_s`, and doubles the pause up to `retry_max_s`. With
    `group_may_read` the group of the node's process can read segments, deletes and cuts, for a
    Spark that runs as another user.
    """

    row_group_bytes: int = 32 << 20
    buffered_bytes_max: int = 256 << 20
    threads: int = 2
    gather_s: float = 0.02
    retry_first_s: float = 0.5
    retry_max_s: float = 30.0
    group_may_read: bool = False
    retention: RetentionOptions = field(default_factory=RetentionOptions)
    schedule: CutScheduleOptions = field(default_factory=CutScheduleOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushContext:
    """What a flusher and all its runs work with; the callables are the rest of the node.

    `now_ms` is the clock that ticks follow; `elapsed_ms` is a monotonic clock, in milliseconds from
    an arbitrary start. `reader_floor` returns the lowest position of the log that a named reader
    needs, None without one. `on_kept_tick` is called after each round of retention with a tick at
    or below which cuts are published and no reader starts any more. `save_producers` returns the
    producer state to store in the checkpoint of a cut at a tick; it is called once readers have
    everything up to that tick. `log_is_back` returns once the log takes writes, and raises what
    appends raise when that takes too long. `next_id` returns an id above those of all segments in
    the log so far. `cut_made` is called with each cut whose checkpoint is durable, and the seconds
    since its message was read.
    """

    directory: NodeDirectory
    store: LogStore
    log: Log
    tail: LiveTail | None
    options: FlushOptions
    now_ms: Callable[[], int]
    elapsed_ms: Callable[[], int]
    reader_floor: Callable[[], int | None]
    on_kept_tick: Callable[[int], None]
    save_producers: Callable[[int], Awaitable[bytes | None]]
    log_is_back: Callable[[], Awaitable[object]]
    next_id: Callable[[], int]
    cut_made: Callable[[Cut, float], None] | None = None


class OpenCut:
    """Everything since the last cut: assigns each row to a file, until a cut message closes it.

    Since a cut seals every growing segment, no file spans two cuts. `number` is the future number
    of the cut.
    """

    def __init__(
        self, number: int, catalog: Catalog, start_file: Callable[..., FileInProgress]
    ) -> None:
        self.number = number
        self.first_tick = 0
        """About the tick of its first row; 0 without rows."""
        self.files: dict[int | str, FileInProgress] = {}
        """Row files by segment id, delete files by vchannel; each has rows."""
        self._catalog = catalog
        self._start_file = start_file

    def insert(self, rows: Rows) -> None:
        """Add rows. Raises `Corrupt` when their collection or schema version does not exist."""
        batch = rows.batch
        if batch.segment_id not in self.files:
            info = self._collection(batch.collection_id)
            if info.schema_version != batch.schema_version:
                raise Corrupt(
                    f"rows of {info.name} have schema version {batch.schema_version}, which does "
                    "not exist"
                )
            place = {
                "collection_id": info.id,
                "vchannel": batch.vchannel,
                "partition_id": batch.partition_id,
            }
            place |= {
                "path": segment_path(info.id, batch.segment_id),
                "segment_id": batch.segment_id,
            }
            file = self._start_file(
                SegmentFile, place, schema=arrow_schema(info), key=info.primary_key
            )
            self.files[batch.segment_id] = file
        self.files[batch.segment_id].add(rows)

    def delete(self, rows: Rows) -> None:
        """Add deleted keys, of rows in this cut or in others: readers of the cut apply deletes by
        offset.
        """
        vchannel = rows.batch.vchannel
        if vchannel not in self.files:
            info = self._collection(rows.batch.collection_id)
            path = delete_path(info.id, self.number, vchannel)
            place = {"path": path, "collection_id": info.id, "vchannel": vchannel}
            schema = pa.schema([arrow_schema(info).field(info.primary_key)])
            self.files[vchannel] = self._start_file(
                DeleteFile, place, schema=schema, key=info.primary_key
            )
        self.files[vchannel].add(rows)

    async def drop(self, **of: int) -> None:
        """Discard the files whose `place` has these values: of a collection, of a partition, or all
        files without values.
        """
        for key in [key for key, file in self.files.items() if of.items() <= file.place.items()]:
            await self.files.pop(key).discard()

    @property
    def held_bytes(self) -> int:
        """Encoded size of all rows that are in memory."""
        return sum(file.held_bytes for file in self.files.values())

    @property
    def taken_bytes(self) -> int:
        """Encoded size of all rows added so far."""
        return sum(file.taken_bytes for file in self.files.values())

    def _collection(self, collection_id: int) -> CollectionInfo:
        try:
            return self._catalog.collection(collection_id)
        except CollectionNotFound as error:
            raise Corrupt(
                f"the log has rows of collection {collection_id}, which was never created"
            ) from error


class FlushRun:
    """Reads the log, buffers and writes rows, and makes cuts, starting at `checkpoint`.

    `ahead` is a cut on disk that the checkpoint does not have yet: the run adopts it, and counts
    the rows up to it instead of writing them. `report` is called with the number of the open cut
    and its unflushed bytes; `on_cut` with each cut whose checkpoint is durable.
    """

    def __init__(
        self,
        context: FlushContext,
        checkpoint: Checkpoint,
        ahead: Cut | None,
        *,
        report: Callable[[int, int], None],
        on_cut: Callable[[Checkpoint, Cut], None],
    ) -> None:
        self.state = checkpoint.state()
        self._context = context
        self._report = report
        self._checkpoint = checkpoint
        self._ahead = ahead
        self._on_cut = on_cut
        self._start_file = partial(
            FileInProgress,
            context.directory,
            node_id=context.store.node_id,
            row_group_bytes=context.options.row_group_bytes,
            limiter=CapacityLimiter(context.options.threads),
        )
        self._awaited = asyncio.Event()
        self.open_cut = OpenCut(checkpoint.cut_number + 1, self.state.catalog, self._start_file)

    async def follow(self, scanner: Scanner) -> None:
        """Process the scanner's batches until that fails or is cancelled; then discard the files in
        progress.
        """
        try:
            async with anyio.create_task_group() as writers:
                while True:
                    batch = await scanner.next_batch()
                    for start in range(0, len(batch.visible), MESSAGES_PER_STEP):
                        for visible in batch.visible[start : start + MESSAGES_PER_STEP]:
                            await self._take_in(visible, writers)
                        await self._make_room(writers)
                        if len(batch.visible) > MESSAGES_PER_STEP:
                            await anyio.lowlevel.checkpoint()
                    if 0 < sum([each.count for each in batch.visible]) < MESSAGES_PER_STEP:
                        # Wait for more messages: single appends share the event loop with this
                        # task.
                        with anyio.move_on_after(self._context.options.gather_s):
                            await self._awaited.wait()
        finally:
            with anyio.CancelScope(shield=True):
                # They stay in `open_cut`: the statistics and `StorageFull` count their bytes.
                for file in self.open_cut.files.values():
                    await file.discard()

    def stop_gathering(self) -> None:
        """Process messages without waiting for more, until the next cut: a caller waits for it."""
        self._awaited.set()

    async def _take_in(self, visible: Visible, writers: TaskGroup) -> None:
        self.state.observe(visible)
        for batch, ticks in row_batches(visible):
            take_in = (
                self.open_cut.insert if batch.type is MessageType.INSERT else self.open_cut.delete
            )
            take_in(Rows.of(batch, ticks))
            self.open_cut.first_tick = self.open_cut.first_tick or visible.time_tick
        if isinstance(visible, Message):
            await self._take_in_one(visible, writers)

    async def _take_in_one(self, message: Message, writers: TaskGroup) -> None:
        match message.header:
            case FlushHeader(segment_id=segment_id):
                file = self.open_cut.files.get(segment_id)
                if file is not None and self._ahead is None and not file.at_work:
                    self._start(file, file.finish, writers)
            case DropCollectionHeader(collection_id=collection_id):
                await self.open_cut.drop(collection_id=collection_id)
            case DropPartitionHeader(collection_id=collection_id, partition_id=partition_id):
                await self.open_cut.drop(collection_id=collection_id, partition_id=partition_id)
            case CutHeader() as header:
                await self._cut(message, header)
            case _:
                pass  # the other types only change the shard state

    async def _make_room(self, writers: TaskGroup) -> None:
        cut = self.open_cut
        options = self._context.options
        failpoint("flush.rows_taken")
        self._report(cut.number, cut.taken_bytes)
        for file in cut.files.values():
            if self._ahead is not None:
                file.take()  # counted only: the rows are on disk already
            elif file.pending_bytes >= options.row_group_bytes and file.at_work < STEPS_OF_A_FILE:
                self._start(file, file.spill, writers)
        while cut.held_bytes > options.buffered_bytes_max:
            await max(cut.files.values(), key=lambda file: file.held_bytes).spill()

    def _start(
        self, file: FileInProgress, work: Callable[[], Awaitable[object]], writers: TaskGroup
    ) -> None:
        async def run() -> None:
            try:
                await work()
            finally:
                file.at_work -= 1

        file.at_work += 1
        writers.start_soon(run)

    async def _cut(self, message: Message, header: CutHeader) -> None:
        cut = self.open_cut
        tick = message.time_tick
        begun_ms = self._context.elapsed_ms()
        failpoint("flush.cut_met")
        if header.number != cut.number:
            raise Corrupt(f"the log has cut {header.number} where {cut.number} must follow")
        if self._ahead is None:
            published = await self._write(tick)
        else:
            published = self._ahead
            self._ahead = None
            rows = {file.place["path"]: file.rows for file in cut.files.values()}
            check_same_cut(published.manifest, self._checkpoint, tick, rows)
            failpoint("recovery.cut_adopted")
        failpoint("flush.cut_published")
        await self._advance(message, published)
        if self._context.cut_made is not None:
            self._context.cut_made(published, (self._context.elapsed_ms() - begun_ms) / 1000)

    async def _write(self, tick: int) -> Cut:
        context = self._context
        files = list(self.open_cut.files.values())
        async with anyio.create_task_group() as finishing:
            for file in files:
                finishing.start_soon(file.finish)
        described = [file.described for file in files if file.described is not None]
        manifest = build_manifest(
            self._checkpoint,
            tick,
            described,
            self.state,
            node_id=context.store.node_id,
            created_ms=context.now_ms(),
        )
        return await in_thread(publish_cut, context.directory, manifest)

    async def _advance(self, message: Message, published: Cut) -> None:
        context = self._context
        manifest = published.manifest
        step = CutPosition(manifest.tick, message.last_confirmed_position, manifest.created_ms)
        min_age_ms = int(context.options.retention.min_age_s * 1000)
        checkpoint = Checkpoint(
            cut_number=manifest.number,
            tick=step.tick,
            position=step.position,
            manifest_crc32c=published.crc32c,
            history=extend_history(
                self._checkpoint.history, step, now_ms=context.now_ms(), retention_ms=min_age_ms
            ),
            shard_state=self.state.snapshot(),
            producers=await context.save_producers(manifest.tick),
        )
        await context.store.state.put(
            {checkpoint_key(context.log.name): msgspec.msgpack.encode(checkpoint)}
        )
        failpoint("flush.checkpoint_saved")
        self._checkpoint = checkpoint
        self.open_cut = OpenCut(manifest.number + 1, self.state.catalog, self._start_file)
        self._awaited = asyncio.Event()
        self._on_cut(checkpoint, published)
