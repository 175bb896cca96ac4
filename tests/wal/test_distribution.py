from hypothesis import given
from hypothesis import strategies as st

from wal.measure import Distribution, Histogram

WIDTH = 1 + 1 / 8
"""How far above the true percentile the told one may lie."""


def test_nothing_measured_is_all_zero() -> None:
    assert Histogram().distribution() == Distribution()


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=300))
def test_percentiles_are_never_below_the_true_ones_and_at_most_a_bucket_above(
    values: list[float],
) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    found = histogram.distribution()
    ordered = sorted(values)
    assert (found.count, found.max) == (len(values), ordered[-1])
    for told, rank in [
        (found.p50, (len(values) + 1) // 2),
        (found.p99, len(values) - len(values) // 100),
    ]:
        true = ordered[rank - 1]
        assert true <= told <= max(true * WIDTH, 1e-300)


def test_total_of_all_measurements_is_exact() -> None:
    histogram = Histogram()
    for value in (1.0, 2.0, 6.0):
        histogram.record(value)
    assert histogram.distribution().total == 9.0


def test_measurement_below_nothing_counts_as_nothing() -> None:
    histogram = Histogram()
    histogram.record(-5.0)
    assert histogram.distribution() == Distribution(count=1)


@given(st.lists(st.floats(min_value=1e-6, max_value=1e6)))
def test_counts_below_powers_of_two_are_exact(values: list[float]) -> None:
    histogram = Histogram()
    bounds = [2.0**power for power in range(-12, 12, 3)]
    for value in values:
        histogram.record(value)
    assert histogram.at_most(bounds) == [sum(value < bound for value in values) for bound in bounds]
