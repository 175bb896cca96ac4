"""Which Python values a column takes, checked a column at a time before Arrow sees them.

Arrow alone would turn 1.5 into the integer 1, drop a field of a struct it does not know, read bytes as text, and take the
zone off a time, all silently. In: the values of one column, row by row. Out: nothing, or the `SchemaMismatch` of the first
row to blame. The fast path is one set of types per column, for times one look at their zones; nothing is looked at value by
value unless a type is unusual. What Arrow then refuses or rounds is `arrow_columns`' affair. No I/O.
"""

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from numbers import Integral, Real
from operator import attrgetter
from types import NoneType
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from interceptors.errors import SchemaMismatch
from streamingnode.rows.schema import AnyField, child_fields, has_leaf, is_bytes, is_list, is_text, with_leaves
from wal import errors

Values = Sequence[object]
_NUMBERS = "biuf"
"""Kinds of numpy arrays whose elements all have the array's type, so that none of them has to be looked at."""

_AWARE = "has a time zone, {} has none — pass .astimezone(UTC).replace(tzinfo=None), or give the column a zone"
_NAIVE = "has no time zone, {} needs one — pass .replace(tzinfo=UTC), or whatever zone it is in"

_zone_of = attrgetter("tzinfo")


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Python types that one Arrow type takes: `usual` ones at once, others when they are `similar` and not `never`."""

    usual: frozenset[type]
    similar: tuple[type, ...]
    never: tuple[type, ...] = ()


_INTEGER = ValueKind(frozenset({int}), (Integral,), (bool, np.timedelta64))
# Arrow makes floats of unsigned 64-bit integers by way of signed ones: 2^64 - 1 would become -1.
_FLOAT = ValueKind(frozenset({float, int}), (Real,), (bool, np.timedelta64, np.longdouble, np.uint64, np.ulonglong))
_BOOLEAN = ValueKind(frozenset({bool}), (np.bool_,))
_TEXT = ValueKind(frozenset({str}), (str,))
_BYTES = ValueKind(frozenset({bytes}), (bytes, bytearray, memoryview))
_DATE = ValueKind(frozenset({dt.date}), (dt.date,), (dt.datetime,))
_TIMESTAMP = ValueKind(frozenset({dt.datetime}), (dt.datetime, np.datetime64))
_DECIMAL = ValueKind(frozenset({Decimal, int}), (Decimal,))
_LIST = ValueKind(frozenset({list, tuple}), (list, tuple, np.ndarray))
_STRUCT = ValueKind(frozenset({dict}), (dict,))

_KINDS: tuple[tuple[Callable[[pa.DataType], bool], ValueKind], ...] = (
    (pt.is_integer, _INTEGER),
    (pt.is_floating, _FLOAT),
    (pt.is_boolean, _BOOLEAN),
    (is_text, _TEXT),
    (is_bytes, _BYTES),
    (pt.is_date32, _DATE),
    (pt.is_timestamp, _TIMESTAMP),
    (pt.is_decimal, _DECIMAL),
    (is_list, _LIST),
    (pt.is_struct, _STRUCT),
)


@dataclass(frozen=True, slots=True)
class ColumnValues:
    """The check of one column's Python values; build it once for a schema with `column_values`."""

    column: str
    arrow_type: pa.DataType
    nullable: bool
    kind: ValueKind
    accepted: frozenset[type]
    inner: "tuple[ColumnValues, ...]"
    wide_type: pa.DataType
    """As `arrow_type`, but with times and floats in which no Python value is cut off."""
    always_wide: bool
    """Whether values have to be built wide and then cast, which refuses what the cast would cut off."""
    may_overflow: bool
    """Whether Arrow may turn a value into an infinity in silence."""

    def check(self, values: Values) -> None:
        """Raise `SchemaMismatch`, with the row, for the first value that this column does not take."""
        types = set(map(type, values))
        if not self._takes_all(types):
            raise self._mismatch(values)
        if self.kind is _TIMESTAMP and not self._times_fit(values, types):
            raise self._time_mismatch(values)
        if self.inner and not self._inner_fits(values):
            raise self._nested_mismatch(values)

    def _takes_all(self, types: set[type]) -> bool:
        unusual = types - self.accepted
        return not unusual or all(map(self._takes, unusual))

    def _takes(self, kind: type) -> bool:
        return issubclass(kind, self.kind.similar) and not issubclass(kind, self.kind.never)

    def _mismatch(self, values: Values) -> SchemaMismatch:
        row = next(
            i for i, value in enumerate(values) if type(value) not in self.accepted and not self._takes(type(value))
        )
        if values[row] is None:
            return null_mismatch(self.column, row)
        return SchemaMismatch(
            f"column {self.column!r}, row {row}: {shown(values[row])} is no {self.arrow_type} — convert it first",
            column=self.column,
            row=row,
        )

    def _times_fit(self, values: Values, types: set[type]) -> bool:
        """Whether every time is naive or aware as the column is, and no finer than Arrow reads it."""
        if NoneType in types:
            values = [value for value in values if value is not None]
        if not types <= {dt.datetime, NoneType}:
            return all(self._why_not(value) is None for value in values)
        zones = map(_zone_of, values)
        if self.arrow_type.tz is None:  # type: ignore[attr-defined]  # it is a timestamp
            return not any(zones)
        return all(map(_is_plain_zone, set(zones))) or all(self._why_not(value) is None for value in values)

    def _why_not(self, time: object) -> str | None:
        """Return why this column would not give the time back; None when it would."""
        zoned = self.arrow_type.tz is not None  # type: ignore[attr-defined]
        if isinstance(time, np.datetime64):
            time = time.item()  # a datetime when it counts microseconds, otherwise a number, a date, or None for NaT
        if not isinstance(time, dt.datetime) or getattr(time, "nanosecond", False):
            return "is not in whole microseconds — convert it to datetime first, None for null"
        if not zoned:
            return None if time.tzinfo is None else _AWARE.format(self.arrow_type)
        offset = time.utcoffset()
        if offset is None:
            return _NAIVE.format(self.arrow_type)
        # Arrow counts the offset in seconds.
        return "is off UTC by a part of a second — convert it with .astimezone(UTC)" if offset.microseconds else None

    def _time_mismatch(self, values: Values) -> SchemaMismatch:
        row, why = next(
            (i, why) for i, value in enumerate(values) if value is not None and (why := self._why_not(value))
        )
        return SchemaMismatch(
            f"column {self.column!r}, row {row}: {shown(values[row])} {why}", column=self.column, row=row
        )

    def _inner_fits(self, values: Values) -> bool:
        try:
            self._check_inner([value for value in values if value is not None])
        except SchemaMismatch:
            return False
        return True

    def _check_inner(self, values: Values) -> None:
        if self.kind is _LIST:
            self._check_items(self.inner[0], values)
            return
        names = {inner.column.rpartition(".")[2]: inner for inner in self.inner}
        for value in values:
            assert isinstance(value, dict)
            if value.keys() != names.keys():
                raise SchemaMismatch(
                    f"the fields are {shown(list(value))}, the schema's are {', '.join(names)} — give each of these",
                    column=self.column,
                )
        for name, inner in names.items():
            inner.check([value[name] for value in values])  # type: ignore[index]

    def _check_items(self, item: "ColumnValues", values: Values) -> None:
        """Check the elements of lists, without looking at each where types say it all: vectors have thousands."""
        if set(map(type, values)) == {np.ndarray}:
            dtypes = {value.dtype for value in values}  # type: ignore[attr-defined]
            if all(dtype.kind in _NUMBERS and item._takes(dtype.type) for dtype in dtypes):  # noqa: SLF001
                return
        lists: Iterable[Iterable[object]] = values  # type: ignore[assignment]
        looked_into = item.inner or item.kind is _TIMESTAMP
        if looked_into or not item._takes_all(set(map(type, chain.from_iterable(lists)))):  # noqa: SLF001
            item.check(list(chain.from_iterable(lists)))

    def _nested_mismatch(self, values: Values) -> SchemaMismatch:
        """Try the rows one by one to name the one to blame; nobody waits for this path but a caller in error."""
        for row, value in enumerate(values):
            try:
                self._check_inner([] if value is None else [value])
            except SchemaMismatch as error:
                return SchemaMismatch(f"column {self.column!r}, row {row}: {error}", column=error.column, row=row)
        raise AssertionError("a column fails as a whole but no row of it does")


