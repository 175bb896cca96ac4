"""A definition that cannot be is refused in a text that somebody can read."""

import pyarrow as pa
import pytest

from streamingnode.collections import PARTITIONS_MAX, check_definition
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument

SCHEMA = schema_of(id=pa.int64())


@pytest.mark.parametrize(
    "partitions, shown",
    [
        ([f"part-{number}" for number in range(20_000)], r"'part-0', 'part-1', .*\.\.\.\] \(20000 of them\)"),
        (["same"] * (PARTITIONS_MAX - 1), r"\(1023 of them\)"),
        (["same", "same"], r"\['same', 'same'\] \(2 of them\)"),
        (["x" * 100_000] * 20_000, r"\(20000 of them\)"),
        ("x" * 100_000, "partitions='xxx"),
        (7, "partitions=7 — pass a list"),
    ],
    ids=["many", "many alike", "two alike", "long ones", "text", "number"],
)
def test_wrong_partitions_are_told_by_the_first_few_and_their_count(partitions: list[str], shown: str) -> None:
    with pytest.raises(InvalidArgument, match=shown) as caught:
        check_definition("orders", SCHEMA, primary_key="id", shards=1, partitions=partitions)
    assert len(str(caught.value)) < 500
