"""Converts callers' rows to record batches of a collection's schema, one for each shard, or refuses
them. No I/O.

In: dicts, a `RecordBatch` or a `Table`. Out: non-empty batches of exactly the schema, in row order;
or `SchemaMismatch` with column and row. Per row, Python runs only inside one comprehension per
column, and not at all for Arrow input. A conversion keeps every value or fails; only floats may
round to the nearest, and never to an infinity. So an integer column goes into a float column only
if every integer of its type is exactly a float.
"""

import datetime as dt
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import NoneType
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.casting import bare, converts_exactly, exact_cast, holds_infinity, leaves
from streamingnode.schema import (
    AnyArray,
    AnyChunkedArray,
    AnyField,
    child_fields,
    has_leaf,
    is_bytes,
    is_text,
    python_type,
    with_leaves,
)
from wal.errors import InvalidArgument, brief, shown
from wal.shard_hash import Hashes, hash_bytes, hash_integers

ValuesT = TypeVar("ValuesT", Sequence[object], AnyArray)
DictRows = Sequence[Mapping[str, object]]
Rows = DictRows | pa.RecordBatch | pa.Table
"""Rows of `insert` and `upsert`."""
Keys = Sequence[object] | AnyArray | AnyChunkedArray | pa.RecordBatch | pa.Table
"""Keys of `delete`: key values, or Arrow data with one column of them."""
Values = Sequence[object]
"""The values of one column, row by row."""

PANDAS_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pandas gives to unnamed index levels in Arrow data and in Parquet."""

DICTS_PER_BATCH = 4_096
"""Dicts converted at a time: about 2 ms of work, after which a thread lets others run."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """The required shape of rows of one schema version; build it once with `row_shape`."""

    schema: pa.Schema
    key_index: int
    columns: "tuple[ColumnValues, ...]"
    required: tuple[int, ...]
    """Indexes of the columns that take no null: the primary key and the non-nullable ones."""


def row_shape(schema: pa.Schema, *, primary_key: str) -> RowShape:
    """Return the shape of a checked schema's rows."""
    key_index = schema.get_field_index(primary_key)
    required = tuple(i for i, field in enumerate(schema) if i == key_index or not field.nullable)
    return RowShape(schema, key_index, tuple(map(column_values, schema)), required)


def key_shape(shape: RowShape) -> RowShape:
    """Return the shape of a delete's rows: the primary key alone."""
    key = shape.schema.field(shape.key_index)
    return row_shape(pa.schema([key]), primary_key=key.name)


def to_batches(rows: Rows, shape: RowShape) -> list[pa.RecordBatch]:
    """Return `rows` as checked batches of the shape's schema; an empty list if there are no rows.

    Raises `SchemaMismatch` for rows that do not fit, with the column, and with the row if a single
    one is wrong; raises `InvalidArgument` for an object of another type.
    """
    if isinstance(rows, (pa.RecordBatch, pa.Table)):
        batches = []
        first_row = 0
        for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
            if batch.num_rows:
                batches.append(conform(batch, shape, first_row=first_row))
            first_row += batch.num_rows
        if not batches:
            check_column_names(rows.schema.names, shape.schema)
        return batches
    expected = (
        "a list of dicts, a RecordBatch or a Table; pa.Table.from_pandas() and Polars' "
        "to_arrow() make one"
    )
    dicts = _listed("rows", rows, expected)
    starts = range(0, len(dicts), DICTS_PER_BATCH)
    return [
        dicts_to_batch(dicts[start : start + DICTS_PER_BATCH], shape, first_row=start)
        for start in starts
    ]


def keys_to_batches(keys: Keys, shape: RowShape) -> list[pa.RecordBatch]:
    """Return a delete's keys as batches of the one-column `key_shape`. Raises as `to_batches`
    does.
    """
    if isinstance(keys, (pa.Array, pa.ChunkedArray)):
        keys = pa.table({shape.columns[0].name: keys})
    if isinstance(keys, (pa.RecordBatch, pa.Table)):
        return to_batches(keys, shape)
    values = _listed("keys", keys, "a list of key values, or Arrow data")
    return [_batch_of_values([values], shape, 0)] if values else []


def _listed(what: str, given: object, expected: str) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray, memoryview)):
        raise InvalidArgument(f"{what} cannot be a {type(given).__name__} — pass {expected}")
    return list(given)


