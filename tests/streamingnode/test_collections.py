"""A definition that cannot be is refused in a text that somebody can read, and names are safe in
paths.
"""

import pyarrow as pa
import pytest

from interceptors.shard.catalog import PARTITIONS_MAX
from streamingnode.collections import Definition, check_name
from tests.streamingnode.append_double import schema_of
from wal.errors import InvalidArgument

SCHEMA = schema_of(id=pa.int64())


@pytest.mark.parametrize(
    "partitions, shown",
    [
        (
            [f"part-{number}" for number in range(20_000)],
            r"'part-0', 'part-1', .*up to 1023 different",
        ),
        (["same"] * (PARTITIONS_MAX - 1), "up to 1023 different"),
        (["same", "same"], r"\['same', 'same'\]"),
        (["x" * 100_000] * 20_000, "1 to 128 of a-z"),
        ("x" * 100_000, "partitions='xxx"),
        (7, "partitions=7 — pass a list"),
    ],
    ids=["many", "many alike", "two alike", "long ones", "text", "number"],
)
def test_wrong_partitions_are_told_by_the_first_few(partitions: list[str], shown: str) -> None:
    with pytest.raises(InvalidArgument, match=shown) as caught:
        Definition("orders", SCHEMA, "id", 1, partitions).checked()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["a", "0", "orders", "eu-west.1", "a_b", "x" * 128, "a.b-c_d"])
def test_name_inside_the_pattern_is_taken_as_it_is(name: str) -> None:
    assert check_name("collection", name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "x" * 129,
        "a..b",
        "..",
        "a/b",
        "-a",
        ".a",
        "a b",
        "a\n",
        "é",
        "a\0",
        "_default",
        "_x",
        None,
        7,
    ],
)
def test_name_outside_the_pattern_or_reserved_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgument, match="collection name"):
        check_name("collection", name)  # type: ignore[arg-type]


def test_reserved_name_is_called_reserved() -> None:
    with pytest.raises(InvalidArgument, match="reserved"):
        check_name("partition", "_default")
