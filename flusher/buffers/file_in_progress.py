"""A buffer and the file its rows go to, joined by worker threads.

One thread at a time works on a file, so rows keep their order; different files are written side by side, as many as the
limiter has tokens. After an `OSError` the file is of no use: the flusher gives up everything since its checkpoint and
reads it again, which is also what a crash makes it do.
"""

import errno

import anyio
from anyio import CapacityLimiter, Lock, to_thread

from flusher.buffers.row_buffer import RowBuffer
from flusher.files.node_directory import NodeDirectory
from flusher.files.parquet_file import ParquetFile
from flusher.files.rows import Rows, decode_rows, split_rows
from flusher.manifest import DeleteFile, SegmentFile


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
        """Encoded size of the rows a thread is working on."""
        self._limiter = limiter
        self._row_group_bytes = row_group_bytes
        self._turn = Lock()
        metadata = {**buffer.metadata, "streamingnode.node_id": node_id}
        self._file = ParquetFile(directory, buffer.path, buffer.schema, key=buffer.key, metadata=metadata)
        self._discarded = False
        self._broken = False
        """Set while rows are on their way into the file, and for good when that failed: never finished without them."""
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
        """Write the rows that are pending as row groups, and let go of their memory. Raises `OSError`, `Corrupt`."""
        async with self._turn:
            self._check_whole()
            if self.buffer.pending_bytes:
                await self._write(self.buffer.take())

    async def finish(self) -> None:
        """Write what is pending and the footer, and sync; the file has at least one row. Raises as `spill` does.

        Nothing happens to a file that is finished or discarded: a drop may overtake the seal of a segment.
        """
        async with self._turn:
            if self.described is not None or self._discarded:
                return
            self._check_whole()
            if self.buffer.pending_bytes:
                await self._write(self.buffer.take())
            self._broken = True
            written = await to_thread.run_sync(self._file.finish, limiter=self._limiter)
            self._broken = False
            self.described = self.buffer.describe(written)

    async def discard(self) -> None:
        """Close and remove the file, and forget its rows; a clean-up, so it is not cancelled half way."""
        self._discarded = True
        self.buffer.take()
        with anyio.CancelScope(shield=True):
            async with self._turn:
                await to_thread.run_sync(self._file.discard, limiter=self._limiter)

    async def _write(self, rows: list[Rows]) -> None:
        self.writing_bytes = sum(len(message.payload) for message in rows)
        self._broken = True
        try:
            await to_thread.run_sync(self._decode_and_write, rows, limiter=self._limiter)
            self._broken = False
        finally:
            self.writing_bytes = 0

    def _check_whole(self) -> None:
        # Two tasks may finish one file, for its seal and for its cut: the second must not take over what the first lost.
        if self._broken:
            raise OSError(errno.EIO, "an earlier write of the file failed", self.temporary_path)

    def _decode_and_write(self, rows: list[Rows]) -> None:
        buffer = self.buffer
        for part in split_rows(rows, self._row_group_bytes):
            self._file.write(decode_rows(part, buffer.schema, vchannel=buffer.vchannel, rule=buffer.rule))