def dicts_to_batch(rows: DictRows, shape: RowShape, *, first_row: int = 0) -> pa.RecordBatch:
    """Return dicts, at least one, as one batch; `first_row` is added to the row in an error.

    A nullable column is null where a dict lacks it.
    """
    # other mappings may supply missing keys, and hide keys that are not columns
    if not {dict}.issuperset(map(type, rows)):
        rows = [dict(row) if isinstance(row, Mapping) else row for row in rows]
    names = shape.schema.names
    try:
        has_all = max(map(len, rows)) == len(names)
        values = [[row[name] for row in rows] for name in names] if has_all else None
    except (KeyError, TypeError, AttributeError, IndexError):
        values = None
    if values is None:
        _check_names_of_each(rows, shape, first_row)
        values = [[row.get(name) for row in rows] for name in names]
    return _batch_of_values(values, shape, first_row)


def _batch_of_values(values: Sequence[Values], shape: RowShape, first_row: int) -> pa.RecordBatch:
    arrays = [
        by_row(column.build, cells, column.name, column.arrow_type, first_row)
        for column, cells in zip(shape.columns, values, strict=True)
    ]
    for index in shape.required:
        check_nulls(arrays[index], shape.columns[index].name, first_row)
    return pa.RecordBatch.from_arrays(arrays, schema=shape.schema)


def _check_names_of_each(rows: DictRows, shape: RowShape, first_row: int) -> None:
    """Check that every row is a dict of columns, and has all non-nullable ones.

    Raises `InvalidArgument` for any other type of row, and `SchemaMismatch`.
    """
    names = shape.schema.names
    known = frozenset(names)
    required = [names[index] for index in shape.required]
    for row, cells in enumerate(rows, first_row):
        if not isinstance(cells, Mapping):
            kind = type(cells).__name__
            step = "each row is a dict of column name to value"
            raise InvalidArgument(f"row {row} is a {kind} — {step}")
        if not known.issuperset(cells):
            name = next(name for name in cells if name not in known)
            advice = f"correct its name, or leave it out ({', '.join(names[:20])})"
            text = f"column {shown(str(name))}, row {row} is not in the schema — {advice}"
            raise SchemaMismatch(text, column=str(name), row=row)
        for name in required:
            if name not in cells:
                advice = "the primary key and required columns need a value in each row"
                text = f"column {name!r}, row {row} is missing — give it: {advice}"
                raise SchemaMismatch(text, column=name, row=row)


# --- Python values of one column ------------------------------------------------------------------
#
# Arrow alone would silently turn 1.5 into the integer 1, drop an unknown field of a struct, read
# bytes as text, and remove the zone of a time. So the types of values are checked first: one set of
# them per column, the set of zones for times, and value by value only for unusual types.
# `exact_cast` then handles values that Arrow refuses or rounds.

