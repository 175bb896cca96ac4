"""When a cut is asked for."""

from collections.abc import Callable

import anyio
import pytest

from flusher.flusher import CutSchedule, seconds_to_boundary, wait_for_event
from flusher.run import CutScheduleOptions
from wal.errors import OnShutdown, Overloaded

pytestmark = pytest.mark.anyio


class Waits:
    """Notes how long the schedule would wait, and lets something happen instead."""

    def __init__(self, *happenings: Callable[[], None]) -> None:
        self.seconds: list[float | None] = []
        self.set: list[bool] = []
        self._happenings = list(happenings)

    async def __call__(self, event: anyio.Event, seconds: float | None) -> None:
        self.seconds.append(seconds)
        if self._happenings:
            self._happenings.pop(0)()
        self.set.append(event.is_set())


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
    "now_ms, expected", [(0, 10.0), (1, 9.999), (9_999, 0.001), (10_000, 10.0), (1_700_000_003_500, 6.5)]
)
def test_boundaries_are_multiples_of_the_interval_since_the_epoch(now_ms: int, expected: float) -> None:
    assert seconds_to_boundary(now_ms, 10.0) == expected


async def test_a_schedule_without_interval_waits_for_bytes_only() -> None:
    waits = Waits()
    schedule = CutSchedule(CutScheduleOptions(interval_s=None), now_ms=lambda: 0, wait=waits)
    await schedule.run(Asked())
    assert waits.seconds == [None]


async def test_a_cut_asked_for_covers_its_bytes_until_the_flusher_meets_it() -> None:
    waits = Waits(
        lambda: schedule.report(5, 100),  # full: asks, and is told cut 5
        lambda: schedule.report(5, 150),  # on its way
        lambda: schedule.report(6, 99),  # met, and not full
        lambda: schedule.report(6, 100),  # full again
    )
    schedule = CutSchedule(CutScheduleOptions(bytes_max=100), now_ms=lambda: 0, wait=waits)
    await schedule.run(Asked(5, 5, 5))
    assert waits.set == [True, False, False, True]


async def test_a_cut_that_could_not_be_made_is_asked_for_again_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(Overloaded("not now"), 1)
    await CutSchedule(CutScheduleOptions(), now_ms=lambda: 0, wait=Waits()).run(asked)
    assert asked.count == 3
    assert [record.name for record in caplog.records] == ["flusher.flusher"]


async def test_the_real_wait_ends_with_the_event_or_the_time() -> None:
    event = anyio.Event()
    await wait_for_event(event, 0.0)
    assert not event.is_set()
    event.set()
    await wait_for_event(event, None)
