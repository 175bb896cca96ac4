"""Detects days and times that Spark 2 or Hive counted in the hybrid calendar, Julian before
1582-10-15.

Parquet counts days in the Gregorian calendar for all years. The footer of such a file shows that it
does not: a day that a reader takes for 1500-01-10 was written as 1500-01-01. Before 1900 the clocks
of most zones also differ, by minutes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from streamingnode.casting import leaves
from streamingnode.schema import AnyArray

ARROW_SCHEMA = b"ARROW:schema"
"""Footer key of files written by Arrow, beside the keys that Arrow kept from a file it read."""
SPARK_VERSION = b"org.apache.spark.version"
"""Footer key of files written by Spark since 2.4.6."""
SPARK_COLUMNS = b"org.apache.spark.sql.parquet.row.metadata"
"""Footer key of files written by any Spark."""
_LEGACY_DATETIME = b"org.apache.spark.legacyDateTime"
_LEGACY_INT96 = b"org.apache.spark.legacyINT96"
_SPARK_ZONE = b"org.apache.spark.timeZone"
_HIVE_IS_GREGORIAN = b"writer.date.proleptic"

_SINCE_1582_S = -12_219_292_800
"""1582-10-15, the first day with the same name in both calendars."""
_SINCE_1900_S = -2_208_988_800
"""1900-01-01: since then all zones are the same in both."""
_UTC = frozenset({b"UTC", b"Etc/UTC", b"GMT", b"Z"})
_DAY_S = 86_400
_TICKS_PER_S = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why the early values of a column may not be what they look like, and the next step."""

    before_s: int
    """Values before this are in doubt; seconds since 1970."""
    what: str
    next_step: str

    def concerns(self, array: AnyArray) -> bool:
        """Whether a date or time anywhere in the array is in doubt."""
        return any((_seconds(leaf) < self.before_s).any() for leaf in leaves(array))


def is_of_spark(footer: Mapping[bytes, bytes]) -> bool:
    """Whether Spark wrote the file or its original."""
    return SPARK_VERSION in footer or SPARK_COLUMNS in footer


def doubt_of(column: pq.ColumnSchema, footer: Mapping[bytes, bytes]) -> Doubt | None:
    """Return the doubt about a column's early values, None if they are certain."""
    if column.logical_type.type == "DATE":
        what = "a date before 1582-10-15 that was counted in the Julian calendar"
        if footer.get(_HIVE_IS_GREGORIAN) == b"false":
            next_step = "rewrite the file in Hive with hive.parquet.date.proleptic.gregorian=true"
            return Doubt(_SINCE_1582_S, what, next_step)
        if _has_old_datetimes(footer):
            return Doubt(_SINCE_1582_S, what, _in_spark("datetime", footer))
        return None

    mode = "int96" if column.physical_type == "INT96" else "datetime"
    if not _has_old_times(column, footer):
        return None
    if footer.get(_SPARK_ZONE) in _UTC:
        what = "a time before 1582-10-15 that was counted in the Julian calendar"
        return Doubt(_SINCE_1582_S, what, _in_spark(mode, footer))
    what = "a time before 1900 that was counted in the older calendar and zones of Spark 2"
    return Doubt(_SINCE_1900_S, what, _in_spark(mode, footer))


def _has_old_times(column: pq.ColumnSchema, footer: Mapping[bytes, bytes]) -> bool:
    if column.physical_type == "INT96":
        return _has_old_int96(footer)
    if column.logical_type.type != "TIMESTAMP":
        return False
    if ARROW_SCHEMA in footer:
        # Arrow may have read them from either type, and keeps no zone for INT96.
        return _has_old_datetimes(footer) or _has_old_int96(footer)
    # Spark always counts a time without a zone in the Gregorian calendar.
    is_instant = json.loads(column.logical_type.to_json())["isAdjustedToUTC"]
    return is_instant and _has_old_datetimes(footer)


def _has_old_datetimes(footer: Mapping[bytes, bytes]) -> bool:
    return _LEGACY_DATETIME in footer or _is_before(3, 0, footer)


def _has_old_int96(footer: Mapping[bytes, bytes]) -> bool:
    # Spark 3.0 used the new calendar for all types but INT96.
    return _LEGACY_INT96 in footer or _is_before(3, 1, footer)


def _is_before(major: int, minor: int, footer: Mapping[bytes, bytes]) -> bool:
    """Whether a Spark before this version wrote the file; a file without a version is from before
    2.4.6.
    """
    if not is_of_spark(footer):
        return False
    found = re.match(rb"(\d+)\.(\d+)", footer.get(SPARK_VERSION, b""))
    return found is None or (int(found[1]), int(found[2])) < (major, minor)


def _in_spark(mode: str, footer: Mapping[bytes, bytes]) -> str:
    """Return the next step. Spark needs the read setting too, for a file without a version."""
    setting = f"spark.sql.parquet.{mode}RebaseMode"
    read = "" if SPARK_VERSION in footer else f"{setting}InRead=LEGACY and "
    return f"rewrite the file in Spark 3 or later with {read}{setting}InWrite=CORRECTED"


def _seconds(values: AnyArray) -> npt.NDArray[np.int64]:
    """Return dates and times in whole seconds since 1970, rounded down; an empty array for other
    types.
    """
    present = values.drop_null()
    if pt.is_date32(present.type):
        return present.cast(pa.int32()).to_numpy().astype(np.int64) * _DAY_S
    if pt.is_date64(present.type):
        return present.cast(pa.int64()).to_numpy() // _TICKS_PER_S["ms"]
    if isinstance(present.type, pa.TimestampType):
        return present.cast(pa.int64()).to_numpy() // _TICKS_PER_S[present.type.unit]
    return np.empty(0, np.int64)
