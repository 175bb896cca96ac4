"""Rows go to the shard of their key, whatever the batch around them looks like."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.rows import key_hashes, route
from wal.shard_hash import hash_integers, shards_of


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1), st.integers(1, 9))
def test_every_row_is_in_its_shard_once_and_in_order(keys: list[int], shards: int) -> None:
    batch = pa.RecordBatch.from_pydict({"id": pa.array(keys, pa.int64()), "row": pa.array(range(len(keys)))})
    routed = route(batch, key_index=0, shards=shards)
    expected = shards_of(hash_integers(np.array(keys, np.int64)), shards).tolist()
    found = {row: shard for shard, part in routed.parts for row in part.column(1).to_pylist()}
    assert [found[row] for row in range(len(keys))] == expected
    assert sum(part.num_rows for _, part in routed.parts) == len(keys)
    assert [shard for shard, _ in routed.parts] == sorted(set(expected))
    for _, part in routed.parts:
        rows = part.column(1).to_numpy()
        assert (rows[1:] > rows[:-1]).all()


def test_one_shard_takes_the_batch_itself() -> None:
    batch = pa.RecordBatch.from_pydict({"id": [1, 2]})
    assert route(batch, key_index=0, shards=1).parts[0][1] is batch


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pa.int8(),
            pa.int16(),
            pa.int32(),
            pa.int64(),
            pa.string(),
            pa.large_string(),
            pa.binary(),
            pa.large_binary(),
        ),
        *(pa.date32(), pa.timestamp("ms"), pa.timestamp("us", tz="UTC")),
    ],
    ids=str,
)
def test_hash_of_a_slice_is_the_slice_of_the_hashes(kind: pa.DataType) -> None:
    texts = (
        pa.array(["", "a", "bc", "def", "é", "\0"]).cast(kind)
        if "string" in str(kind) or "binary" in str(kind)
        else None
    )
    keys = texts if texts is not None else pa.array([3, -1, 0, 7, 100, 5], pa.int64()).cast(_number(kind)).cast(kind)
    hashes = key_hashes(keys)
    assert key_hashes(keys[2:5]).tolist() == hashes[2:5].tolist()
    assert key_hashes(keys[:0]).tolist() == []
    assert len(set(hashes.tolist())) == 6


def test_width_of_an_integer_or_offset_does_not_change_the_hash() -> None:
    integers = [
        key_hashes(pa.array([1, -7], kind)).tolist() for kind in (pa.int8(), pa.int32(), pa.int64(), pa.timestamp("us"))
    ]
    texts = [
        key_hashes(pa.array(["ab", "é"]).cast(kind)).tolist() for kind in (pa.string(), pa.large_string(), pa.binary())
    ]
    assert integers[0] == integers[1] == integers[2] == integers[3]
    assert texts[0] == texts[1] == texts[2]


def _number(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind == pa.date32() else pa.int64() if "timestamp" in str(kind) else kind


def test_rows_of_a_shard_keep_their_order_in_a_large_batch() -> None:
    rows = np.arange(20_000)
    batch = pa.RecordBatch.from_pydict({"id": rows % 97, "row": rows})
    for _, part in route(batch, key_index=0, shards=3).parts:
        assert (np.diff(part.column(1).to_numpy()) > 0).all()
