"""One seed: a few lives of one node, ended by kills, power cuts and in order, and the judgement of what they left.

`run_seed` is all there is to call: equal seeds do equal things, so a seed that fails is the whole report.
"""

from contextlib import suppress
from dataclasses import dataclass

from bench.chaos.history import Anomaly, check
from bench.chaos.simulation.clients import Clients, History
from bench.chaos.simulation.store import StoreFaults
from bench.chaos.simulation.virtual_loop import Stuck
from bench.chaos.simulation.world import Faults, PromiseBroken, World
from wal.errors import StreamingNodeError

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
    calls: int
    lives: int
    power_cuts: int
    turns: int


def run_seed(seed: int) -> SeedReport:
    """Run a seed from the beginning to its judgement."""
    with World(seed) as world:
        scenario = Scenario(world)
        problems = scenario.run()
        return SeedReport(
            seed=seed,
            problems=tuple(problems),
            trace=world.trace,
            calls=scenario.history.ops,
            lives=scenario.lives,
            power_cuts=scenario.power_cuts,
            turns=world.turns,
        )


class Scenario:
    """A seed in its world; `run` returns what is wrong."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history = History()
        self.lives = self.power_cuts = 0
        self._settings = _settings(world)

    def run(self) -> list[str]:
        """Live, die, and be judged."""
        choose = self.world.choose
        try:
            for _ in range(choose.randint(1, LIVES_MAX)):
                self._live_somehow()
            self.world.faults = Faults()
            self._live(calls=choose.randint(0, 4), turns=0, look=True)
            self._live(calls=0, turns=0, look=True)
        except (PromiseBroken, Stuck, AssertionError, StreamingNodeError) as error:
            return [*self.world.broken, f"{type(error).__name__}: {error}"]
        except Exception as error:  # noqa: BLE001 - whatever comes out of a node that is no error of ours is a finding
            return [*self.world.broken, f"untyped {type(error).__name__}: {error}"]
        return [*self.world.broken, *(_said(anomaly) for anomaly in check(self.history.events))]

    def _live_somehow(self) -> None:
        choose = self.world.choose
        self.world.faults = _faults(self.world)
        turns = choose.choice([0, choose.randint(1, 200), choose.randint(1, TURNS_OF_A_LIFE)])
        calls = choose.randint(1, CALLS_MAX)
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
            self.power_cuts += 1
            self.world.lose_power()

    def _live(self, *, calls: int, turns: int, look: bool) -> None:
        self.lives += 1
        self.world.live(self._life(calls, look=look), turns=turns)

    async def _life(self, calls: int, *, look: bool) -> None:
        async with self.world.open_node(**self._settings) as node:
            clients = Clients(self.world, self.history, node, self.lives, truncated=self._settings["retention_s"] == 0)
            if look:
                await clients.create()
            else:
                with suppress(StreamingNodeError):
                    await clients.create()
            if calls:
                await clients.work(calls)
            if look:
                await clients.look("before the cut")
                await node.flush()
                await clients.look("after the cut")


def _settings(world: World) -> dict[str, object]:
    choose = world.choose
    return {
        "cut_interval_s": choose.choice([None, 0.2, 1.0]),
        "retention_s": choose.choice([0, 0, 86_400]),
        "flush.retention.interval_s": choose.choice([0.05, 1.0]),
        "flush.retry_first_s": 0.01,
        "ticks.interval_s": choose.choice([0.01, 0.2]),
        "tail.capacity_bytes": choose.choice([0, 1000, 1 << 20]),
        "coalescer.insert_rows_max": choose.choice([0, 100]),
        "flush.row_group_bytes": choose.choice([200, 1 << 20]),
    }


def _faults(world: World) -> Faults:
    choose = world.choose
    return Faults(
        store=StoreFaults(write=choose.choice([0, 0, 0.01, 0.05]), reopen=choose.choice([0, 0.3])),
        files=choose.choice([0, 0, 0.02, 0.1]),
        clock_leap=choose.choice([0, 0.005, 0.05]),
    )


def _said(anomaly: Anomaly) -> str:
    return f"{anomaly.kind.value}: {anomaly.text}"
