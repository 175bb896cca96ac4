"""The rows of the workload: each can be told from every other and checked against itself. Pure.

A row is (key, number, pad). The number is never used twice; the pad follows from it, so a changed
byte shows. Pads are short, as most rows are, but some span several pages, sectors and log blocks.
"""

import hashlib
from collections.abc import Iterable

import pyarrow as pa

from tests.chaos.operations import Row

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "number": pa.int64(), "pad": pa.string()}
SCHEMA = pa.schema(FIELDS)
PRIMARY_KEY = "key"
PAD_LENGTHS = (0, 1, 20, 40, 80, 120, 300, 700, 24, 25, 60, 90, 200, 2000, 5000, 36_000)

ADDED_ONLY = ("events", "left", "right")
"""Collections that are never deleted from: every row ever acknowledged is there for ever."""
REPLACED = "state"
"""The collection of upserts and deletes over few keys."""
COLLECTIONS = (*ADDED_ONLY, REPLACED)


def pad(number: int) -> str:
    """Return the text that belongs to a row's number."""
    length = PAD_LENGTHS[number % len(PAD_LENGTHS)]
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=20).hexdigest()
    return (digest * (length // len(digest) + 1))[:length]


def as_batch(rows: Iterable[Row]) -> pa.RecordBatch:
    """Return rows as the node takes them."""
    rows = list(rows)
    columns: dict[str, list[object]] = {
        "key": [row.key for row in rows],
        "number": [row.number for row in rows],
        "pad": [pad(row.number) for row in rows],
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def rows_of(table: pa.Table | pa.RecordBatch) -> tuple[list[Row], list[int]]:
    """Return the rows of Arrow data, and the numbers of those whose pad is not theirs."""
    keys = table["key"].to_numpy().tolist()
    numbers = table["number"].to_numpy().tolist()
    rows = [Row(key, number) for key, number in zip(keys, numbers, strict=True)]
    wrong = [
        row.number
        for row, text in zip(rows, table["pad"].to_pylist(), strict=True)
        if text != pad(row.number)
    ]
    return rows, wrong
