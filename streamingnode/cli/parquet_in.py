"""Reads a Parquet file as Arrow batches, in order, with every value unchanged. Everything here
blocks.

By default Arrow does not verify page checksums, reads no delta encoding as a dictionary, and
converts INT96 to nanoseconds, which wrap around before 1678 and after 2262.
"""

from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.casting import leaves
from streamingnode.cli.old_calendar import ARROW_SCHEMA, Doubt, doubt_of, is_of_spark
from streamingnode.schema import AnyArray, child_fields, has_leaf, is_list, with_children

READ_BYTES = 8 << 20
"""About how many bytes of a file are decoded at a time."""
GROWING_ROWS = 128
"""Rows decoded at a time when texts may take far more room than in the file."""
CHECK_ROWS = 8 << 10
"""Rows whose times are checked at a time."""


class ParquetInput:
    """A Parquet file whose page checksums are verified.

    Times of type INT96, which Spark writes by default, are read as `timestamp[us]`. INT96 holds
    nanoseconds of any year, so `check_times` must find times that do not fit. INT96 has no zone:
    Spark writes instants, in UTC.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        # All readers share this file object, which keeps their positions apart.
        self._source = pa.PythonFile(stream, mode="r")  # type: ignore[arg-type]  # it only reads
        self.metadata = pq.read_metadata(self._source)
        columns = [self.metadata.schema.column(at) for at in range(self.metadata.num_columns)]
        self._times = [column.path for column in columns if column.physical_type == "INT96"]
        self._footer: dict[bytes, bytes] = self.metadata.metadata or {}
        found = {column.path: doubt_of(column, self._footer) for column in columns}
        self._doubts = {path: doubt for path, doubt in found.items() if doubt is not None}
        as_dictionaries: list[str] = []
        self._may_grow = False
        for at, column in enumerate(columns):
            if column.physical_type != "BYTE_ARRAY" or column.logical_type.type == "DECIMAL":
                continue
            encodings = self._encodings(at)
            if not any(name.startswith("DELTA") for name in encodings):
                # Each distinct text is decoded once.
                as_dictionaries.append(column.path)
            elif any(name == "DELTA_BYTE_ARRAY" or "DICTIONARY" in name for name in encodings):
                self._may_grow = True
        self._file = self._opened("us", as_dictionaries)
        self._micros = self._opened("us").schema_arrow
        self._seconds = self._opened("s").schema_arrow
        """The same as `_micros` but with INT96 in seconds: the difference identifies INT96 in
        Arrow's types.
        """
        self._is_checked = False

    @property
    def schema(self) -> pa.Schema:
        """The columns as written: INT96 is in UTC if Spark wrote it or Arrow's schema in the file
        has a zone.
        """
        if is_of_spark(self._footer):
            return self.in_utc(None)
        if ARROW_SCHEMA in self._footer:
            written = pa.py_buffer(b64decode(self._footer[ARROW_SCHEMA]))
            return self.in_utc(pa.ipc.read_schema(written))
        return self._micros

    def in_utc(self, target: pa.Schema | None) -> pa.Schema:
        """Return the columns with INT96 in UTC where the target has a zone; with None,
        everywhere.
        """
        fields = []
        for field, seconds in zip(self._micros, self._seconds, strict=True):
            wanted = None if target is None else _field_type(target, field.name)
            fields.append(field.with_type(_in_utc(field.type, seconds.type, wanted)))
        return pa.schema(fields)

    def placed_in_utc(self, batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
        """Return a batch with its INT96 times in UTC where the target has times with a zone."""
        if not self._times:
            return batch
        columns = []
        for field in batch.schema:
            column = batch.column(field.name)
            seconds = self._seconds.field(field.name).type
            columns.append(
                column.cast(_in_utc(field.type, seconds, _field_type(target, field.name)))
            )
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    def check_times(self) -> None:
        """Check all INT96 times, and all dates and times that may be in the hybrid calendar.

        Raises `SchemaMismatch` for a time that does not fit into `timestamp[us]`, and for a day or
        time that meant another one where it was written.
        """
        if self._is_checked or any(has_leaf(field.type, pt.is_map) for field in self._micros):
            return  # no collection has maps
        row = 1
        readers = [
            self._opened(unit).iter_batches(CHECK_ROWS, columns=self._times)
            for unit in ("us", "ns", "s")
        ]
        for batches in zip(*readers, strict=True) if self._times else ():
            for name, *arrays in zip(
                batches[0].schema.names, *(batch.columns for batch in batches), strict=True
            ):
                if not _is_exact(*arrays):
                    slices = (
                        [array.slice(at, 1) for array in arrays] for at in range(len(arrays[0]))
                    )
                    row += next(at for at, found in enumerate(slices) if not _is_exact(*found))
                    text = (
                        f"column {name!r}, row {row}: a time is finer than microseconds, or in a "
                        "year beyond their range"
                    )
                    raise SchemaMismatch(f"{text} — change it in the file", column=name, row=row)
            row += batches[0].num_rows
        for path, doubt in self._doubts.items():
            self._check_calendar(path, doubt)
        self._is_checked = True

    def _check_calendar(self, path: str, doubt: Doubt) -> None:
        """Raise `SchemaMismatch` for the first row of a column whose value is in doubt."""
        row = 1
        # In seconds, INT96 times of all years fit.
        for batch in self._opened("s").iter_batches(CHECK_ROWS, columns=[path]):
            for name, array in zip(batch.schema.names, batch.columns, strict=True):
                if doubt.concerns(array):
                    slices = (array.slice(at, 1) for at in range(len(array)))
                    row += next(at for at, found in enumerate(slices) if doubt.concerns(found))
                    text = f"column {name!r}, row {row}: {doubt.what} — {doubt.next_step}"
                    raise SchemaMismatch(text, column=name, row=row)
            row += batch.num_rows

    def iter_batches(self, rows_max: int, *, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the named columns of all rows, in order, in batches of about `rows_max`."""
        if not self._may_grow:
            yield from self._file.iter_batches(rows_max, columns=columns)
            return
        gathered: list[pa.RecordBatch] = []
        rows = 0
        size_bytes = 0
        for batch in self._file.iter_batches(min(rows_max, GROWING_ROWS), columns=columns):
            gathered.append(batch)
            rows += batch.num_rows
            size_bytes += batch.nbytes
            if rows >= rows_max or size_bytes >= READ_BYTES:
                yield pa.concat_batches(gathered)  # type: ignore[attr-defined]  # stubs lack it
                gathered = []
                rows = 0
                size_bytes = 0
        if gathered:
            yield pa.concat_batches(gathered)  # type: ignore[attr-defined]  # stubs lack it

    def _encodings(self, at: int) -> frozenset[str]:
        """Return the encodings of a column's pages."""
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        return frozenset(name for group in groups for name in group.column(at).encodings)

    def _opened(self, int96_unit: str, as_dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
        return pq.ParquetFile(
            self._source,
            metadata=self.metadata,
            read_dictionary=list(as_dictionaries),
            coerce_int96_timestamp_unit=int96_unit,
            page_checksum_verification=True,
        )


def _in_utc(kind: pa.DataType, seconds: pa.DataType, target: pa.DataType | None) -> pa.DataType:
    """Return a type with INT96 in UTC where the target has a zone. INT96 is where `seconds` has
    another type.
    """
    if isinstance(kind, pa.TimestampType):
        is_wanted = target is None or getattr(target, "tz", None) is not None
        return pa.timestamp("us", "UTC") if kind != seconds and is_wanted else kind
    inside = []
    for field, in_seconds in zip(child_fields(kind), child_fields(seconds), strict=True):
        wanted = None if target is None else _child_type(target, field.name)
        inside.append(field.with_type(_in_utc(field.type, in_seconds.type, wanted)))
    return with_children(kind, inside) if inside else kind


def _child_type(target: pa.DataType, name: str) -> pa.DataType:
    fields = child_fields(target)
    return _field_type(fields, fields[0].name if is_list(target) else name)


def _field_type(fields: Any, name: str) -> pa.DataType:
    """Return the type of a field, the null type when there is no such field."""
    return next((field.type for field in fields if field.name == name), pa.null())


def _is_exact(micros: AnyArray, nanos: AnyArray, seconds: AnyArray) -> bool:
    """Whether INT96 times, read in three units, are whole microseconds that fit into 64 bits.

    Nanoseconds wrap around, with all their last digits; seconds never do.
    """
    for in_micros, in_nanos, in_seconds in zip(
        leaves(micros), leaves(nanos), leaves(seconds), strict=True
    ):
        ticks = _ticks(in_micros)
        if (ticks * 1_000 != _ticks(in_nanos)).any() or (
            ticks // 1_000_000 != _ticks(in_seconds)
        ).any():
            return False
    return True


def _ticks(times: AnyArray) -> npt.NDArray[np.int64]:
    return times.drop_null().cast(pa.int64()).to_numpy()
