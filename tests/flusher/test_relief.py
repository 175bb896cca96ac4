"""Making room on a disk that gets short of space, step by step and with a clock that the test turns."""

from collections.abc import Callable

import pytest

from flusher.flusher import LOOK_S, PAUSE_FIRST_S, PAUSE_MAX_S, SpaceReclaimer
from wal.errors import OnShutdown, StorageFull

pytestmark = pytest.mark.anyio


class Done(Exception):
    """The test has seen enough."""


class Node:
    """What a reclaimer acts on: short until `helps` says that the last step was enough."""

    def __init__(self, helps: Callable[[list[str]], bool], *, rounds_max: int = 6) -> None:
        self.steps: list[str] = []
        self.pauses: list[float] = []
        self.reclaimer = SpaceReclaimer(self.is_short, give_up_log=self.give_up_log, cut=self.cut, sleep=self.sleep)
        self.error: Exception | None = None
        self._helps = helps
        self._rounds_left = rounds_max
        self._after_cut = False

    def is_short(self) -> bool:
        return not self._helps(self.steps)

    async def give_up_log(self) -> None:
        if self._after_cut and self.error is None:
            self._after_cut = False
        else:
            self._after_cut, self._rounds_left = False, self._rounds_left - 1
        if self._rounds_left < 0:
            raise Done
        self.steps.append("log")

    async def cut(self) -> None:
        self.steps.append("cut")
        self._after_cut = True
        if self.error is not None:
            raise self.error

    async def sleep(self, seconds: float) -> None:
        if len(self.pauses) > 100:
            raise Done
        self.pauses.append(seconds)

    async def run(self) -> None:
        with pytest.raises(Done):
            await self.reclaimer.run()


async def test_a_disk_with_room_is_left_alone() -> None:
    node = Node(lambda _: True)
    await node.run()
    assert node.steps == []
    assert set(node.pauses) == {LOOK_S}


async def test_what_is_in_files_already_is_given_up_without_a_cut() -> None:
    node = Node(lambda steps: steps == ["log"])
    await node.run()
    assert node.steps == ["log"]


async def test_a_disk_still_short_gets_a_cut_and_the_log_before_it_is_given_up() -> None:
    node = Node(lambda steps: steps == ["log", "cut", "log"])
    await node.run()
    assert node.steps == ["log", "cut", "log"]


async def test_rounds_that_do_not_help_are_made_ever_more_seldom() -> None:
    node = Node(lambda _: False, rounds_max=8)
    await node.run()
    pauses = [pause for pause in node.pauses if pause != LOOK_S]
    assert pauses == [min(PAUSE_FIRST_S * 2**n, PAUSE_MAX_S) for n in range(len(pauses))]
    assert pauses[-1] == PAUSE_MAX_S


async def test_a_round_that_helps_makes_the_next_one_prompt() -> None:
    helped: set[int] = set()

    def third_round_helps(steps: list[str]) -> bool:
        """Only for a moment: at the next look the disk is short again."""
        helps = len(steps) in {9, 18} - helped
        helped.update({len(steps)})
        return helps

    node = Node(third_round_helps)
    await node.run()
    assert [pause for pause in node.pauses if pause != LOOK_S] == [PAUSE_FIRST_S, 2 * PAUSE_FIRST_S] * 2


async def test_a_cut_that_finds_no_room_is_tried_again() -> None:
    node = Node(lambda _: False, rounds_max=3)
    node.error = StorageFull("data", 0, 1)
    await node.run()
    assert node.steps == ["log", "cut"] * 3


async def test_a_closed_log_ends_the_reclaimer() -> None:
    node = Node(lambda _: False)
    node.error = OnShutdown("closed")
    await node.reclaimer.run()
    assert node.steps == ["log", "cut"]
