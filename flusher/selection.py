"""What of a collection is asked for: all of it, some columns, the rows of some keys; what that
reads, what deletes leave.

A file's range of keys, a row group's and the shard of a key tell where rows cannot be. They tell no
more: rows are chosen by their keys in the end, so a range that is too wide, or of another kind of
value, costs time and nothing else. No I/O.
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
"""The smallest and the largest value of some rows, or what may be beyond them; None for one that is
not known.
"""

_ORDERED = (int, str, bytes)
"""Kinds of keys that Python and Parquet's statistics order alike; others have no ranges."""
THREADS_FROM_ROWS = 64 << 10
"""Decoding fewer takes less than handing it out to threads."""


class Selection:
    """`columns`, in this order, of the rows whose keys are among `keys`, which are on `vchannels`;
    None for all.
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
        """Of what is read: with the primary key, which deletes go by."""
        self._keys = keys
        self._vchannels = vchannels
        self._sorted: list[Any] | None = None  # without ranges; Python lacks some days and times
        if keys is not None and not pa.types.is_temporal(keys.type):
            self._sorted = sorted(keys.unique().to_pylist())

    def may_have(self, keys: Ends | None, vchannels: Ends | None) -> bool:
        """Whether rows between these keys, on shards between these vchannels, may be asked for;
        None for all there are.
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
        """Return at least the columns of `schema`, which has the key, of the row groups that may
        have rows asked for.
        """
        groups = list(range(file.num_row_groups))
        footer = file.metadata
        if self._sorted is not None:
            leaves = [footer.schema.column(index) for index in range(footer.num_columns)]
            # The field `b` of a struct `a` has the path of a column `a.b`, and another name.
            at = next(
                index for index, leaf in enumerate(leaves) if leaf.path == leaf.name == self.key
            )
            of = [(group, footer.row_group(group).column(at).statistics) for group in groups]
            groups = [n for n, s in of if not (s and s.has_min_max) or self._is_among(s.min, s.max)]
        return file.read_row_groups(
            groups, schema.names, use_threads=footer.num_rows >= THREADS_FROM_ROWS
        )

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the rows of a table with these keys."""
        return (
            table
            if self._keys is None
            else table.filter(pc.is_in(table.column(self.key), value_set=self._keys))
        )


def apply_deletes(rows: pa.Table, deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
    """Return the rows that no delete of their key with a greater offset removes; any key type Arrow
    can hash.
    """
    return without(rows, deleted_in(deletes, key=key), key=key) if deletes else rows


def deleted_in(deletes: Sequence[pa.Table], *, key: str) -> pa.Table:
    """Return the keys that deletes, one table at least, remove, and beside each the offset below
    which its rows are gone.
    """
    found = pa.concat_tables(table.select([key, OFFSET]) for table in deletes)
    # Arrow would take a key called `.id` for a field inside of another.
    return (
        found.rename_columns(["key", OFFSET])
        .group_by("key")
        .aggregate([(OFFSET, "max")])
        .combine_chunks()
    )


def without(rows: pa.Table, deleted: pa.Table, *, key: str) -> pa.Table:
    """Return the rows that are not deleted."""
    bound = deleted.column(f"{OFFSET}_max").take(
        pc.index_in(rows.column(key), value_set=deleted.column("key"))
    )
    return rows.filter(
        pc.or_kleene(pc.is_null(bound), pc.greater_equal(rows.column(OFFSET), bound))
    )
