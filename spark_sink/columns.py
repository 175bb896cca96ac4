"""The columns of a collection's table, and the value ranges in its Delta log.

A table differs from its collection in two ways: types that Spark lacks are replaced by types it
has, and four system columns follow the user's. The table, its readers and the data source all use
`table_schema`, so they agree.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from flusher.manifest import OFFSET, TICK, VCHANNEL, stored_schema
from wal.errors import Corrupt, StorageFailed

PARTITION = "_partition"

TEXT_BYTES_MAX = 128
"""Longer text gets no range in the log, as every reader reads the log at every open."""

Bound = int | str


@dataclass(frozen=True, slots=True)
class TableFile:
    """One active data file; a range is None where its writer recorded none."""

    path: str
    bytes: int
    rows: int | None
    partition: str
    key_range: tuple[int | str, int | str] | None = None
    offset_min: int | None = None
    tick_min: int | None = None
    vchannel_range: tuple[str, str] | None = None


def table_schema(collection: pa.Schema) -> pa.Schema:
    """Return the columns of a collection's table; its files have all but the last, `_partition`."""
    user = [pa.field(field.name, stored_type(field.type)) for field in collection]
    return stored_schema(pa.schema(user)).append(pa.field(PARTITION, pa.string()))


def stored_type(given: pa.DataType) -> pa.DataType:
    """Return the type in which tables and Spark store a collection's type."""
    if isinstance(given, pa.TimestampType):
        return pa.timestamp("us", tz="UTC" if given.tz else None)
    if isinstance(given, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        return pa.list_(stored_type(given.value_type))
    if isinstance(given, pa.StructType):
        return pa.struct([pa.field(field.name, stored_type(field.type)) for field in given])
    if pa.types.is_large_string(given):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(given) else given


def shaped(rows: pa.Table, schema: pa.Schema, *, partition: str = "") -> pa.Table:
    """Return rows of a file of one partition with exactly the columns and types of `schema`, which
    may have `_partition`.

    Raises `Corrupt` when a value does not fit its type: neither a flusher nor an ingest wrote it.
    """
    named = pa.chunked_array([pa.repeat(pa.scalar(partition, pa.string()), rows.num_rows)])
    try:
        columns = [
            named if field.name == PARTITION else rows[field.name].cast(field.type)
            for field in schema
        ]
    except (pa.ArrowException, KeyError) as error:
        raise Corrupt(
            f"a file of partition {partition!r} does not hold the collection's columns: {error}"
        ) from error
    return pa.Table.from_arrays(columns, schema=schema)


def stats_json(footer: pq.FileMetaData) -> str:
    """Return a Parquet file's `stats` for data skipping: row count, ranges and null counts of flat
    columns.

    A column has a range only where JSON represents it exactly and the file recorded it for every
    row group. A missing range costs a reader time; a wrong one would cost it rows.
    """
    lows: dict[str, Bound] = {}
    highs: dict[str, Bound] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        groups: list[Any] = [
            footer.row_group(group).column(index).statistics
            for group in range(footer.num_row_groups)
        ]
        if "." in name or None in [found and found.null_count for found in groups]:
            continue  # inside a list or struct, or without a count
        nulls[name] = sum(found.null_count for found in groups)
        if (bounds := _range(groups)) is not None:
            lows[name], highs[name] = bounds
    stats = {
        "numRecords": footer.num_rows,
        "minValues": lows,
        "maxValues": highs,
        "nullCount": nulls,
    }
    return msgspec.json.encode(stats).decode()


def _range(groups: list[pq.Statistics]) -> tuple[Bound, Bound] | None:
    """Return the smallest and largest value over row groups; None when one with values has no
    range.
    """
    filled = [found for found in groups if found.has_min_max]
    if not filled or any(found.num_values for found in groups if not found.has_min_max):
        return None
    try:
        ends: list[Any] = [_exact(end) for found in filled for end in (found.min, found.max)]
    except OverflowError:  # Python cannot represent every date and time of Arrow
        return None
    return None if None in ends else (min(ends), max(ends))


def _exact(value: object) -> Bound | None:
    """Return the JSON form of a value that JSON represents exactly, else None; None for floats,
    whose ranges leave out NaN.
    """
    if isinstance(value, str):
        return value if len(value.encode()) <= TEXT_BYTES_MAX else None
    return value.isoformat() if type(value) is date else value if type(value) is int else None


def file_in_log(row: dict[str, Any], key: str) -> TableFile:
    """Return an active file from its row in the Delta log; `key` is the column whose range it
    reports.
    """
    low = row.get("min") or {}
    high = row.get("max") or {}

    def ends(column: str, kind: Any) -> Any:
        """Return a column's smallest and largest value; None when unknown or of another type, such
        as a time.
        """
        found = low.get(column), high.get(column)
        return found if all(isinstance(end, kind) for end in found) else None

    return TableFile(
        path=row["path"],
        bytes=row["size_bytes"],
        rows=row["num_records"],
        partition=row["partition"][PARTITION] or "",
        key_range=ends(key, int | str),
        offset_min=low.get(OFFSET),
        tick_min=low.get(TICK),
        vchannel_range=ends(VCHANNEL, str),
    )


def place_of(root: Path, file: TableFile) -> Path:
    """Return the path of a data file of the table at `root`, after checking that it exists and has
    the logged length.

    Readers need the check: Spark reads an empty file as one without rows. Raises as `opened_file`.
    """
    top = root.resolve()
    path = top / file.path
    if not path.resolve().is_relative_to(top):
        raise Corrupt(
            f"the log of table {root} names {file.path}, which is outside it — move the table away"
        )
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        raise _missing(path) from None
    if size_bytes != file.bytes:
        raise Corrupt(
            f"{path} has {size_bytes} bytes, its table says {file.bytes} — restore the table"
        )
    return path


def _missing(path: Path) -> StorageFailed:
    return StorageFailed(
        f"{path} is missing from its table — read again, as a vacuum may have removed it, or "
        "restore the table"
    )


@contextmanager
def opened_file(root: Path, file: TableFile) -> Iterator[pq.ParquetFile]:
    """Yield a data file of the table at `root`, and type the errors that reading it in the block
    raises.

    Raises `StorageFailed` when the file is missing, `Corrupt` when it does not match the log.
    """
    path = place_of(root, file)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as content:
            count = content.metadata.num_rows
            if file.rows is not None and count != file.rows:
                raise Corrupt(
                    f"{path} has {count} rows, its table says {file.rows} — restore the table"
                )
            yield content
    except FileNotFoundError:
        raise _missing(path) from None
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error} — restore the table") from error