_MORE_TYPES: dict[type, tuple[type, ...]] = {
    int: (np.integer,),
    # Unsigned types are left out: Arrow converts them to floats by way of signed integers, so that
    # 2^64 - 1 would become -1.
    float: (int, np.float32, np.signedinteger),
    bool: (np.bool_,),
    list: (tuple, np.ndarray),
}
"""The types that a column takes besides `python_type`, including their subclasses."""
_NO_SUBCLASSES = {bool, dt.datetime, np.timedelta64}
"""Types that are refused where their base class, an integer or a date, is taken."""
_NUMBERS = "biuf"
"""Kinds of numpy arrays whose elements all have the array's type, so that no element needs a
check.
"""


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """The Python values that one column takes; build it once for a schema with `column_values`."""

    name: str
    """The column's name; for a nested field, the names of its parents come first, with dots."""
    arrow_type: pa.DataType
    types: tuple[type, ...]
    """The accepted types; the first is the Python type of the column's values."""
    usual: frozenset[type]
    """The accepted types and None; of their subclasses, those in `_NO_SUBCLASSES` are refused."""
    inner: "tuple[ColumnValues, ...]"
    wide_type: pa.DataType
    """`arrow_type`, but with times and floats wide enough for every Python value."""
    always_wide: bool
    """Whether values are built as `wide_type` and then cast, which refuses values that would lose
    digits.
    """
    may_overflow: bool
    """Whether Arrow may silently turn a value into an infinity."""
    has_zone: bool
    """Whether it has times in a zone; near the ends of Python's years these may have no
    `datetime`.
    """

    def build(self, values: Values) -> AnyArray:
        """Return the values as Arrow data. Raises `SchemaMismatch` without a row, or Arrow's
        errors.
        """
        self._check(values)
        array = self._as_arrow(values)
        if self.has_zone and not isinstance(array, pa.ChunkedArray):
            check_times_of_python(array)
        return array

    def _as_arrow(self, values: Values) -> AnyArray:
        if not self.always_wide:
            array = pa.array(values, type=self.arrow_type)
            if (
                not self.may_overflow
                or isinstance(array, pa.ChunkedArray)
                or not holds_infinity(array)
            ):
                return array
        return exact_cast(pa.array(values, type=self.wide_type), self.arrow_type)

    def _check(self, values: Values) -> None:
        """Raise `SchemaMismatch` for a value that this column does not take; None is accepted."""
        types = set(map(type, values))
        if not self._takes_all(types):
            wrong = next(value for value in values if not self._takes_all({type(value)}))
            raise self._refused(wrong, f"is no {self.arrow_type} — convert it first")
        if self.inner or self.types[0] in {dt.datetime, Decimal}:
            present: Any = (
                [value for value in values if value is not None] if NoneType in types else values
            )
            if self.types[0] is dt.datetime:
                self._check_times(present, types)
            elif self.types[0] is Decimal:
                self._check_digits(present)
            elif self.types[0] is list:
                self._check_items(present, types)
            else:
                self._check_fields(present)

    def _takes_all(self, types: set[type]) -> bool:
        never = tuple(_NO_SUBCLASSES.difference(self.types))
        return all(
            issubclass(each, self.types) and not issubclass(each, never)
            for each in types - self.usual
        )

    def _check_times(self, times: Sequence[dt.datetime], types: set[type]) -> None:
        """Check that every time is naive or aware like the column, and not finer than Arrow can
        store.
        """
        naive = self.arrow_type.tz is None  # type: ignore[attr-defined]  # it is a timestamp
        if types <= {dt.datetime, NoneType}:
            # By identity: not every zone has a hash.
            zones = {id(zone): zone for zone in map(_zone_of, times)}.values()
            if all(zone is None for zone in zones) if naive else all(map(_is_plain_zone, zones)):
                return
        for time in times:
            if (reason := _why_not(time, naive=naive)) is not None:
                raise self._refused(time, reason)

    def _check_digits(self, numbers: Sequence[Decimal | int]) -> None:
        """Check that Arrow can convert the numbers: with more digits than its table it returns zero
        or crashes.
        """
        digits = self.arrow_type.scale + int((self.arrow_type.bit_width - 1) * math.log10(2))  # type: ignore[attr-defined]
        for number in numbers:
            exponent = number.as_tuple().exponent if isinstance(number, Decimal) else 0
            if isinstance(exponent, int) and -exponent > digits:
                raise self._refused(number, f"has over {digits} digits behind its point — round it")

    def _check_fields(self, structs: Sequence[Mapping[str, object]]) -> None:
        names = dict(
            zip([field.name for field in child_fields(self.arrow_type)], self.inner, strict=True)
        )
        for struct in structs:
            if not struct.keys() <= names.keys():
                known = ", ".join(names)
                raise self._refused(struct, f"has other fields than {known} — leave those out")
        for name, inner in names.items():
            inner._check([struct.get(name) for struct in structs])  # noqa: SLF001

    def _check_items(self, lists: Sequence[Sequence[object]], types: set[type]) -> None:
        """Check the elements of lists; where their types suffice, without a check of each element:
        vectors have thousands.
        """
        (item,) = self.inner
        if types <= {np.ndarray, NoneType}:
            dtypes = {values.dtype for values in lists}  # type: ignore[attr-defined]
            if all(dtype.kind in _NUMBERS and item._takes_all({dtype.type}) for dtype in dtypes):  # noqa: SLF001
                return
        looked_into = item.inner or item.types[0] in {dt.datetime, Decimal}
        if looked_into or not item._takes_all(set(map(type, chain.from_iterable(lists)))):  # noqa: SLF001
            item._check(list(chain.from_iterable(lists)))  # noqa: SLF001

    def _refused(self, value: object, reason: str) -> SchemaMismatch:
        return SchemaMismatch(f"{shown(value)} ({type(value).__name__}) {reason}", column=self.name)


def column_values(field: AnyField, *, path: str = "") -> ColumnValues:
    """Return the check for a column, or for a field inside the one of a `path`."""
    name = f"{path}{field.name}"
    python = python_type(field.type)
    types = (python, *_MORE_TYPES.get(python, ()))
    return ColumnValues(
        name=name,
        arrow_type=field.type,
        types=types,
        # An int is exactly a decimal; Arrow would convert a subclass of it by its text.
        usual=frozenset({*types, NoneType} | ({int} if pt.is_decimal(field.type) else set())),
        inner=tuple(column_values(each, path=f"{name}.") for each in child_fields(field.type)),
        wide_type=with_leaves(field.type, _widened),
        always_wide=has_leaf(field.type, lambda kind: pt.is_timestamp(kind) and kind.unit == "ms"),
        may_overflow=has_leaf(field.type, pt.is_float32),
        has_zone=has_leaf(field.type, _has_zone),
    )


