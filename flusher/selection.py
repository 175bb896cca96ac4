"""The selected part of a collection (columns, keys), which files and row groups it needs, and
deletes.

Key ranges of files and row groups, and the shard of a key, rule out files and row groups. They are
only a filter: `rows` then selects by the keys themselves, so a range that is too wide, or has
another type, only costs time. No I/O.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.manifest import OFFSET, arrow_schema
from interceptors.shard.catalog import CollectionInfo

Ends = tuple[Any, Any]
"""The smallest and the largest value of some rows, or wider bounds; None for an unknown one."""

_ORDERED = (int, str, bytes)
"""Types of keys that Python and Parquet's statistics order alike; ranges of other types are
ignored.
"""
THREADS_FROM_ROWS = 64 << 10
"""With fewer rows, decoding takes less time than its distribution to threads."""


class Selection:
    """`columns`, in this order, of the rows whose keys are in `keys` and lie on `vchannels`; None
    selects all.
    """

    def __init__(
        self,
        collection: CollectionInfo,
        *,
        columns: Sequence[str] | None = None,
        keys: "pa.Array[Any] | None" = None,
        vchannels: frozenset[str] | None = None,
    ) -> None:
        whole = arrow_schema(collection)
        self.key = collection.primary_key
        self.columns = whole.names if columns is None else list(columns)
        self.schema = pa.schema(
            [field for field in whole if field.name in {self.key, *self.columns}]
        )
        """The columns to read: also the primary key, which deletes need."""
        self._keys = keys
        self._vchannels = vchannels
        # None without keys, and for times, as Python cannot represent all of Arrow's
        self._sorted: list[Any] | None = None
        if keys is not None and not pa.types.is_temporal(keys.type):
            self._sorted = sorted(keys.unique().to_pylist())

    def may_have(self, keys: Ends | None, vchannels: Ends | None) -> bool:
        """Return whether selected rows can have keys between `keys` and vchannels between
        `vchannels`; None is unbounded.
        """
        if vchannels is not None and self._vchannels is not None:
            low, high = vchannels
            if not any(low <= each <= high for each in self._vchannels):
                return False
        return self._is_among(*keys or (None, None))

    def _is_among(self, low: Any, high: Any) -> bool:
        if not self._sorted:
            return self._sorted is None
        kind = type(self._sorted[0])
        if kind not in _ORDERED or type(low) is not kind or type(high) is not kind:
            return True
        at = bisect_left(self._sorted, low)
        return at < len(self._sorted) and bool(self._sorted[at] <= high)

    def read(self, file: pq.ParquetFile, schema: pa.Schema) -> pa.Table:
        """Return at least the columns of `schema`, which includes the key, of the row groups that
        can have selected rows.
        """
        groups = list(range(file.num_row_groups))
        footer = file.metadata
        if self._sorted is not None:
            leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
            # The field `b` of a struct `a` has the same path as a column `a.b`, but another name.
            at = next(
                index for index, leaf in enumerate(leaves) if leaf.path == leaf.name == self.key
            )
            of = [(group, footer.row_group(group).column(at).statistics) for group in groups]
            groups = [n for n, s in of if not (s and s.has_min_max) or self._is_among(s.min, s.max)]
        return file.read_row_groups(
            groups, schema.names, use_threads=footer.num_rows >= THREADS_FROM_ROWS
        )

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table whose keys are selected."""
        return (
            table
            if self._keys is None
            else table.filter(pc.is_in(table.column(self.key), value_set=self._keys))
        )


def apply_deletes(rows: pa.Table, deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
    """Return the rows without those that have a delete of their key with a greater offset; any key
    type that Arrow can hash.
    """
    return without(rows, deleted_in(deletes, key=key), key=key) if deletes else rows


def deleted_in(deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
    """Return each key in these deletes (at least one table) with the offset below which its rows
    are deleted.
    """
    found = pa.concat_tables(table.select([key, OFFSET]) for table in deletes)
    # Arrow would read a key called `.id` as the path of a nested field.
    return (
        found.rename_columns(["key", OFFSET])
        .group_by("key")
        .aggregate([(OFFSET, "max")])
        .combine_chunks()
    )


def without(rows: pa.Table, deleted: pa.Table, *, key: str) -> pa.Table:
    """Return the rows that `deleted` does not remove."""
    bound = deleted.column(f"{OFFSET}_max").take(
        pc.index_in(rows.column(key), value_set=deleted.column("key"))
    )
    return rows.filter(
        pc.or_kleene(pc.is_null(bound), pc.greater_equal(rows.column(OFFSET), bound))
    )
