"""Message ids compare within one kind of log, and survive their text form."""

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.errors import InvalidArgument
from wal.position import (
    POSITION_MAX,
    MemoryMessageId,
    RocksMessageId,
    message_id_kind,
    parse_message_id,
)

positions = st.integers(0, POSITION_MAX)


@given(positions, positions)
def test_ids_of_one_log_order_as_their_positions(a: int, b: int) -> None:
    assert (RocksMessageId(a) < RocksMessageId(b)) == (a < b)
    assert (RocksMessageId(a) <= RocksMessageId(b)) == (a <= b)
    assert (RocksMessageId(a) == RocksMessageId(b)) == (a == b)
    assert (RocksMessageId(a) > RocksMessageId(b)) == (a > b)
    assert (RocksMessageId(a) >= RocksMessageId(b)) == (a >= b)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize(
    "other", [MemoryMessageId(1), 1, None], ids=["other log", "integer", "nothing"]
)
def test_an_id_of_another_kind_cannot_be_ordered(
    compare: Callable[[object, object], bool], other: object
) -> None:
    with pytest.raises(TypeError):
        compare(RocksMessageId(1), other)


def test_equal_positions_of_two_kinds_of_log_are_not_equal() -> None:
    assert RocksMessageId(1) != MemoryMessageId(1)


@given(positions)
def test_the_text_of_an_id_gives_back_the_id(position: int) -> None:
    assert parse_message_id(str(RocksMessageId(position))) == RocksMessageId(position)


def test_base_36_text_is_what_other_tools_write() -> None:
    texts = [str(MemoryMessageId(number)) for number in (0, 35, 36, 2**63 - 1)]
    assert texts == ["memory/0", "memory/z", "memory/10", "memory/1y2p0ij32e8e7"]


@pytest.mark.parametrize("text", ["", "-1", "Z", "1 ", "1y2p0ij32e8e8", "1.0", "z" * 5000])
def test_text_that_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_message_id(f"memory/{text}")


def test_an_unknown_kind_of_log_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(InvalidArgument, match="rocks"):
        message_id_kind("woodpecker")
