"""Whole nodes in virtual time: a few seeds with every test run, two thousand with each commit, and
the same twice.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from functools import cache

import pytest

from tests.chaos.gate import Settings
from tests.chaos.gates.bugs import first_seed
from tests.chaos.registry import GATES
from tests.chaos.report import GateReport
from tests.chaos.seeded.bug import SeededBug
from tests.chaos.seeded.catalogue import BUGS
from tests.chaos.simulation.disk import Disk
from tests.chaos.simulation.scenario import run_seed
from tests.chaos.simulation.store import SimulatedStore, StoreFaults
from tests.chaos.simulation.virtual_loop import Stuck, VirtualLoop
from tests.wal.log_contract import LogContract

FEW = 40


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    virtual = VirtualLoop(random.Random(1))
    yield virtual
    virtual.bury()


@pytest.mark.anyio
@pytest.mark.parametrize("syncs_late", [False, True], ids=["synced", "synced late"])
class TestSimulatedLog(LogContract):
    @pytest.fixture
    async def store(self, syncs_late: bool) -> AsyncIterator[SimulatedStore]:
        store = SimulatedStore(
            Disk(), random.Random(1), faults=StoreFaults(), node_id="n", syncs_late=syncs_late
        )
        await store.open()
        yield store
        await store.close()


def passed(loop: VirtualLoop, seconds: float) -> "asyncio.Future[object]":
    """Return what is done when so much virtual time has passed."""
    passed = loop.create_future()
    loop.call_later(seconds, passed.set_result, None)
    return passed


report_of = cache(run_seed)


@pytest.mark.parametrize("seed", range(FEW))
def test_no_seed_breaks_a_promise(seed: int) -> None:
    assert not report_of(seed).problems, (
        f"again: python -m tests.chaos simulation --count 1 --seed {seed}"
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_does_the_same_again(seed: int) -> None:
    assert run_seed(seed) == report_of(seed)


def test_seeds_do_different_things() -> None:
    assert len({report_of(seed).trace for seed in range(6)}) == 6


def test_writes_of_several_clients_go_into_one_entry() -> None:
    reports = [report_of(seed) for seed in range(FEW)]
    assert sum(report.packs for report in reports) > FEW
    assert sum(report.packed for report in reports) > 2 * sum(report.packs for report in reports)


def test_every_seeded_bug_has_its_place_in_the_product() -> None:
    assert not [bug.name for bug in BUGS if not callable(getattr(bug.owner, bug.attribute, None))]


# which takes some 20 s: the gate has it
SOON_FOUND = [bug for bug in BUGS[:3] if bug.name != "window not persisted"]


@pytest.mark.parametrize("bug", SOON_FOUND, ids=lambda bug: bug.name)
def test_a_seeded_bug_is_found_and_gone_when_it_is_taken_out_again(bug: SeededBug) -> None:
    found = first_seed(bug, seeds_max=200)
    assert found is not None
    assert found.without == ""


@pytest.mark.crash
@pytest.mark.timeout(900)
def test_two_thousand_seeds_break_no_promise() -> None:
    assert run_gate("simulation").passed


@pytest.mark.crash
@pytest.mark.timeout(900)
def test_sixteen_of_sixteen_seeded_bugs_are_found() -> None:
    report = run_gate("bugs", seed=0)
    assert report.passed, report.notes
    assert report.tried == 16


def run_gate(name: str, seed: int | None = None) -> GateReport:
    seed = random.randrange(2**31) if seed is None else seed
    print("seed", seed)  # shown when the test fails
    report = GATES[name].run(GATES[name], Settings(seed=seed))
    print(*report.notes, sep="\n")
    return report


def test_virtual_time_passes_only_when_nothing_is_left_to_do(loop: VirtualLoop) -> None:
    async def main() -> float:
        await passed(loop, 3600)
        return loop.time()

    assert 3600 <= (loop.live(main()) or 0) < 3601


def test_a_deadlock_is_told(loop: VirtualLoop) -> None:
    async def main() -> None:
        await loop.create_future()

    with pytest.raises(Stuck):
        loop.live(main())


def test_a_kill_runs_nothing_on(loop: VirtualLoop) -> None:
    steps: list[str] = []

    async def main() -> None:
        try:
            steps.append("began")
            await passed(loop, 3600)
            steps.append("went on")
        finally:
            await passed(loop, 1)
            steps.append("cleaned up")

    loop.halt_at_turn = 2
    assert loop.live(main()) is None
    loop.bury()
    assert steps == ["began"]
