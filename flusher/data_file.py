"""A buffer and the file its rows go to, joined by worker threads.

Rows take two steps, each a thread's: decoded, then written. One thread at a time works at each, and rows pass from the first
to the second in order, so the next row group is decoded while the last is written. Different files are worked on side by
side, in as many threads as the limiter has tokens. After an `OSError` the file is of no use: the flusher gives up everything
since its checkpoint and reads it again, which is also what a crash makes it do.
"""

import errno
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import anyio
import msgspec
import pyarrow as pa
from anyio import CapacityLimiter, Lock, to_thread

from flusher.directory import NodeDirectory
from flusher.manifest import DeleteFile, SegmentFile, delete_path, segment_path
from flusher.parquet import ParquetFile, WrittenFile
from flusher.rows import OffsetRule, Rows, decode_rows, split_rows

# --- row buffer ---
#
# Rows on their way to one file: what segment buffers and delete buffers have in common. No I/O, no decoding.
#
# In: messages in tick order. Out: the same, still encoded, whenever a worker thread takes them. A buffer knows everything
# about its file but the bytes: its path, its columns, and how the manifest describes it.


class RowBuffer(ABC):
    """Encoded rows of one file, in order; lives on the event loop, only what `take` returned leaves it."""

    rule: OffsetRule

    def __init__(self, *, collection_id: int, vchannel: str, schema: pa.Schema, key: str) -> None:
        self.collection_id = collection_id
        self.vchannel = vchannel
        self.schema = schema
        self.key = key
        self.rows = 0
        """Rows ever added."""
        self.taken_bytes = 0
        """Encoded size of the rows ever added."""
        self.pending_bytes = 0
        """Encoded size of the rows not taken yet."""
        self._pending: list[Rows] = []

    @property
    @abstractmethod
    def path(self) -> str:
        """Path of the file, relative to the node directory."""

    @abstractmethod
    def describe(self, written: WrittenFile) -> SegmentFile | DeleteFile:
        """Return what the manifest says about the finished file."""

    def add(self, rows: Rows) -> None:
        """Append the rows of one message."""
        if rows.count:
            self._pending.append(rows)
            self.rows += rows.count
            self.taken_bytes += len(rows.payload)
            self.pending_bytes += len(rows.payload)

    def take(self, bytes_max: int | None = None) -> Sequence[Rows]:
        """Return the oldest rows not taken yet, and forget them: whole messages of up to `bytes_max`, one at least."""
        if bytes_max is None or self.pending_bytes <= bytes_max:
            taken, self._pending, self.pending_bytes = self._pending, [], 0
            return taken
        oldest = next(split_rows(self._pending, bytes_max))
        del self._pending[: len(oldest)]
        self.pending_bytes -= sum(len(message.payload) for message in oldest)
        return oldest

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file's footer says about where it belongs."""
        return {"streamingnode.collection_id": str(self.collection_id)}


