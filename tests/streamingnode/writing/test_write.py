"""Writes are cut so that each group fits, and a row that can never fit is refused before anything
happens.
"""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import CollectionNotFound
from streamingnode.writing.target import PLAIN_ROWS_MAX, Kind, messages_of
from streamingnode.writing.write import (
    Write,
    append_rows,
    last_of_each_key,
    messages_within,
)
from tests.streamingnode.append_double import (
    AppendDouble,
    Logged,
    collection_info,
    decoded,
    messages_in,
    schema_of,
    write_target,
    writes_on,
)
from wal.append import AppendGroup
from wal.errors import Indeterminate, StorageFull, StreamingNodeError, TooLarge
from wal.headers import DML, MessageType
from wal.message import MESSAGE_OVERHEAD_BYTES

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), blob=pa.string())
TEXT_KEYS = schema_of(id=pa.string(), count=pa.int64())


def batch_of(sizes: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"id": list(range(len(sizes))), "blob": ["x" * size for size in sizes]}, schema=SCHEMA
    )


def bodies_in(group: AppendGroup) -> list[Logged]:
    return [message for message in messages_in(group) if message.type in DML]


def writing(kind: Kind, schema: pa.Schema = SCHEMA, *, shards: int = 1) -> Write:
    return Write(kind, write_target(schema, shards=shards).into(kind))


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    shards=st.integers(1, 4),
    kind=st.sampled_from(["insert", "upsert"]),
)
async def test_groups_fit_and_keep_all_rows_in_order(
    sizes: list[int], shards: int, kind: Kind
) -> None:
    write = writing(kind, shards=shards)
    batch = batch_of(sizes)
    bytes_max = 4096
    slices = write.slices([batch], bytes_max)
    assert pa.Table.from_batches(slices).combine_chunks().equals(pa.Table.from_batches([batch]))
    by_shard: dict[str, list[int]] = {}
    for group in (write.group(write.pieces(rows)) for rows in slices):
        assert group.size_bytes <= bytes_max
        messages = messages_in(group)
        assert sum(message.size_bytes for message in messages) <= bytes_max
        for message in messages:
            if message.type is MessageType.INSERT:
                ids = [row["id"] for row in decoded(message, SCHEMA)]
                by_shard.setdefault(message.vchannel, []).extend(ids)  # type: ignore[arg-type]
    assert sorted(row for rows in by_shard.values() for row in rows) == list(range(len(sizes)))
    assert all(rows == sorted(rows) for rows in by_shard.values())


TYPES: tuple[tuple[Any, st.SearchStrategy[Any]], ...] = (
    (pa.int8(), st.integers(0, 9)),
    (pa.bool_(), st.booleans()),
    (pa.large_binary(), st.binary(max_size=20)),
    (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    (
        pa.struct([("a", pa.bool_()), ("b", pa.list_(pa.int8()))]),
        st.just({"a": None, "b": [1, None]}),
    ),
)


@given(data=st.data(), shards=st.integers(1, 256), kind=st.sampled_from(["insert", "upsert"]))
async def test_messages_take_no_more_than_was_planned_whatever_the_types(
    data: st.DataObject, shards: int, kind: Kind
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(TYPES), max_size=6))
    count = data.draw(st.integers(1, 60))
    schema = pa.schema(
        [("id", pa.string()), *((f"c{i}", each) for i, (each, _) in enumerate(kinds))]
    )
    columns = [
        data.draw(st.lists(st.none() | values, min_size=count, max_size=count))
        for _, values in kinds
    ]
    arrays = [pa.array(values, each) for values, (each, _) in zip(columns, kinds, strict=True)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([str(number) for number in range(count)]), *arrays], schema=schema
    )
    rows = batch.slice(data.draw(st.integers(0, count - 1)))
    write = writing(kind, schema, shards=shards)
    size_bytes = sum(message.size_bytes for message in messages_of(write.pieces(rows), 1))
    assert size_bytes <= write.size_bytes(rows)
    assert size_bytes == write.size_bytes(rows) or rows.num_rows > 1


@given(
    texts=st.lists(
        st.text(max_size=1_000) | st.just("x" * 5_900), min_size=1, max_size=PLAIN_ROWS_MAX
    ),
    shards=st.integers(1, 8),
    kind=st.sampled_from(["insert", "upsert", "delete"]),
)
def test_plain_rows_fit_a_group_however_they_are_encoded_or_are_none(
    texts: list[str], shards: int, kind: Kind
) -> None:
    write = writing(kind, TEXT_KEYS, shards=shards)
    bytes_max = 30_000
    keys = [f"{number}{text}" for number, text in enumerate(texts)]
    pieces = write.plain(
        keys if kind == "delete" else [{"id": key, "count": 1} for key in keys], bytes_max
    )
    if pieces is None:
        assert sum(len(key.encode()) for key in keys) * 2 > bytes_max / 4
    else:
        group = write.group(pieces)
        assert group.size_bytes <= bytes_max
        assert sum(message.size_bytes for message in messages_in(group)) <= bytes_max
        assert sum(message.size_bytes for message in messages_of(pieces, 1)) <= bytes_max


@given(sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=40))
def test_bodies_that_are_streamed_go_in_groups_that_fit_and_in_order(sizes: list[int]) -> None:
    write = writing("insert")
    pieces = [
        piece
        for size in sizes
        for piece in write.plain([{"id": size, "blob": "x" * size}], 1 << 20) or ()
    ]
    groups = list(messages_within(messages_of(pieces, 1), 4_096))
    assert all(sum(message.size_bytes for message in group) <= 4_096 for group in groups)
    assert [
        row["id"] for group in groups for message in group for row in decoded(message, SCHEMA)
    ] == sizes


