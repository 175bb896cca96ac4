"""Rows on their way to one file: what segment buffers and delete buffers have in common. No I/O, no decoding.

In: messages in tick order. Out: the same, still encoded, whenever a worker thread takes them. A buffer knows everything
about its file but the bytes: its path, its columns, and how the manifest describes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import pyarrow as pa

from flusher.files.parquet_file import WrittenFile
from flusher.files.rows import OffsetRule, Rows, split_rows
from flusher.manifest import DeleteFile, SegmentFile


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
