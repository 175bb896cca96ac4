"""Writes are cut so that each group fits, and a row that can never fit is refused before anything happens."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.writing.write import (
    bodies_of,
    delete_of,
    insert_of,
    last_of_each_key,
    plan_slices,
    upsert_of,
)
from tests.streamingnode.append_double import DEFAULT_PARTITION_ID, decoded, schema_of, write_target
from wal.errors import TooLarge
from wal.headers import MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), blob=pa.string())


def batch_of(sizes: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"id": list(range(len(sizes))), "blob": ["x" * size for size in sizes]}, schema=SCHEMA
    )


@given(sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40), shards=st.integers(1, 4))
async def test_groups_fit_and_keep_all_rows_in_order(sizes: list[int], shards: int) -> None:
    target = write_target(SCHEMA, shards=shards)
    write = insert_of(target, DEFAULT_PARTITION_ID)
    batch = batch_of(sizes)
    bytes_max = 4096
    slices = plan_slices([batch], write, bytes_max)
    assert pa.Table.from_batches(slices).combine_chunks().equals(pa.Table.from_batches([batch]))
    by_shard: dict[str, list[int]] = {}
    for messages in bodies_of(write, [batch], bytes_max):
        assert sum(message.size_bytes for message in messages) <= bytes_max
        for message in messages:
            ids = [row["id"] for row in decoded(message, SCHEMA)]
            by_shard.setdefault(message.vchannel, []).extend(ids)  # type: ignore[arg-type]
    assert sorted(row for rows in by_shard.values() for row in rows) == list(range(len(sizes)))
    assert all(rows == sorted(rows) for rows in by_shard.values())


@pytest.mark.parametrize("kind", ["insert", "upsert"])
async def test_row_over_the_limit_is_refused_when_the_write_is_planned(kind: str) -> None:
    target = write_target(SCHEMA)
    write = (insert_of if kind == "insert" else upsert_of)(target, DEFAULT_PARTITION_ID)
    with pytest.raises(TooLarge, match="one row takes"):
        plan_slices([batch_of([10, 5000, 10])], write, 4096)


async def test_row_that_just_fits_is_taken_and_one_byte_less_is_not_enough() -> None:
    target = write_target(SCHEMA)
    write = insert_of(target, DEFAULT_PARTITION_ID)
    batch = batch_of([4000])
    exact = pa.ipc.get_record_batch_size(batch) + MESSAGE_OVERHEAD_BYTES
    (messages,) = bodies_of(write, [batch], exact)
    assert sum(message.size_bytes for message in messages) == exact
    with pytest.raises(TooLarge):
        plan_slices([batch], write, exact - 1)


async def test_upsert_deletes_its_keys_before_it_inserts_on_every_shard() -> None:
    target = write_target(SCHEMA, shards=3)
    messages = upsert_of(target, DEFAULT_PARTITION_ID).build(batch_of([1] * 20))
    kinds = [message.type for message in messages]
    assert kinds == sorted(kinds, reverse=True)
    deleted = {
        m.vchannel: [row["id"] for row in decoded(m, target.keys.schema)]
        for m in messages
        if m.type is MessageType.DELETE
    }
    inserted = {m.vchannel: [row["id"] for row in decoded(m, SCHEMA)] for m in messages if m.type is MessageType.INSERT}
    assert deleted == inserted


async def test_delete_and_insert_of_a_key_meet_on_one_shard() -> None:
    target = write_target(SCHEMA, shards=5)
    keys = pa.RecordBatch.from_pydict({"id": list(range(50))}, schema=target.keys.schema)
    deleted = {row["id"]: m.vchannel for m in delete_of(target).build(keys) for row in decoded(m, target.keys.schema)}
    inserts = insert_of(target, DEFAULT_PARTITION_ID).build(batch_of([0] * 50))
    assert {row["id"]: m.vchannel for m in inserts for row in decoded(m, SCHEMA)} == deleted


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4))
def test_last_row_of_each_key_is_what_rows_one_by_one_would_leave(batches: list[list[int]]) -> None:
    counter = iter(range(1000))
    rows: list[list[dict[str, Any]]] = [[{"id": key, "blob": str(next(counter))} for key in keys] for keys in batches]
    kept = last_of_each_key([pa.RecordBatch.from_pylist(each, schema=SCHEMA) for each in rows], 0)
    expected = {row["id"]: row["blob"] for each in rows for row in each}
    found = [row for batch in kept for row in batch.to_pylist()]
    assert {row["id"]: row["blob"] for row in found} == expected
    assert len(found) == len(expected)
    assert [int(row["blob"]) for row in found] == sorted(int(row["blob"]) for row in found)
