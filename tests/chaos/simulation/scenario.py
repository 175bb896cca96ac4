"""One seed: a few lives of one node, ended by kills, power cuts and in order, and the judgement of
what they left.

`run_seed` is all there is to call: equal seeds do equal things, so a seed that fails is the whole
report.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from flusher.run import FlushOptions
from tests.chaos.journal import Died
from tests.chaos.judge.entries import judge_entries
from tests.chaos.judge.verdict import judged
from tests.chaos.simulation.clients import Clients
from tests.chaos.simulation.notes import Notes
from tests.chaos.simulation.store import StoreFaults
from tests.chaos.simulation.world import Faults, World, groups_of
from wal import packer
from wal.errors import StreamingNodeError

RETENTION_S = 1e8
"""Longer than any leap of the clock."""
LIVES_MAX = 3
CALLS_MAX = 24
TURNS_OF_A_LIFE = 2500
"""About as many as an undisturbed life takes; kills come anywhere in it."""
OPENINGS_MAX = 8
"""Attempts of a life whose disk fails it at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedReport:
    """What became of a seed: `problems` is empty when all promises held."""

    seed: int
    problems: tuple[str, ...]
    trace: str
    operations: int = 0
    """Those of the history that was judged; none when there was nothing left to judge."""
    lives: int
    power_cuts: int
    turns: int
    packs: int
    """Entries with the writes of several callers."""
    packed: int
    """Writes in them."""
    packs_lost: int
    """Such entries that a power cut took."""


def run_seed(seed: int) -> SeedReport:
    """Run a seed from the beginning to its judgement."""
    with World(seed) as world:
        scenario = Scenario(world)
        problems = scenario.run()
        return SeedReport(
            seed=seed,
            problems=tuple(problems),
            trace=world.trace,
            operations=scenario.operations,
            lives=scenario.lives,
            power_cuts=scenario.power_cuts,
            turns=world.turns,
            packs=scenario.packs,
            packed=scenario.packed,
            packs_lost=world.packs_lost,
        )


class Scenario:
    """A seed in its world; `run` returns what is wrong."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.notes = Notes(world)
        self.lives = self.power_cuts = self.operations = self.packs = self.packed = 0
        self._settings = _settings(world)
        self._packing = {
            name: self._settings.pop(name) for name in ("PACKS_IN_FLIGHT_MAX", "PACK_GROUPS_MAX")
        }

    def run(self) -> list[str]:
        """Live, die, and be judged."""
        choose = self.world.choose
        try:
            for _ in range(choose.randint(1, LIVES_MAX)):
                self._live_somehow()
            self.world.faults = Faults()
            self.world.answers_left = 0
            self._live(calls=choose.randint(0, 4), turns=0, look=True)
            self._live(calls=0, turns=0, look=True)
        except Exception as error:
            return [
                *self.world.broken,
                *(f"{type(each).__name__}: {each}" for each in _leaves(error)),
            ]
        verdict = judged(self.notes.events)
        self.operations = verdict.operations
        entries = list(self.world.log_entries())
        together = [count for entry in entries if (count := groups_of(entry)) > 1]
        self.packs = len(together)
        self.packed = sum(together)
        return [*self.world.broken, *map(str, verdict.anomalies), *judge_entries(entries)]

    def _live_somehow(self) -> None:
        choose = self.world.choose
        self.world.faults = _faults(self.world)
        turns = choose.choice([0, choose.randint(1, 200), choose.randint(1, TURNS_OF_A_LIFE)])
        calls = choose.randint(1, CALLS_MAX)
        self.world.answers_left = choose.choice([0, 0, choose.randint(1, calls)])
        for _ in range(OPENINGS_MAX):
            try:
                self._live(calls=calls, turns=turns, look=False)
            except (StreamingNodeError, OSError) as error:
                if self.world.faults == Faults():
                    raise
                self.world.note("life failed", type(error).__name__)
                continue
            break
        if choose.random() < 0.5:
            self._lose_power()

    def _lose_power(self) -> None:
        self.power_cuts += 1
        self.world.lose_power()
        if self.world.syncs_late:
            self.notes.events.append(Died(self.world.now_ns(), suffix_lost=True))
            for produced in self.notes.produced.values():
                produced.answered.clear()  # what is lost with them is written again

    def _live(self, *, calls: int, turns: int, look: bool) -> None:
        self.lives += 1
        try:
            with patch.multiple(packer, **self._packing):
                self.world.live(self._life(calls, look=look), turns=turns)
        finally:
            self.notes.events.append(Died(self.world.now_ns()))

    async def _life(self, calls: int, *, look: bool) -> None:
        async with self.world.open_node(**self._settings) as node:
            clients = Clients(
                self.notes, node, self.lives, truncated=self._settings["retention_s"] == 0
            )
            if look:
                await clients.create()
            else:
                with suppress(StreamingNodeError):
                    await clients.create()
            if calls:
                await clients.work(calls)
            if look:
                await clients.reading.look("before the cut")
                await node.flush()
                await clients.reading.look("after the cut")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _settings(world: World) -> dict[str, Any]:
    choose = world.choose
    return {
        "flush": FlushOptions(retry_first_s=0.01, retry_max_s=0.3),
        "durability": "os" if world.syncs_late else "fsync",
        "cut_interval_s": choose.choice([None, 0.2, 1.0]),
        "retention_s": choose.choice([0, 0, RETENTION_S]),
        "flush.retention.interval_s": choose.choice([0.05, 1.0]),
        "ticks.interval_s": choose.choice([0.01, 0.2]),
        "tail.capacity_bytes": choose.choice([0, 1000, 1 << 20]),
        "PACKS_IN_FLIGHT_MAX": choose.choice([1, packer.PACKS_IN_FLIGHT_MAX]),
        "PACK_GROUPS_MAX": choose.choice([3, packer.PACK_GROUPS_MAX, packer.PACK_GROUPS_MAX]),
        "wal.group_bytes_max": choose.choice([1000, 4 << 20, 4 << 20]),
        "segments.rows_max": choose.choice([0, 0, 5]),
        "flush.row_group_bytes": choose.choice([200, 1 << 20]),
    }


def _faults(world: World) -> Faults:
    choose = world.choose
    return Faults(
        store=StoreFaults(write=choose.choice([0, 0, 0.01, 0.05]), reopen=choose.choice([0, 0.3])),
        files=choose.choice([0, 0, 0.01, 0.05]),
        clock_leap=choose.choice([0, 0.005, 0.05]),
    )
