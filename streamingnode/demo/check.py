"""Whether tables hold exactly what the node acknowledged. Pure: two tables in, what differs out."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

DIFFERENCES_MAX = 10
"""Enough to see the kind of damage; the rest would scroll it away."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison; it passed when nothing differs. `differences` holds the first few."""

    what: str
    rows: int
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the table is what was acknowledged."""
        return not self.differences


def check_count(what: str, *, acknowledged: int, found: int) -> Check:
    """Compare numbers of rows."""
    differences = () if found == acknowledged else (f"{acknowledged} rows were acknowledged, the table has {found}",)
    return Check(what, found, differences)


def check_rows(what: str, *, acknowledged: pa.Table, found: pa.Table, key: str) -> Check:
    """Compare all columns of all rows; `key` is the column that identifies a row, and `found` may have more columns."""
    wanted = acknowledged.sort_by(key).combine_chunks()
    have = found.select(wanted.column_names).cast(wanted.schema).sort_by(key).combine_chunks()
    if have.equals(wanted):
        return Check(what, have.num_rows, ())
    return Check(what, have.num_rows, tuple(islice(_differences(wanted, have, key), DIFFERENCES_MAX)))


def _differences(wanted: pa.Table, have: pa.Table, key: str) -> Iterator[str]:
    acknowledged, found = _by_key(wanted, key), _by_key(have, key)
    for value in sorted(acknowledged.keys() | found.keys()):
        before, after = acknowledged.get(value, []), found.get(value, [])
        if before != after:
            yield f"{key} {value}: acknowledged {_shown(before)}, the table has {_shown(after)}"


def _by_key(table: pa.Table, key: str) -> dict[int, list[dict[str, object]]]:
    rows: dict[int, list[dict[str, object]]] = {}
    for row in table.to_pylist():
        rows.setdefault(row[key], []).append(row)
    return rows


def _shown(rows: list[dict[str, object]]) -> str:
    return " and ".join(str(row) for row in rows) or "nothing"