def _has_zone(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.TimestampType) and kind.tz is not None


_DAYS_OF_PYTHON = tuple((day - dt.date(1970, 1, 1)).days for day in (dt.date.min, dt.date.max))
_ZONE_DAYS = 2
"""A margin in days: a zone differs from UTC by at most one, so a time further than this from the
ends of Python's years is safe in every zone.
"""


def check_times_of_python(array: AnyArray) -> None:
    """Raise `SchemaMismatch`, without a row, for a time in a zone that cannot be read back as a
    `datetime`.

    Its year is 0 or 10000 in UTC or in the zone of the column, although it is a valid `datetime` in
    the zone of the caller's value.
    """
    for leaf in leaves(array):
        if not _has_zone(leaf.type):
            continue
        ticks_per_day = 86_400 * (1_000_000 if leaf.type.unit == "us" else 1_000)
        first, last = _DAYS_OF_PYTHON
        low = (first + _ZONE_DAYS) * ticks_per_day
        high = (last - _ZONE_DAYS) * ticks_per_day
        times = leaf.drop_null()
        ticks = times.cast(pa.int64()).to_numpy()
        for time in times.take(np.flatnonzero((ticks < low) | (ticks > high))):
            try:
                time.as_py()
            except (OverflowError, ValueError):
                zones = "UTC" if leaf.type.tz == "UTC" else f"UTC or in {leaf.type.tz}"
                text = f"a time is not within Python's years 1 to 9999 in {zones}"
                step = "give null for a time that never comes, or a time a day from the ends"
                raise SchemaMismatch(f"{text} — {step}") from None


_zone_of = attrgetter("tzinfo")


def _is_plain_zone(zone: dt.tzinfo | None) -> bool:
    """Whether every time of this zone is aware and differs from UTC by whole seconds."""
    return isinstance(zone, ZoneInfo) or (
        isinstance(zone, dt.timezone) and not zone.utcoffset(None).microseconds
    )


def _why_not(time: dt.datetime, *, naive: bool) -> str | None:
    """Return why a column, of naive times or not, would not return the same time; None if it
    would.
    """
    if getattr(time, "nanosecond", 0):  # a pandas Timestamp or NaT, which are datetimes too
        return "is not in whole microseconds — convert it to datetime first, None for null"
    if naive:
        advice = "pass .astimezone(UTC).replace(tzinfo=None), or give the column a zone"
        return None if time.tzinfo is None else f"has a time zone, the column has none — {advice}"
    offset = time.utcoffset()
    if offset is None:
        return (
            "has no time zone, the column has one — pass .replace(tzinfo=UTC), or whatever zone "
            "it is in"
        )
    # Arrow stores the offset in seconds.
    return (
        "is off UTC by a part of a second — convert it with .astimezone(UTC)"
        if offset.microseconds
        else None
    )


def _widened(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.TimestampType):
        return pa.timestamp("us", kind.tz)
    return pa.float64() if pt.is_float32(kind) else kind


def key_hashes(keys: AnyArray) -> Hashes:
    """Return the hash of each primary key; none of them is null."""
    if not (is_text(keys.type) or is_bytes(keys.type)):
        if pt.is_date32(keys.type):
            keys = keys.cast(pa.int32())
        return hash_integers(keys.cast(pa.int64()).to_numpy())
    offset_type = (
        np.int64 if pt.is_large_string(keys.type) or pt.is_large_binary(keys.type) else np.int32
    )
    _, offset_buffer, data_buffer = keys.buffers()
    if not len(keys) or offset_buffer is None:
        return np.empty(0, np.uint64)
    offsets = np.frombuffer(memoryview(offset_buffer), offset_type)[
        keys.offset : keys.offset + len(keys) + 1
    ]
    data = (
        np.empty(0, np.uint8)
        if data_buffer is None
        else np.frombuffer(memoryview(data_buffer), np.uint8)
    )
    return hash_bytes(data, offsets.astype(np.int64))


# --- Arrow data -----------------------------------------------------------------------------------


