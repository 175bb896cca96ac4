"""Explains why JSON is not a valid row, where the decoder's error is unclear. No I/O.

Programs that write logs quote values twice, leave zones out of times, and cut characters in two. A
decoder names a type or a byte. To correct the program, its author needs the column, the value in
it, and the expected value.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.types as pt

from streamingnode.schema import child_fields, is_list, row_decoder
from wal.errors import shown

_QUOTES_MAX = 3
_JSON_KINDS: dict[type, str] = {
    dict: "a JSON object",
    list: "a JSON array",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    str: "a text",
}


class Mistake(NamedTuple):
    """The mistake, and what to do. `column` has the names of nested fields after dots; None means
    the whole text.
    """

    column: str | None
    found: str
    next_step: str


def mistake_in(text: bytes, schema: pa.Schema | None = None) -> Mistake | None:
    """Return the mistake in JSON that is not a row of a schema; None if it is none of these."""
    try:
        value = json.loads(text)
        if (half := next(_halves(value), None)) is not None:
            column, letter = half
            found = f"{shown(letter)} is half of a surrogate pair, which is no character"
            return Mistake(column or None, found, "write both halves, or leave it out")
        if isinstance(value, str):
            return _quoted_whole(value)
        for field in schema if schema is not None and isinstance(value, dict) else ():
            mistake = _of_column(field.name, field.type, value.get(field.name))
            if mistake is not None:
                return mistake
    except (ValueError, RecursionError):
        return None
    return None


def json_kind(value: object) -> str:
    """Return the JSON type of a value, with its article."""
    return _JSON_KINDS.get(type(value), "null")


def _halves(value: object, column: str = "") -> Iterator[tuple[str, str]]:
    """Yield halves of surrogate pairs, and the columns they are in."""
    if isinstance(value, str):
        yield from ((column, letter) for letter in value if "\ud800" <= letter <= "\udfff")
    elif isinstance(value, list):
        for item in value:
            yield from _halves(item, column)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _halves(name, column)
            yield from _halves(inner, f"{column}.{name}" if column else name)


def _quoted_whole(value: str) -> Mistake | None:
    inner: Any = value
    for _ in range(_QUOTES_MAX):
        if isinstance(inner, str):
            inner = json.loads(inner)
    if not isinstance(inner, dict):
        return None
    found = "it is a text with a JSON object in it"
    return Mistake(None, found, "write the object itself, without quotes around it")


def _of_column(column: str, kind: pa.DataType, value: Any) -> Mistake | None:
    """Return the mistake in a value of a column, or of a field or list inside it."""
    if value is None or _fits(kind, value):
        return None
    if isinstance(value, str):
        return _of_time(column, kind, value) or _of_quotes(column, kind, value)
    inside: list[tuple[str, pa.DataType, Any]] = []
    if pt.is_struct(kind) and isinstance(value, dict):
        fields = child_fields(kind)
        inside = [(f"{column}.{each.name}", each.type, value.get(each.name)) for each in fields]
    elif is_list(kind) and isinstance(value, list):
        inside = [(column, kind.field(0).type, item) for item in value]
    return next((found for each in inside if (found := _of_column(*each)) is not None), None)


def _of_time(column: str, kind: pa.DataType, value: str) -> Mistake | None:
    if not isinstance(kind, pa.TimestampType):
        return None
    if kind.tz is not None and _fits(pa.timestamp("us"), value):
        found = f"the time {shown(value)} has no zone, the column has one"
        return Mistake(column, found, "add Z, or an offset such as +01:00")
    if kind.tz is None and _fits(pa.timestamp("us", "UTC"), value):
        found = f"the time {shown(value)} has a zone, the column has none"
        return Mistake(column, found, "write all times in one zone, without it")
    return None


def _of_quotes(column: str, kind: pa.DataType, value: str) -> Mistake | None:
    is_nested = pt.is_struct(kind) or is_list(kind)
    inner: Any = value
    for quoted in range(1, _QUOTES_MAX + 1):
        try:
            inner = json.loads(inner)
        except ValueError:
            return None
        belongs = is_nested and isinstance(inner, dict | list)  # also with mistakes inside
        if inner is not None and (belongs or _fits(kind, inner)):
            is_twice = quoted > 1 or isinstance(inner, str)
            what = f"{json_kind(inner)} {'quoted twice' if is_twice else 'in quotes'}"
            found = f"the text {shown(value)} where {kind} belongs is {what}"
            return Mistake(column, found, "write the value itself, without quotes around it")
        if not isinstance(inner, str):
            return None
    return None


def _fits(kind: pa.DataType, value: object) -> bool:
    try:
        _decoder(kind)(json.dumps({"v": value}).encode())
    except (msgspec.MsgspecError, ValueError):
        return False
    return True


@lru_cache(64)
def _decoder(kind: pa.DataType) -> Any:
    return row_decoder(pa.schema([pa.field("v", kind)]))
