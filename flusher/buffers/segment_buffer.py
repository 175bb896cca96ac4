"""The rows of one growing segment. No I/O."""

from collections.abc import Mapping

import msgspec
import pyarrow as pa

from flusher.buffers.row_buffer import RowBuffer
from flusher.files.parquet_file import WrittenFile
from flusher.files.rows import OffsetRule
from flusher.manifest import SegmentFile, segment_path


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
