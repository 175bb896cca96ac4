import pytest

from interceptors.shard.state import SegmentStats


def filled(size_bytes: int, rows: int = 1, **limits: int) -> SegmentStats:
    return SegmentStats(**({"bytes_max": 400} | limits)).add(rows, size_bytes, tick=1)


def test_insert_that_crosses_the_limit_is_taken_and_is_the_last() -> None:
    stats = filled(200, 100)
    assert not stats.add(60, 120, tick=2).reached
    assert stats.add(100, 100, tick=3).reached
    assert (stats.rows, stats.bytes, stats.changed_tick) == (260, 420, 3)


def test_hitting_a_limit_exactly_keeps_the_segment_open() -> None:
    assert not filled(400).reached
    assert not filled(0, rows=10, rows_max=10).reached


def test_first_insert_over_the_limit_fills_the_segment() -> None:
    assert filled(401).reached


@pytest.mark.parametrize("rows, reached", [(10, False), (11, True)])
def test_row_limit_fills_the_segment_like_the_byte_limit(rows: int, *, reached: bool) -> None:
    assert filled(0, rows=rows, rows_max=10).reached is reached


def test_row_limit_of_zero_is_no_limit() -> None:
    assert not filled(0, rows=1 << 40, rows_max=0).reached
