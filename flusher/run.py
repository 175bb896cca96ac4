"""One run of the flusher: from its checkpoint through the log, until it is cancelled or something fails.

In: batches of a scanner over the whole pchannel. Out: files, and one `CutDone` for each cut. A run that fails is thrown away
with all it has in memory, exactly as a crash would; the next one starts from the last checkpoint. `flusher.flusher` decides
when.

A run that starts behind a cut that is already on disk adopts it: rows up to that cut are counted instead of written.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import anyio
import pyarrow as pa
from anyio import CapacityLimiter, to_thread
from anyio.abc import TaskGroup

from flusher.checkpoint import Checkpoint, CutPosition, checkpoint_key, encode_checkpoint, extend_history
from flusher.cut_log import Cut, CutLog
from flusher.cuts import CutPoint, CutResult, build_manifest, check_same_cut, cut_result, publish_cut
from flusher.data_file import DeleteBuffer, FileInProgress, RowBuffer, SegmentBuffer
from flusher.manifest import arrow_schema
from flusher.retention import RetentionOptions
from flusher.rows import Rows
from flusher.triggers import CutScheduleOptions
from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import Catalog, CollectionInfo
from interceptors.shard.state import ShardState
from scanner.scanner import Scanner
from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.headers import CutHeader, DeleteHeader, DropCollectionHeader, DropPartitionHeader, FlushHeader, InsertHeader
from wal.log import LogStore
from wal.message import AnyMessage, Message, TransactionMessage

# --- open cut ---
#
# Everything since the last cut: which row goes to which file, until a cut message closes it. No I/O of its own.
#
# In: messages in tick order. Out: for the cut writer, the files of all segments that got rows and of all vchannels that got
# deletes. Since a cut seals every growing segment, no file ever spans two cuts.


StartFile = Callable[[RowBuffer], FileInProgress]


class OpenCut:
    """The files of the next cut; `number` is the number it will have."""

    def __init__(self, number: int, catalog: Catalog, start_file: StartFile) -> None:
        self.number = number
        self.segments: dict[int, FileInProgress] = {}
        self.deletes: dict[str, FileInProgress] = {}
        self._catalog = catalog
        self._start_file = start_file
        self._schemas: dict[int, pa.Schema] = {}

    def insert(self, message: Message, header: InsertHeader) -> None:
        """Take in the rows of one insert. Raises `Corrupt` when no collection has them."""
        file = self.segments.get(header.segment_id)
        if file is None:
            file = self.segments[header.segment_id] = self._start_file(self._segment_buffer(message, header))
        file.buffer.add(Rows(message.payload, header.rows, message.time_tick, header.first_offset))

    def delete(self, message: Message, header: DeleteHeader) -> None:
        """Take in the keys of one delete. Raises `Corrupt` when no collection has them."""
        file = self.deletes.get(message.vchannel)
        if file is None:
            file = self.deletes[message.vchannel] = self._start_file(self._delete_buffer(message, header))
        file.buffer.add(Rows(message.payload, header.rows, message.time_tick, header.next_offset))

    def drop_collection(self, collection_id: int) -> list[FileInProgress]:
        """Forget a collection; the caller discards the files returned."""
        return self._forget(lambda buffer: buffer.collection_id == collection_id)

    def drop_partition(self, collection_id: int, partition_id: int) -> list[FileInProgress]:
        """Forget the segments of a partition; the caller discards the files returned. Deletes know no partition."""
        return self._forget(
            lambda buffer: (
                isinstance(buffer, SegmentBuffer)
                and (buffer.collection_id, buffer.partition_id) == (collection_id, partition_id)
            )
        )

    def files(self) -> Iterator[FileInProgress]:
        """Yield every file that has rows."""
        yield from (file for file in (*self.segments.values(), *self.deletes.values()) if file.buffer.rows)

    @property
    def held_bytes(self) -> int:
        """Encoded size of all rows that are in memory."""
        return sum(file.held_bytes for file in self.files())

    @property
    def taken_bytes(self) -> int:
        """Encoded size of all rows taken in so far."""
        return sum(file.buffer.taken_bytes for file in self.files())

    @property
    def rows(self) -> int:
        """Rows and deletes taken in so far."""
        return sum(file.buffer.rows for file in self.files())

    def _segment_buffer(self, message: Message, header: InsertHeader) -> SegmentBuffer:
        info = self._collection(header.collection_id)
        if info.schema_version != header.schema_version:
            raise Corrupt(f"rows of {info.name} have schema version {header.schema_version}, which it never had")
        return SegmentBuffer(
            segment_id=header.segment_id,
            partition_id=header.partition_id,
            collection_id=header.collection_id,
            vchannel=message.vchannel,
            schema=self._schema(info),
            key=info.primary_key,
        )

    def _delete_buffer(self, message: Message, header: DeleteHeader) -> DeleteBuffer:
        info = self._collection(header.collection_id)
        return DeleteBuffer(
            cut_number=self.number,
            collection_id=header.collection_id,
            vchannel=message.vchannel,
            schema=pa.schema([self._schema(info).field(info.primary_key)]),
            key=info.primary_key,
        )

    def _collection(self, collection_id: int) -> CollectionInfo:
        try:
            return self._catalog.collection(collection_id)
        except CollectionNotFound as error:
            raise Corrupt(f"the log has rows of collection {collection_id}, which was never created") from error

    def _schema(self, info: CollectionInfo) -> pa.Schema:
        if info.id not in self._schemas:
            self._schemas[info.id] = arrow_schema(info)
        return self._schemas[info.id]

    def _forget(self, unwanted: Callable[[RowBuffer], bool]) -> list[FileInProgress]:
        gone = [file for file in (*self.segments.values(), *self.deletes.values()) if unwanted(file.buffer)]
        self.segments = {key: file for key, file in self.segments.items() if file not in gone}
        self.deletes = {key: file for key, file in self.deletes.items() if file not in gone}
        return gone


# --- flush options ---
#
# Limits of the flusher, all with a default that fits a laptop.


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushOptions:
    """Memory and threads of the flusher, and what it does when the disk fails.

    A file gets a row group when its encoded rows reach `row_group_bytes` (twice as large ones were measured to take half as
    much processor time again, in page faults); when all rows in memory reach `buffered_bytes_max`, the largest are written
    first and reading waits. `threads` files are written at a time. After a few messages it waits `gather_s` for more, unless
    somebody waits for a cut: appends that come one by one would otherwise each wake it on the event loop they share.
    `group_may_read` opens segments, deletes and cuts to the group of the node's process, for a Spark of another user.
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


