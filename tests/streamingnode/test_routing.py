"""The hash of a key, whatever the array around it looks like: it decides the shard."""

import pyarrow as pa
import pytest

from streamingnode.rows import key_hashes


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
    keys = (
        texts
        if texts is not None
        else pa.array([3, -1, 0, 7, 100, 5], pa.int64()).cast(_number(kind)).cast(kind)
    )
    hashes = key_hashes(keys)
    assert key_hashes(keys[2:5]).tolist() == hashes[2:5].tolist()
    assert key_hashes(keys[:0]).tolist() == []
    assert len(set(hashes.tolist())) == 6


def test_width_of_an_integer_or_offset_does_not_change_the_hash() -> None:
    integers = [
        key_hashes(pa.array([1, -7], kind)).tolist()
        for kind in (pa.int8(), pa.int32(), pa.int64(), pa.timestamp("us"))
    ]
    texts = [
        key_hashes(pa.array(["ab", "é"]).cast(kind)).tolist()
        for kind in (pa.string(), pa.large_string(), pa.binary())
    ]
    assert integers[0] == integers[1] == integers[2] == integers[3]
    assert texts[0] == texts[1] == texts[2]


def _number(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind == pa.date32() else pa.int64() if "timestamp" in str(kind) else kind
