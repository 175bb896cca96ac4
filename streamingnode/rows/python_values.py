"""Which Python values a column takes, checked a column at a time before Arrow sees them.

Arrow alone would turn 1.5 into the integer 1, drop a field of a struct it does not know, and read bytes as text, all
silently. In: the values of one column, row by row. Out: nothing, or the `SchemaMismatch` of the first row to blame. The
fast path is one set of types per column; nothing is looked at twice unless a type is unusual. No I/O.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from numbers import Integral, Real
from types import NoneType

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from streamingnode.rows.arrow_types import AnyField, child_fields
from streamingnode.rows.schema import is_bytes, is_list, is_text
from wal import errors
from wal.errors import SchemaMismatch

Values = Sequence[object]


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Python types that one Arrow type takes: `usual` ones at once, others when they are `similar` and not `never`."""

    usual: frozenset[type]
    similar: tuple[type, ...]
    never: tuple[type, ...] = ()


_INTEGER = ValueKind(frozenset({int}), (Integral,), (bool,))
_FLOAT = ValueKind(frozenset({float, int}), (Real,), (bool,))
_BOOLEAN = ValueKind(frozenset({bool}), (np.bool_,))
_TEXT = ValueKind(frozenset({str}), (str,))
_BYTES = ValueKind(frozenset({bytes}), (bytes, bytearray, memoryview))
_DATE = ValueKind(frozenset({dt.date}), (dt.date,), (dt.datetime,))
_TIMESTAMP = ValueKind(frozenset({dt.datetime, int}), (dt.datetime, np.datetime64, Integral), (bool,))
_DECIMAL = ValueKind(frozenset({Decimal, int}), (Decimal, Integral), (bool,))
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

    def check(self, values: Values) -> None:
        """Raise `SchemaMismatch`, with the row, for the first value that this column does not take."""
        unusual = set(map(type, values)) - self.accepted
        if unusual and not all(map(self._takes, unusual)):
            raise self._mismatch(values)
        if self.inner and not self._inner_fits(values):
            raise self._nested_mismatch(values)

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

    def _inner_fits(self, values: Values) -> bool:
        try:
            self._check_inner([value for value in values if value is not None])
        except SchemaMismatch:
            return False
        return True

    def _check_inner(self, values: Values) -> None:
        if self.kind is _LIST:
            self.inner[0].check(list(chain.from_iterable(values)))  # type: ignore[arg-type]
            return
        names = {inner.column.rpartition(".")[2]: inner for inner in self.inner}
        for value in values:
            assert isinstance(value, dict)
            if value.keys() != names.keys():
                raise SchemaMismatch(
                    f"the fields are {shown(sorted(map(str, value)))}, the schema's are {', '.join(names)}",
                    column=self.column,
                )
        for name, inner in names.items():
            inner.check([value[name] for value in values])  # type: ignore[index]

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
    inner: tuple[ColumnValues, ...] = ()
    if _is_lossy_inside(field.type):
        inner = tuple(
            column_values(child, nullable=child.nullable, path=f"{name}.") for child in child_fields(field.type)
        )
    accepted = kind.usual | {NoneType} if nullable else kind.usual
    return ColumnValues(name, field.type, nullable, kind, accepted, inner)


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


def _is_lossy_inside(kind: pa.DataType) -> bool:
    """Whether Arrow might change nested values silently; lists of floats, text and so on are left to Arrow, for speed."""
    if pt.is_struct(kind):
        return True
    if not is_list(kind):
        return False
    item: pa.DataType = kind.field(0).type
    return (
        pt.is_integer(item) or pt.is_date32(item) or pt.is_timestamp(item) or is_bytes(item) or _is_lossy_inside(item)
    )