class FileInProgress:
    """One file between its first row and its cut; lives on the event loop, works in threads of `limiter`."""

    def __init__(
        self,
        buffer: RowBuffer,
        directory: NodeDirectory,
        *,
        node_id: str,
        row_group_bytes: int,
        limiter: CapacityLimiter,
    ) -> None:
        self.buffer = buffer
        self.writing_bytes = 0
        """Encoded size of the rows that threads are working on."""
        self.at_work = 0
        """How many tasks spill or finish the file; kept by who starts them."""
        self._limiter = limiter
        self._row_group_bytes = row_group_bytes
        self._decoding, self._writing = Lock(), Lock()
        metadata = {**buffer.metadata, "streamingnode.node_id": node_id}
        self._file = ParquetFile(directory, buffer.path, buffer.schema, key=buffer.key, metadata=metadata)
        self._discarded = False
        self._broken = False
        """Rows were taken from the buffer and did not get into the file: it is never finished without them."""
        self.described: SegmentFile | DeleteFile | None = None
        """What the manifest says about the file, once it is finished."""

    @property
    def held_bytes(self) -> int:
        """Encoded size of the rows that are in memory."""
        return self.buffer.pending_bytes + self.writing_bytes

    @property
    def temporary_path(self) -> str:
        """Where the file is until it is published."""
        return self._file.temporary_path

    @property
    def path(self) -> str:
        """Where the file will be."""
        return self._file.path

    async def spill(self) -> None:
        """Write the oldest pending rows as a row group, and let go of their memory. Raises `OSError`, `Corrupt`.

        Without any, returns when those under way are written.
        """
        await self._pass_on(last=False)

    async def finish(self) -> None:
        """Write what is pending and the footer, and sync; the file has at least one row. Raises as `spill` does.

        Nothing happens to a file that is finished or discarded: a drop may overtake the seal of a segment.
        """
        while self.buffer.pending_bytes > self._row_group_bytes:
            await self.spill()
        await self._pass_on(last=True)

    async def discard(self) -> None:
        """Close and remove the file, and forget its rows; a clean-up, so it is not cancelled half way."""
        self._discarded = True
        self.buffer.take()
        with anyio.CancelScope(shield=True):
            async with self._decoding, self._writing:
                await to_thread.run_sync(self._file.discard, limiter=self._limiter)

    async def _pass_on(self, *, last: bool) -> None:
        """Take rows through both steps: a row group's, or all and the footer behind them."""
        async with self._decoding:
            self._check_whole()
            rows = self.buffer.take(None if last else self._row_group_bytes)
            size_bytes = sum(len(message.payload) for message in rows)
            self.writing_bytes += size_bytes
            try:
                table = await to_thread.run_sync(self._decode, rows, limiter=self._limiter) if rows else None
                await self._writing.acquire()  # before the next rows may be decoded: that keeps the order
            except BaseException:
                self._lose(size_bytes)
                raise
        try:
            self._check_whole()
            if self._discarded or self.described is not None:
                pass
            elif last:
                # In one call, so that the file is open for no longer than one of the threads works on it.
                written = await to_thread.run_sync(self._file.finish, table, limiter=self._limiter)
                self.described = self.buffer.describe(written)
            elif table is not None:
                await to_thread.run_sync(self._file.write, table, limiter=self._limiter)
        except BaseException:
            self._lose(size_bytes)
            raise
        else:
            self.writing_bytes -= size_bytes
        finally:
            self._writing.release()

    def _lose(self, size_bytes: int) -> None:
        self.writing_bytes -= size_bytes
        self._broken = True

    def _check_whole(self) -> None:
        # Two tasks may finish one file, for its seal and for its cut: the second must not take over what the first lost.
        if self._broken and not self._discarded:
            raise OSError(errno.EIO, "an earlier write of the file failed", self.temporary_path)

    def _decode(self, rows: Sequence[Rows]) -> pa.Table:
        buffer = self.buffer
        return decode_rows(rows, buffer.schema, vchannel=buffer.vchannel, rule=buffer.rule)


# --- segment buffer ---
#
# The rows of one growing segment. No I/O.


class SegmentBuffer(RowBuffer):
    """Inserted rows of one segment; a segment has one vchannel and one partition."""

    rule = OffsetRule.FIRST

    def __init__(
        self, *, segment_id: int, partition_id: int, collection_id: int, vchannel: str, schema: pa.Schema, key: str
    ) -> None:
        super().__init__(collection_id=collection_id, vchannel=vchannel, schema=schema, key=key)
        self.segment_id = segment_id
        self.partition_id = partition_id

    @property
    def path(self) -> str:
        """Path of the file, relative to the node directory."""
        return segment_path(self.collection_id, self.segment_id)

    def describe(self, written: WrittenFile) -> SegmentFile:
        """Return what the manifest says about the finished file."""
        return SegmentFile(
            path=self.path,
            collection_id=self.collection_id,
            vchannel=self.vchannel,
            segment_id=self.segment_id,
            partition_id=self.partition_id,
            **msgspec.structs.asdict(written),
        )

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file's footer says about where it belongs."""
        return {**super().metadata, "streamingnode.segment_id": str(self.segment_id)}


# --- delete buffer ---
#
# The deletes of one vchannel in one cut. No I/O.
#
# A delete that meets rows of its own cut stays a delete: whoever reads the cut applies it, by offset, to what it reads.


class DeleteBuffer(RowBuffer):
    """Deleted keys of one vchannel, each with the offset below which rows of that key are gone."""

    rule = OffsetRule.ALL

    def __init__(self, *, cut_number: int, collection_id: int, vchannel: str, schema: pa.Schema, key: str) -> None:
        super().__init__(collection_id=collection_id, vchannel=vchannel, schema=schema, key=key)
        self.cut_number = cut_number

    @property
    def path(self) -> str:
        """Path of the file, relative to the node directory."""
        return delete_path(self.collection_id, self.cut_number, self.vchannel)

    def describe(self, written: WrittenFile) -> DeleteFile:
        """Return what the manifest says about the finished file."""
        return DeleteFile(
            path=self.path,
            collection_id=self.collection_id,
            vchannel=self.vchannel,
            **msgspec.structs.asdict(written),
        )
