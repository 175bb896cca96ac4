"""The judge of a soak: figures by least squares, verdicts only from runs that are long enough for
them.
"""

import pytest

from tests.chaos.gates.soak import (
    DESCRIPTORS_S_MIN,
    DRIFT_S_MIN,
    IN_USE_S_MIN,
    SLOPE_S_MIN,
    WARM_UP_S,
    after_warm_up,
    judge,
    slope_mib_per_h,
)
from tests.chaos.memory_use import in_use_bytes
from tests.chaos.soak import Sample

MIB = 1 << 20
STEP_S = 60.0


def samples(
    seconds: float,
    *,
    mib_per_h: float = 0.0,
    in_use_mib_per_h: float = 0.0,
    descriptors_per_h: float = 0.0,
    slower: float = 0.0,
) -> list[Sample]:
    return [
        Sample(
            at_s=1_000.0 + number * STEP_S,
            resident_bytes=100 * MIB
            + int(mib_per_h * MIB * number * STEP_S / 3600)
            + (number % 2) * MIB,
            in_use_bytes=60 * MIB
            + int(in_use_mib_per_h * MIB * number * STEP_S / 3600)
            + (number % 3) * MIB,
            descriptors=40 + int(descriptors_per_h * number * STEP_S / 3600) + number % 3,
            disk_bytes=30 * MIB,
            inserts=number,
            read=number,
            p99_s=0.002 * (1 + slower * number * STEP_S / seconds),
        )
        for number in range(int(seconds / STEP_S) + 1)
    ]


LONG_S = WARM_UP_S + max(SLOPE_S_MIN, DESCRIPTORS_S_MIN, DRIFT_S_MIN) + STEP_S


def test_a_steady_run_that_is_long_enough_breaks_nothing_and_says_so() -> None:
    figures, broken, undecided = judge(samples(LONG_S))
    assert (broken, undecided) == ([], ())
    assert not [figure for figure in figures if "no verdict" in figure]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"mib_per_h": 2.0}, "memory"),
        ({"mib_per_h": 30.0}, "memory resident"),
        ({"in_use_mib_per_h": 2.0}, "memory"),
        ({"descriptors_per_h": 2.0}, "descriptors"),
        ({"slower": 0.5}, "p99"),
    ],
    ids=["memory", "resident memory", "memory in use", "descriptors", "time"],
)
def test_what_grows_in_a_long_run_is_found_and_in_a_short_one_only_told(
    change: dict[str, float], said: str
) -> None:
    _, broken, _ = judge(samples(LONG_S, **change))
    assert " ".join(text.split()[0] for text in broken) == said
    figures, broken, undecided = judge(samples(WARM_UP_S + DESCRIPTORS_S_MIN / 2, **change))
    assert broken == []
    assert sum("no verdict" in figure for figure in figures) == len(undecided) == 5


def test_an_hour_judges_how_far_resident_memory_grows_and_leaves_its_slope_open() -> None:
    an_hour_s = WARM_UP_S + IN_USE_S_MIN + STEP_S
    _, broken, undecided = judge(samples(an_hour_s, mib_per_h=200.0))
    assert [text.split(" goes")[0] for text in broken] == ["resident memory"]
    assert undecided == ("the slope of resident memory",)


def test_the_slope_is_that_of_the_line_through_the_samples() -> None:
    slope, error = slope_mib_per_h(
        samples(36_000, mib_per_h=3.0), lambda sample: sample.resident_bytes
    )
    assert slope == pytest.approx(3.0, abs=0.05)
    assert error < 0.1


def test_what_is_in_use_follows_what_is_taken_and_given_back() -> None:
    before = in_use_bytes()
    taken = bytearray(64 * MIB)
    assert in_use_bytes() - before >= len(taken)
    del taken
    assert in_use_bytes() - before < 8 * MIB


def test_warm_up_is_left_out_and_at_most_a_third_of_a_short_run() -> None:
    assert after_warm_up(samples(36_000))[0].at_s == 1_000 + WARM_UP_S
    assert after_warm_up(samples(360))[0].at_s == 1_000 + 120
    figures, broken, undecided = judge([])
    assert (figures, broken, len(undecided)) == (["too short for any figure"], [], 5)
