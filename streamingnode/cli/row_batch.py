"""A batch of rows that knows where in its input each row was. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from interceptors.errors import SchemaMismatch

ROWS_MAX = 10_000
"""Rows in a batch: enough that an fsync each costs nothing, few enough that a bad line gives up little."""

BYTES_MAX = 1 << 20
"""Bytes of input in a batch, so that it stays well below one append group of 4 MiB."""

ROW_BYTES_MAX = 4 << 20
"""No row over the size of an append group can be inserted, so no longer line or row is read."""

SYSTEM_COLUMNS = frozenset({"_tick", "_offset", "_vchannel", "_partition"})
"""What a node and its tables add to a row, and what is not part of it when it is inserted again."""


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