STEPS_OF_A_FILE = 2
"""One row group of a file is decoded while the one before it is written."""
MESSAGES_PER_STEP = 256
"""Between two looks at memory and the event loop's other work; about 1 ms of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushContext:
    """What every run of one flusher works with; `on_cut` is called when a cut's checkpoint is durable.

    `save_producers` returns what the checkpoint of a cut at a tick has to know of producers.
    """

    cuts: CutLog
    store: LogStore
    pchannel: str
    options: FlushOptions
    now_ms: Callable[[], int]
    on_cut: Callable[[Checkpoint, CutResult], None]
    on_progress: Callable[[int, int], None]
    kept_tick: Callable[[], int]
    save_producers: Callable[[int], Awaitable[bytes | None]]


class FlushRun:
    """Reads, buffers, writes and cuts from `checkpoint` on; `ahead` is a cut on disk that the checkpoint does not know."""

    def __init__(self, context: FlushContext, checkpoint: Checkpoint, ahead: Cut | None) -> None:
        stored = checkpoint.shard_state
        self.state = ShardState() if stored is None else ShardState.restore(stored)
        self._context = context
        self._checkpoint = checkpoint
        self._ahead = ahead
        self._limiter = CapacityLimiter(context.options.threads)
        self._hurry = anyio.Event()
        self.open_cut = self._new_cut(checkpoint.cut_number + 1)

    async def follow(self, scanner: Scanner) -> None:
        """Work through the scanner's batches for ever.

        Raises an exception group of `OSError`s, or of what the scanner or the log store raised; files in progress are
        gone then, and when cancelled.
        """
        try:
            async with anyio.create_task_group() as writers:
                while True:
                    batch = await scanner.next_batch()
                    for start in range(0, len(batch.messages), MESSAGES_PER_STEP):
                        for message in batch.messages[start : start + MESSAGES_PER_STEP]:
                            await self._take_in(message, writers)
                        await self._make_room(writers)
                        if len(batch.messages) > MESSAGES_PER_STEP:
                            await anyio.lowlevel.checkpoint()
                    if 0 < len(batch.messages) < MESSAGES_PER_STEP:
                        await self._gather()
        finally:
            with anyio.CancelScope(shield=True):
                await self._discard([*self.open_cut.segments.values(), *self.open_cut.deletes.values()])

    def hurry(self) -> None:
        """Stop gathering until the next cut: somebody waits for it."""
        self._hurry.set()

    async def _take_in(self, message: AnyMessage, writers: TaskGroup) -> None:
        self.state.observe(message)
        if isinstance(message, TransactionMessage):
            for body in message.bodies:
                await self._take_in_one(body, writers)
        else:
            await self._take_in_one(message, writers)

    async def _take_in_one(self, message: Message, writers: TaskGroup) -> None:
        match message.header:
            case InsertHeader() as header:
                self.open_cut.insert(message, header)
            case DeleteHeader() as header:
                self.open_cut.delete(message, header)
            case FlushHeader(segment_id=segment_id):
                self._seal(segment_id, writers)
            case DropCollectionHeader(collection_id=collection_id):
                await self._discard(self.open_cut.drop_collection(collection_id))
            case DropPartitionHeader(collection_id=collection_id, partition_id=partition_id):
                await self._discard(self.open_cut.drop_partition(collection_id, partition_id))
            case CutHeader() as header:
                await self._cut(message, header)
            case _:
                pass  # what only changes the shard state

    # --- memory -----------------------------------------------------------------------------------------------------------

    async def _make_room(self, writers: TaskGroup) -> None:
        cut, options = self.open_cut, self._context.options
        failpoint("flush.rows_taken")
        self._context.on_progress(cut.number, cut.taken_bytes)
        if self._ahead is not None:
            for file in cut.files():
                file.buffer.take()  # counted, and already on disk
        for file in cut.files():
            if file.buffer.pending_bytes >= options.row_group_bytes and file.at_work < STEPS_OF_A_FILE:
                self._start(file, file.spill, writers)
        while cut.held_bytes > options.buffered_bytes_max:
            await max(cut.files(), key=lambda file: file.held_bytes).spill()

    async def _gather(self) -> None:
        """Let more messages come before the next look: appends that come one by one share the event loop with this."""
        with anyio.move_on_after(self._context.options.gather_s):
            await self._hurry.wait()

    def _seal(self, segment_id: int, writers: TaskGroup) -> None:
        file = self.open_cut.segments.get(segment_id)
        if file is not None and file.buffer.rows and self._ahead is None and not file.at_work:
            self._start(file, file.finish, writers)

    def _start(self, file: FileInProgress, work: Callable[[], Awaitable[object]], writers: TaskGroup) -> None:
        async def run() -> None:
            try:
                await work()
            finally:
                file.at_work -= 1

        file.at_work += 1
        writers.start_soon(run)

    async def _discard(self, files: list[FileInProgress]) -> None:
        for file in files:
            await file.discard()

    # --- cuts -------------------------------------------------------------------------------------------------------------

    async def _cut(self, message: Message, header: CutHeader) -> None:
        cut = self.open_cut
        failpoint("flush.cut_met")
        if header.number != cut.number:
            raise Corrupt(f"the log has cut {header.number} where {cut.number} must follow")
        point = CutPoint(
            number=cut.number,
            tick=message.time_tick,
            previous_tick=self._checkpoint.tick,
            previous_crc32c=self._checkpoint.manifest_crc32c,
        )
        if self._ahead is None:
            published = await self._write(point)
        else:
            published, self._ahead = self._ahead, None
            check_same_cut(published.manifest, point, {file.path: file.buffer.rows for file in cut.files()})
            failpoint("recovery.cut_adopted")
        failpoint("flush.cut_published")
        await self._advance(message, published)

    async def _write(self, point: CutPoint) -> Cut:
        context, files = self._context, list(self.open_cut.files())
        async with anyio.create_task_group() as finishing:
            for file in files:
                finishing.start_soon(file.finish)
        manifest = build_manifest(
            point,
            [file.described for file in files if file.described is not None],
            self.state,
            node_id=context.store.node_id,
            created_ms=context.now_ms(),
        )
        renames = [(file.temporary_path, file.path) for file in files]
        return await to_thread.run_sync(publish_cut, context.cuts.directory, manifest, renames)

    async def _advance(self, message: Message, published: Cut) -> None:
        context, manifest = self._context, published.manifest
        self.state.forget_below(context.kept_tick())
        step = CutPosition(manifest.tick, message.last_confirmed_position, manifest.created_ms)
        checkpoint = Checkpoint(
            cut_number=manifest.number,
            tick=step.tick,
            position=step.position,
            manifest_crc32c=published.crc32c,
            history=extend_history(
                self._checkpoint.history,
                step,
                now_ms=context.now_ms(),
                retention_ms=context.options.retention.min_age_ms,
            ),
            shard_state=self.state.snapshot(),
            producers=await context.save_producers(manifest.tick),
        )
        await context.store.put_meta({checkpoint_key(context.pchannel): encode_checkpoint(checkpoint)})
        failpoint("flush.checkpoint_saved")
        context.cuts.append(published)
        self._checkpoint = checkpoint
        self.open_cut = self._new_cut(manifest.number + 1)
        self._hurry = anyio.Event()
        context.on_cut(checkpoint, cut_result(published))

    def _new_cut(self, number: int) -> OpenCut:
        return OpenCut(number, self.state.catalog, self._start_file)

    def _start_file(self, buffer: RowBuffer) -> FileInProgress:
        context = self._context
        return FileInProgress(
            buffer,
            context.cuts.directory,
            node_id=context.store.node_id,
            row_group_bytes=context.options.row_group_bytes,
            limiter=self._limiter,
        )
