"""A batch of rows that knows where in its input each row was, and the types a collection made from such rows gets. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.rows.arrow_types import with_leaves

ROWS_MAX = 10_000
"""Rows in a batch: enough that an fsync each costs nothing, few enough that a bad line gives up little."""

BYTES_MAX = 1 << 20
"""Bytes of input in a batch, so that it stays well below one append group of 4 MiB."""

ROW_BYTES_MAX = 4 << 20
"""No row over the size of an append group can be inserted, so no longer line or row is read."""

SYSTEM_COLUMNS = frozenset({"_tick", "_offset", "_vchannel", "_partition"})
"""What a node and its tables add to a row, and what is not part of it when it is inserted again."""

_WIDER: dict[pa.DataType, pa.DataType] = {
    pa.null(): pa.string(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows, and the number of the line or row (`unit`) that each was in the input, from 1.

    `digest` is one of the input up to and with the last of them: another input has another one.
    """

    rows: pa.RecordBatch
    unit: str
    numbers: Sequence[int]
    digest: bytes

    def placed(self, error: SchemaMismatch) -> SchemaMismatch:
        """Return the error of one row of this batch with its place in the input instead of in the batch."""
        if error.row is None or error.row >= len(self.numbers):
            return error
        number = self.numbers[error.row]
        text = str(error).replace(f"row {error.row}", f"{self.unit} {number}", 1)
        return SchemaMismatch(text, column=error.column, row=number)


def without_system_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns that are rows' own."""
    return pa.schema([field for field in schema if field.name not in SYSTEM_COLUMNS])


def kept_schema(schema: pa.Schema) -> pa.Schema:
    """Return columns a collection can have for data of `schema`; one that has no kept type stays, for the node to refuse."""
    return pa.schema([field.with_type(with_leaves(field.type, _kept)) for field in schema])


def _kept(given: pa.DataType) -> pa.DataType:
    if isinstance(given, pa.TimestampType):
        return pa.timestamp("us", given.tz)
    if isinstance(given, pa.DictionaryType):
        return with_leaves(given.value_type, _kept)
    if pt.is_fixed_size_binary(given):
        return pa.binary()
    return _WIDER.get(given, given)
