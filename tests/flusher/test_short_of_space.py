"""Making room on a disk that gets short of space, step by step and with a clock that the test
turns.
"""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from flusher.directory import NodeDirectory
from flusher.flusher import SPACE_LOOK_S, SPACE_PAUSE_S, Flusher
from flusher.manifest import NO_CHECKPOINT
from tests.flusher.stamped_log import context_of
from wal.errors import OnShutdown, StorageFull
from wal.memory_store import MemoryLogStore

pytestmark = pytest.mark.anyio


class Done(Exception):
    """The test has seen enough."""


class ShortStore(MemoryLogStore):
    """A store that is short of space until `helps` says that the last step was enough."""

    def __init__(self, helps: Callable[[list[str]], bool]) -> None:
        super().__init__()
        self.steps: list[str] = []
        self._helps = helps

    @property
    def short_of_space(self) -> bool:
        return not self._helps(self.steps)


class Node(Flusher):
    """A flusher whose steps are written down and take no time."""

    @classmethod
    async def create(
        cls, root: Path, helps: Callable[[list[str]], bool], *, rounds_max: int = 6
    ) -> "Node":
        store = ShortStore(helps)
        log = await store.open_log("p0")
        node = cls(context_of(NodeDirectory(root), store, log), NO_CHECKPOINT)
        node.steps = store.steps
        node.pauses = []
        node.error = None
        node.rounds_left = rounds_max
        node.cut_made = False
        return node

    steps: list[str]
    pauses: list[float]
    error: Exception | None
    rounds_left: int
    cut_made: bool

    async def enforce_retention(self, *, short_of_space: bool = False) -> None:
        assert short_of_space
        if not self.cut_made:
            self.rounds_left -= 1
            if self.rounds_left < 0:
                raise Done
        self.cut_made = False
        self.steps.append("log")

    async def request_cut(self) -> int:
        self.steps.append("cut")
        if self.error is not None:
            raise self.error
        self.cut_made = True
        return 0

    async def pause(self, seconds: float) -> None:
        if len(self.pauses) > 100:
            raise Done
        self.pauses.append(seconds)

    async def reclaim(self) -> None:
        with patch("flusher.flusher.sleep", self.pause), pytest.raises(Done):
            await self.reclaim_space(self.request_cut)


async def test_a_disk_with_room_is_left_alone(tmp_path: Path) -> None:
    node = await Node.create(tmp_path, lambda _: True)
    await node.reclaim()
    assert node.steps == []
    assert set(node.pauses) == {SPACE_LOOK_S}


async def test_what_is_in_files_already_is_given_up_without_a_cut(tmp_path: Path) -> None:
    node = await Node.create(tmp_path, lambda steps: steps == ["log"])
    await node.reclaim()
    assert node.steps == ["log"]


async def test_a_disk_still_short_gets_a_cut_and_the_log_before_it_is_given_up(
    tmp_path: Path,
) -> None:
    node = await Node.create(tmp_path, lambda steps: steps == ["log", "cut", "log"])
    await node.reclaim()
    assert node.steps == ["log", "cut", "log"]


async def test_a_round_that_does_not_help_is_followed_by_a_pause_and_one_that_helps_by_none(
    tmp_path: Path,
) -> None:
    node = await Node.create(
        tmp_path, lambda steps: steps == ["log", "cut", "log"] * 3, rounds_max=8
    )
    await node.reclaim()
    assert node.pauses.count(SPACE_PAUSE_S) == 2


async def test_a_cut_that_finds_no_room_is_tried_again(tmp_path: Path) -> None:
    node = await Node.create(tmp_path, lambda _: False, rounds_max=3)
    node.error = StorageFull("data", 0, 1)
    await node.reclaim()
    assert node.steps == ["log", "cut"] * 3


async def test_a_closed_log_ends_the_reclaimer(tmp_path: Path) -> None:
    node = await Node.create(tmp_path, lambda _: False)
    node.error = OnShutdown("closed")
    with patch("flusher.flusher.sleep", node.pause):
        await node.reclaim_space(node.request_cut)
    assert node.steps == ["log", "cut"]
