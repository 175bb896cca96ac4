"""Everything since the last cut: which row goes to which file, until a cut message closes it. No I/O of its own.

In: messages in tick order. Out: for the cut writer, the files of all segments that got rows and of all vchannels that got
deletes. Since a cut seals every growing segment, no file ever spans two cuts.
"""

from collections.abc import Callable, Iterator

import pyarrow as pa

from flusher.buffers.delete_buffer import DeleteBuffer
from flusher.buffers.file_in_progress import FileInProgress
from flusher.buffers.row_buffer import RowBuffer
from flusher.buffers.segment_buffer import SegmentBuffer
from flusher.cuts.collection_entry import arrow_schema
from flusher.files.rows import Rows
from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import Catalog, CollectionInfo
from wal.errors import Corrupt
from wal.headers import DeleteHeader, InsertHeader
from wal.message import Message

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