def column_values(field: AnyField, *, nullable: bool, path: str = "") -> ColumnValues:
    """Return the check for a column; a primary key is not `nullable` whatever its field says."""
    name = f"{path}{field.name}"
    kind = next(kind for matches, kind in _KINDS if matches(field.type))
    inner = tuple(column_values(child, nullable=child.nullable, path=f"{name}.") for child in child_fields(field.type))
    accepted = kind.usual | {NoneType} if nullable else kind.usual
    return ColumnValues(
        column=name,
        arrow_type=field.type,
        nullable=nullable,
        kind=kind,
        accepted=accepted,
        inner=inner,
        wide_type=with_leaves(field.type, _widened),
        always_wide=has_leaf(field.type, _is_in_milliseconds),
        may_overflow=has_leaf(field.type, pt.is_float32),
    )


def null_mismatch(column: str, row: int) -> SchemaMismatch:
    """Return the error of a null where none may be."""
    return SchemaMismatch(
        f"column {column!r}, row {row}: null where the primary key or a required column needs a value — give one",
        column=column,
        row=row,
    )


def shown(value: object) -> str:
    """Return a value for an error text: its representation and type, cut short."""
    return f"{errors.shown(value)} ({type(value).__name__})"


def _is_plain_zone(zone: dt.tzinfo | None) -> bool:
    """Whether times of this zone are aware and off UTC by whole seconds, whatever they are."""
    return isinstance(zone, ZoneInfo) or (isinstance(zone, dt.timezone) and not zone.utcoffset(None).microseconds)


def _widened(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.TimestampType):
        return pa.timestamp("us", kind.tz)
    return pa.float64() if pt.is_float32(kind) else kind


def _is_in_milliseconds(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.TimestampType) and kind.unit == "ms"
