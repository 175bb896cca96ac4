"""The deletes of one vchannel in one cut. No I/O.

A delete that meets rows of its own cut stays a delete: whoever reads the cut applies it, by offset, to what it reads.
"""

import msgspec
import pyarrow as pa

from flusher.buffers.row_buffer import RowBuffer
from flusher.files.parquet_file import WrittenFile
from flusher.files.rows import OffsetRule
from flusher.manifest import DeleteFile, delete_path


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
