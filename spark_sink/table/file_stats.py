"""What a Delta log says about a Parquet file so that readers can skip it: row count, smallest and largest value per column.

Pure: from a Parquet footer to the JSON text Delta stores. A column gets a range only where JSON can hold it exactly and the
file recorded it for every row group; leaving one out costs a reader time, a wrong one costs it rows.
"""

import math
from datetime import date

import msgspec
import pyarrow.parquet as pq

TEXT_BYTES_MAX = 128
"""A longer text is left out: the log is read by every reader at every open."""

Bound = int | float | str


def stats_json(footer: pq.FileMetaData) -> str:
    """Return the `stats` of a file: `numRecords`, `minValues`, `maxValues`, `nullCount` of its flat columns."""
    lows: dict[str, Bound] = {}
    highs: dict[str, Bound] = {}
    nulls: dict[str, int] = {}
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        if column.path != column.name or column.max_repetition_level or "." in column.path:
            continue  # inside a list, map or struct
        groups = [footer.row_group(group).column(index).statistics for group in range(footer.num_row_groups)]
        counted = [found.null_count for found in groups if found is not None and found.null_count is not None]
        if len(counted) < len(groups):
            continue
        nulls[column.name] = sum(counted)
        bounds = _range([found for found in groups if found is not None])
        if bounds is not None:
            lows[column.name], highs[column.name] = bounds
    stats = {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}
    return msgspec.json.encode(stats).decode()


def _range(groups: list[pq.Statistics]) -> tuple[Bound, Bound] | None:
    """Return the smallest and largest value over row groups, None where one of them does not say."""
    filled = [found for found in groups if found.has_min_max]
    if not filled or any(found.num_values for found in groups if not found.has_min_max):
        return None
    ends = [_exact(end) for found in filled for end in (found.min, found.max)]
    numbers = [end for end in ends if isinstance(end, int | float)]
    texts = [end for end in ends if isinstance(end, str)]
    if len(numbers) == len(ends):
        return min(numbers), max(numbers)
    if len(texts) == len(ends):
        return min(texts), max(texts)
    return None


def _exact(value: object) -> Bound | None:
    """Return the JSON form of a value that JSON holds exactly; None for the others (decimals, bytes, timestamps)."""
    match value:
        case bool():
            return None
        case int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case str():
            return value if len(value.encode()) <= TEXT_BYTES_MAX else None
        case date() if type(value) is date:
            return value.isoformat()
        case _:
            return None