def conform(batch: pa.RecordBatch, shape: RowShape, *, first_row: int = 0) -> pa.RecordBatch:
    """Return `batch` in exactly the schema of a shape, with valid buffers.

    `first_row` is added to the rows in errors. It copies nothing when the schema is already the
    same.
    """
    schema = shape.schema
    if batch.schema.equals(schema):
        batch = _sound(batch)
    else:
        check_column_names(batch.schema.names, schema)
        for field in schema:
            given = batch.schema.field(field.name).type
            if not converts_exactly(given, field.type):
                # the texts of a file are read in the same way
                kind = given.value_type if pt.is_dictionary(given) else given
                advice = "cast it before the insert"
                if pt.is_timestamp(kind) and pt.is_timestamp(field.type):
                    advice = "give its times their zone, as pc.assume_timezone does"
                    if kind.tz is not None:
                        advice = "give the times of one zone without it, as pc.local_timestamp does"
                reason = f"is {kind}, the schema has {field.type} — {advice}"
                raise SchemaMismatch(f"column {field.name!r} {reason}", column=field.name)
        # after the types are checked, so that their nesting is bounded
        batch = _sound(batch)
        columns = [
            by_row(
                partial(exact_cast, target=field.type),
                batch.column(field.name),
                field.name,
                field.type,
                first_row,
            )
            for field in schema
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    for index in shape.required:
        check_nulls(batch.column(index), schema.names[index], first_row)
    for index, each in enumerate(shape.columns):
        # Tables have microseconds: a time beyond their range would block the table for ever.
        if each.always_wide:
            widen = partial(exact_cast, target=each.wide_type)
            by_row(widen, batch.column(index), each.name, each.wide_type, first_row)
    return batch


def check_column_names(names: Sequence[str], schema: pa.Schema) -> None:
    """Raise `SchemaMismatch` unless `names` are the schema's columns, each once, in any order."""
    known = schema.names
    if len(names) == len(known) and set(names) == set(known):
        return
    name = next(name for name in (*known, *names) if name not in known or names.count(name) != 1)
    if name not in names:
        reason = "is missing"
    elif name in known:
        reason = "appears twice"
    else:
        reason = "is not in the schema"
    advice = f"give every column once, as null where there is no value ({', '.join(known[:20])})"
    if PANDAS_INDEX.fullmatch(name) and name not in known:
        advice = "it is the index of a pandas frame: make the table with preserve_index=False"
    raise SchemaMismatch(f"column {shown(name)} {reason} — {advice}", column=name)


def check_nulls(array: AnyArray, column: str, first_row: int) -> None:
    """Raise `SchemaMismatch` for a null in a non-nullable column."""
    if array.null_count:
        row = first_row + pc.index(array.is_null(), True).as_py()
        raise _misfit(
            column, row, "null where the primary key or a required column needs a value — give one"
        )


def by_row(
    convert: Callable[[ValuesT], AnyArray],
    values: ValuesT,
    column: str,
    kind: pa.DataType,
    first_row: int,
) -> AnyArray:
    """Return a column's values, converted; if that fails, find the first wrong row by halving.

    `convert` raises Arrow's errors, or a `SchemaMismatch` without a row.
    """
    try:
        array = convert(values)
        if isinstance(array, pa.ChunkedArray):
            raise OverflowError("it has more than one array holds")
        return array
    except (SchemaMismatch, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if len(values) > 1:
            half = len(values) // 2
            by_row(convert, values[:half], column, kind, first_row)
            by_row(convert, values[half:], column, kind, first_row + half)
            # each half fits, so no single row is wrong
            reason = f"holds over 2 GiB in {len(values)} rows — insert fewer rows at a time"
            raise SchemaMismatch(f"column {column!r} {reason}", column=column) from None
        if isinstance(error, SchemaMismatch):
            raise _misfit(error.column or column, first_row, str(error)) from None
        if isinstance(error, UnicodeEncodeError):
            letter = shown(error.object[error.start])
            reason = f"{letter} is half of a surrogate pair, which is no character"
            step = "give the whole character, or leave it out"
            raise _misfit(column, first_row, f"{reason} — {step}") from None
        said = brief(str(error))  # Arrow quotes the value, whole
        raise _misfit(column, first_row, f"{said} — give a value that {kind} holds") from None


def _misfit(column: str, row: int, reason: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {column!r}, row {row}: {reason}", column=column, row=row)


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch with null in every slot under a null.

    Refuses buffers with wrong lengths, and text that is not UTF-8, before anything reads them.
    """
    try:
        batch.validate()
        columns = batch.columns
        bared = [bare(column) for column in columns]
        if not all(map(is_, bared, columns)):
            fields = [
                field.with_type(column.type)
                for field, column in zip(batch.schema, bared, strict=True)
            ]
            batch = pa.RecordBatch.from_arrays(bared, schema=pa.schema(fields))
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(
            f"the record batch is not valid Arrow data: {brief(str(error))} — build it again"
        ) from None
    return batch