@pytest.mark.parametrize("kind", ["insert", "upsert"])
async def test_row_over_the_limit_is_refused_when_the_write_is_planned(kind: Kind) -> None:
    with pytest.raises(TooLarge, match="one row takes"):
        writing(kind).slices([batch_of([10, 5000, 10])], 4096)


@pytest.mark.parametrize("refusal", [StorageFull("data", 0, 1), CollectionNotFound("orders")])
async def test_write_of_which_some_groups_are_in_log_is_in_doubt_whatever_the_next_is_refused_for(
    refusal: StreamingNodeError,
) -> None:
    log = AppendDouble()
    writes = writes_on(log, collection_info(SCHEMA), group_bytes_max=4096)
    log.refuse = lambda _: refusal if len(log.groups) == 2 else None
    with pytest.raises(Indeterminate, match="2 groups of the insert are in the log") as caught:
        await append_rows(
            writes, writes.write("insert", "orders"), batch_of([3000] * 4), timeout=None
        )
    assert caught.value.__cause__ is refusal
    assert [row["id"] for row in log.rows(SCHEMA)] == [0, 1]


@pytest.mark.parametrize("kind", ["insert", "upsert", "delete"])
async def test_a_write_by_transaction_id_is_one_group_or_too_large_and_does_nothing(
    kind: Kind,
) -> None:
    log = AppendDouble()
    writes = writes_on(log, collection_info(SCHEMA), group_bytes_max=4096)
    write = writes.write(kind, "orders", txn_id=9)
    rows: Any = list(range(2_000)) if kind == "delete" else batch_of([3000] * 3)
    with pytest.raises(TooLarge, match=r"one append group .* async with node\.transaction\(\)"):
        await append_rows(writes, write, rows, timeout=None)
    assert log.groups == []


@pytest.mark.parametrize("kind", ["insert", "upsert"])
async def test_batches_of_a_write_by_transaction_id_go_together_if_they_fit(kind: Kind) -> None:
    log = AppendDouble()
    writes = writes_on(log, collection_info(SCHEMA), group_bytes_max=8192)
    batch = batch_of([100, 200])
    table = pa.Table.from_batches([batch.slice(0, 1), batch.slice(1)])
    await append_rows(writes, writes.write(kind, "orders", txn_id=9), table, timeout=None)
    assert len(log.groups) == 1
    assert [row["id"] for row in log.rows(SCHEMA)] == [0, 1]


def test_batches_that_fit_only_apart_are_too_large_for_one_group() -> None:
    """Rows without nulls have no bitmap, until they are joined with a row that has one."""
    schema = schema_of(id=pa.int64(), flag=pa.bool_())
    write = writing("insert", schema)
    many = pa.RecordBatch.from_pydict({"id": list(range(40_000)), "flag": [True] * 40_000}, schema)
    one = pa.RecordBatch.from_pydict({"id": [40_000], "flag": [None]}, schema)
    together = write.size_bytes(many) + write.size_bytes(one)
    with pytest.raises(TooLarge):
        write.whole([many, one], together)
    assert write.whole([many, one], 2 * together).num_rows == 40_001


async def test_row_that_just_fits_is_taken_and_one_byte_less_is_not_enough() -> None:
    write = writing("insert")
    batch = batch_of([4000])
    exact = pa.ipc.get_record_batch_size(batch) + MESSAGE_OVERHEAD_BYTES
    (rows,) = write.slices([batch], exact)
    assert write.group(write.pieces(rows)).size_bytes == exact
    with pytest.raises(TooLarge):
        write.slices([batch], exact - 1)


async def test_upsert_deletes_its_keys_before_it_inserts_on_every_shard() -> None:
    write = writing("upsert", shards=3)
    messages = bodies_in(write.group(write.pieces(batch_of([1] * 20))))
    keys = write.into[0].shape.schema
    kinds = [message.type for message in messages]
    assert kinds == sorted(kinds, reverse=True)
    deleted = {
        m.vchannel: [row["id"] for row in decoded(m, keys)]
        for m in messages
        if m.type is MessageType.DELETE
    }
    inserted = {
        m.vchannel: [row["id"] for row in decoded(m, SCHEMA)]
        for m in messages
        if m.type is MessageType.INSERT
    }
    assert deleted == inserted


async def test_delete_and_insert_of_a_key_meet_on_one_shard() -> None:
    delete = writing("delete", shards=5)
    insert = writing("insert", shards=5)
    schema = delete.into[0].shape.schema
    keys = pa.RecordBatch.from_pydict({"id": list(range(50))}, schema=schema)
    deleted = {
        row["id"]: m.vchannel
        for m in messages_in(delete.group(delete.pieces(keys)))
        for row in decoded(m, schema)
    }
    inserts = messages_in(insert.group(insert.pieces(batch_of([0] * 50))))
    assert {row["id"]: m.vchannel for m in inserts for row in decoded(m, SCHEMA)} == deleted


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), min_size=1, max_size=4))
def test_last_row_of_each_key_is_what_rows_one_by_one_would_leave(batches: list[list[int]]) -> None:
    counter = iter(range(1000))
    rows: list[list[dict[str, Any]]] = [
        [{"id": key, "blob": str(next(counter))} for key in keys] for keys in batches
    ]
    kept = last_of_each_key([pa.RecordBatch.from_pylist(each, schema=SCHEMA) for each in rows], 0)
    expected = {row["id"]: row["blob"] for each in rows for row in each}
    found = [row for batch in kept for row in batch.to_pylist()]
    assert {row["id"]: row["blob"] for row in found} == expected
    assert len(found) == len(expected)
    assert [int(row["blob"]) for row in found] == sorted(int(row["blob"]) for row in found)
