"""A batch of rows that knows where in its input each row was."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from wal.errors import SchemaMismatch, brief

ROWS_MAX = 10_000
"""Rows in a batch: enough that an fsync each costs nothing, few enough that a bad line gives up little."""

BYTES_MAX = 1 << 20
"""Bytes of input in a batch, so that it stays well below one append group of 4 MiB."""


def said(error: Exception) -> str:
    """Return the text of Arrow's error, cut short: it quotes the value, which may be megabytes."""
    return brief(str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0"))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows, and the number of the line or row (`unit`) that each was in the input, from 1."""

    rows: pa.RecordBatch
    unit: str
    numbers: Sequence[int]

    def placed(self, error: SchemaMismatch) -> SchemaMismatch:
        """Return the error of one row of this batch with its place in the input instead of in the batch."""
        if error.row is None or error.row >= len(self.numbers):
            return error
        number = self.numbers[error.row]
        text = str(error).replace(f"row {error.row}", f"{self.unit} {number}", 1)
        return SchemaMismatch(text, column=error.column, row=number)
