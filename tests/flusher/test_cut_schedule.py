"""When a cut is asked for."""

from collections.abc import Callable

import anyio
import pytest

from flusher.flusher import CutSchedule
from flusher.run import CutScheduleOptions
from wal.errors import OnShutdown, Overloaded

pytestmark = pytest.mark.anyio


class Schedule(CutSchedule):
    """Does not wait but lets something happen instead; `full` notes whether much was unflushed
    then.
    """

    def __init__(self, options: CutScheduleOptions, *happenings: Callable[[], None]) -> None:
        super().__init__(options, now_ms=lambda: 0)
        self.full: list[bool] = []
        self._happenings = list(happenings)

    def seconds_to_boundary(self) -> float:
        if self._happenings:
            self._happenings.pop(0)()
        self.full.append(self._full.is_set())
        return 0.0


class Asked:
    """Answers with cut numbers, then with the end of the log."""

    def __init__(self, *answers: int | Exception) -> None:
        self.count = 0
        self._answers = list(answers)

    async def __call__(self) -> int:
        self.count += 1
        answer = self._answers.pop(0) if self._answers else OnShutdown("closed")
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "now_ms, expected",
    [(0, 10.0), (1, 9.999), (9_999, 0.001), (10_000, 10.0), (1_700_000_003_500, 6.5)],
)
def test_boundaries_are_multiples_of_the_interval_since_the_epoch(
    now_ms: int, expected: float
) -> None:
    schedule = CutSchedule(CutScheduleOptions(interval_s=10.0), now_ms=lambda: now_ms)
    assert schedule.seconds_to_boundary() == pytest.approx(expected)


@pytest.mark.parametrize("interval_s", [0.1, 0.2, 0.3, 1.1])
def test_boundary_is_never_nearer_than_a_millisecond(interval_s: float) -> None:
    now_ms = 1_700_000_000_000
    schedule = CutSchedule(CutScheduleOptions(interval_s=interval_s), now_ms=lambda: now_ms)
    for _ in range(3_300):
        now_ms += 1
        wait_s = schedule.seconds_to_boundary()
        assert wait_s is not None
        assert 0.001 <= wait_s <= interval_s


@pytest.mark.parametrize(
    "interval_s, bytes_max", [(0.001, 2), (None, 1), (3600.0, 1)], ids=["time", "bytes", "first"]
)
async def test_a_schedule_waits_for_the_boundary_or_for_bytes(
    interval_s: float | None, bytes_max: int
) -> None:
    schedule = CutSchedule(
        CutScheduleOptions(interval_s=interval_s, bytes_max=bytes_max), now_ms=lambda: 0
    )
    schedule.report(1, 1)
    with anyio.fail_after(60):
        await schedule.run(Asked())


async def test_a_cut_asked_for_covers_its_bytes_until_the_flusher_meets_it() -> None:
    schedule = Schedule(
        CutScheduleOptions(bytes_max=100),
        lambda: schedule.report(5, 100),  # full: asks, and is told cut 5
        lambda: schedule.report(5, 150),  # on its way
        lambda: schedule.report(6, 99),  # met, and not full
        lambda: schedule.report(6, 100),  # full again
    )
    await schedule.run(Asked(5, 5, 5))
    assert schedule.full == [True, False, False, True]


async def test_a_cut_that_could_not_be_made_is_asked_for_again_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = Asked(Overloaded("not now"), 1)
    await Schedule(CutScheduleOptions()).run(asked)
    assert asked.count == 3
    assert [record.name for record in caplog.records] == ["flusher.flusher"]
