"""Names are safe in paths, and the errors say what to do."""

import pytest

from streamingnode.names import check_name
from wal.errors import InvalidArgument


@pytest.mark.parametrize("name", ["a", "0", "orders", "eu-west.1", "a_b", "x" * 128, "a.b-c_d"])
def test_name_inside_the_pattern_is_taken_as_it_is(name: str) -> None:
    assert check_name("collection", name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "x" * 129, "a..b", "..", "a/b", "-a", ".a", "a b", "a\n", "é", "a\0", "_default", "_x", None, 7]
)
def test_name_outside_the_pattern_or_reserved_is_refused(name: object) -> None:
    with pytest.raises(InvalidArgument, match="collection name"):
        check_name("collection", name)  # type: ignore[arg-type]


def test_reserved_name_is_called_reserved() -> None:
    with pytest.raises(InvalidArgument, match="reserved"):
        check_name("partition", "_default")
