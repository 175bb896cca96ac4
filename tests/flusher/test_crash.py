"""The flusher on a disk that fails or loses power at each of its operations, one after the
other.
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flusher.directory import NodeDirectory
from flusher.run import FlushOptions
from tests.flusher.cut_reading import deletes_in, manifests, rows_in
from tests.flusher.faulty_disk import CheckedStore, FaultyDirectory, Fuse, PowerCut
from tests.flusher.stamped_log import StampedLog, flusher_of
from tests.synced_disk import SyncedDisk, synced_disk
from wal.errors import OnShutdown
from wal.memory_store import MemoryLogStore, MemoryStateMap

SMALL = FlushOptions(row_group_bytes=700, buffered_bytes_max=1500, retry_first_s=0.0)


class Machine:
    """A flusher on a faulty disk, restarted as often as the power goes."""

    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.directory = FaultyDirectory(root, Fuse())
        self.store = store
        self.log = log
        self.faults = 0

    async def run(self, fuse: Fuse) -> None:
        """Flush all cuts; raises `PowerCut` when the fuse says so."""
        self.directory.fuse = fuse
        checked = CheckedStore(self.store, self.directory)
        flusher = flusher_of(self.directory, checked, self.log.log, options=SMALL)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(flusher.run)
                await flusher.wait_for_cut(len(self.log.cuts))
                self.faults = flusher.statistics().faults
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            # An `OSError` beside the cut is another task's, which meets the file that the cut
            # broke.
            if errors.split((PowerCut, OnShutdown, OSError))[1] is not None:
                raise
            raise PowerCut from errors

    async def run_until_done(self, fuse: Fuse, randomness: random.Random) -> None:
        try:
            await self.run(fuse)
        except PowerCut:
            self.directory.lose_power(randomness)
            await self.run(Fuse())

    def check(self) -> None:
        root = self.directory.root
        found = manifests(root)
        assert [(each.number, each.tick) for each in found] == [
            (cut.number, cut.tick) for cut in self.log.cuts
        ]
        named = {file.path for each in found for file in (*each.segments, *each.deletes)}
        for manifest, cut in zip(found, self.log.cuts, strict=True):
            assert rows_in(root, manifest) == self.log.rows_of(cut)
            assert deletes_in(root, manifest) == self.log.deletes_of(cut)
        on_disk = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        assert on_disk == named | {f"cuts/{cut.number:016d}.json" for cut in self.log.cuts}


def write_scenario(log: StampedLog) -> None:
    """A bit of everything over three cuts."""
    orders = log.create(partitions=2)
    stock = log.create()
    log.insert(orders, range(6))
    txn_id = log.begin()
    log.stream(txn_id, orders, [20, 21, 22], item="slow")
    log.seal(orders)
    log.insert(orders, range(6, 9), partition=1)
    log.delete(orders, [1, 2])
    log.cut()
    with log.together():
        log.upsert(stock, [1, 2, 3], item="a")
        log.insert(orders, [9, 10])
        log.delete(orders, [9])
        log.upsert(orders, [10], item="c")
    log.commit(txn_id)
    log.drop_partition(orders, 1)
    log.cut()
    log.upsert(stock, [2], item="b")
    log.cut()


async def _machine(root: Path) -> Machine:
    store = MemoryLogStore()
    store.node_id = "node"
    machine = Machine(root, store, StampedLog(await store.open_log("p0")))
    write_scenario(machine.log)
    return machine


class PoweredStateMap(MemoryStateMap):
    """A map of state under which power goes just before each checkpoint is saved: the cut it speaks
    of has to be on the disk.
    """

    def __init__(
        self, store: MemoryLogStore, disk: SyncedDisk, log: Callable[[], StampedLog]
    ) -> None:
        super().__init__(store)
        self.checkpoints = 0
        self._disk = disk
        self._log = log

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        self.checkpoints += 1
        left = self._disk.lose_power(self._disk.root.with_name(f"left{self.checkpoints}")) / "node"
        newest = manifests(left)[-1]
        cut = self._log().cuts[newest.number - 1]
        assert newest.number == self.checkpoints
        assert (rows_in(left, newest), deletes_in(left, newest)) == (
            self._log().rows_of(cut),
            self._log().deletes_of(cut),
        )
        await super().put(changes)


def test_a_cut_is_on_the_real_disk_before_its_checkpoint(tmp_path: Path) -> None:
    """The disk of the other tests stands in front of the calls that sync; this one is behind
    them.
    """
    (tmp_path / "disk" / "node").mkdir(parents=True)

    async def main(disk: SyncedDisk) -> None:
        store = MemoryLogStore()
        store.node_id = "node"
        store.state = state = PoweredStateMap(store, disk, lambda: log)
        log = StampedLog(await store.open_log("p0"))
        write_scenario(log)
        flusher = flusher_of(NodeDirectory(disk.root / "node"), store, log.log, options=SMALL)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            await flusher.wait_for_cut(len(log.cuts))
            tasks.cancel_scope.cancel()
        assert state.checkpoints == len(log.cuts)

    with synced_disk(tmp_path / "disk") as disk:
        anyio.run(main, disk)


@pytest.mark.parametrize(
    "step", [4, pytest.param(1, marks=pytest.mark.crash)], ids=["every fourth", "each"]
)
@pytest.mark.parametrize("power", [False, True], ids=["disk fault", "power cut"])
def test_a_failure_at_any_operation_changes_no_cut(tmp_path: Path, power: bool, step: int) -> None:
    async def fail_at(number: int) -> bool:
        machine = await _machine(tmp_path / str(number))
        fuse = Fuse(number, power=power)
        await machine.run_until_done(fuse, random.Random(number))
        machine.check()
        assert power or machine.faults == (1 if fuse.reached else 0)
        return fuse.reached

    number = random.randint(1, step)
    print("first", number)  # shown when the test fails
    while anyio.run(fail_at, number):
        number += step
    assert number > 60


@pytest.mark.parametrize("seed", range(20))
def test_power_cuts_during_recovery_from_power_cuts_change_no_cut(
    tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        randomness = random.Random(seed)
        machine = await _machine(tmp_path)
        for _ in range(8):
            try:
                await machine.run(Fuse(randomness.randint(1, 60), power=True))
            except PowerCut:
                machine.directory.lose_power(randomness)
        await machine.run(Fuse())
        machine.check()

    anyio.run(main)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"),
            st.integers(0, 2),
            st.lists(st.integers(0, 30), min_size=1, max_size=12),
        ),
        st.tuples(
            st.just("delete"),
            st.integers(0, 2),
            st.lists(st.integers(0, 30), min_size=1, max_size=4),
        ),
        st.tuples(
            st.just("pack"),
            st.integers(0, 2),
            st.lists(st.integers(0, 30), min_size=2, max_size=8, unique=True),
        ),
        st.tuples(
            st.just("upsert"),
            st.integers(0, 2),
            st.lists(st.integers(0, 30), min_size=1, max_size=4),
        ),
        st.tuples(
            st.just("stream"),
            st.integers(0, 2),
            st.lists(st.integers(0, 30), min_size=1, max_size=4),
        ),
        st.tuples(
            st.sampled_from(
                ["begin", "commit", "seal", "cut", "flush", "drop partition", "drop", "create"]
            ),
            st.integers(0, 2),
            st.just([]),
        ),
    ),
    min_size=8,
    max_size=60,
)


class Script:
    """Applies drawn actions to a log, skipping those that do not fit."""

    def __init__(self, log: StampedLog) -> None:
        self.log = log
        self.gone: set[tuple[int, int]] = set()
        for _ in range(3):
            log.create(shards=2, partitions=2)

    # one arm for each action
    def apply(self, action: str, number: int, keys: list[int]) -> None:  # noqa: C901
        log = self.log
        tables = list(log.tables.values())
        table = tables[number % len(tables)]
        match action:
            case "insert":
                partition = 1 if number == 1 and (table.id, 1) not in self.gone else 0
                log.insert(table, keys, partition=partition)
            case "delete":
                log.delete(table, keys)
            case "upsert":
                log.upsert(table, keys, item="new")
            case "pack":
                with log.together():
                    log.insert(table, keys)
                    log.upsert(tables[0], keys[:2], item="packed")
                    log.delete(table, keys[1:])
                    log.insert(tables[-1], keys)
                    log.insert(table, keys[::-1], item="again")
            case "begin":
                log.begin()
            case "stream" if log.streamed:
                log.stream(min(log.streamed), table, keys, item="slow")
            case "commit" if log.streamed:
                log.commit(min(log.streamed))
            case "seal":
                log.seal(table)
            case "cut":
                log.cut()
            case "drop partition" if (table.id, 1) not in self.gone:
                self.gone.add((table.id, 1))
                log.drop_partition(table, 1)
            case "drop" if len(tables) > 1 and not log.streamed:
                log.drop_collection(table)
            case "create" if len(tables) < 4:
                log.create(partitions=2)


@settings(max_examples=40)
@given(actions=ACTIONS, seed=st.integers(0, 1 << 32))
def test_any_stream_with_crashes_anywhere_leaves_each_row_in_exactly_one_cut(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, list[int]]], seed: int
) -> None:
    async def main() -> None:
        randomness = random.Random(seed)
        store = MemoryLogStore()
        store.node_id = "node"
        machine = Machine(
            tmp_path_factory.mktemp("node"), store, StampedLog(await store.open_log("p0"))
        )
        script = Script(machine.log)
        for action, number, keys in [*actions, ("cut", 0, [])]:
            script.apply("cut" if action == "flush" else action, number, keys)
            if action == "flush":
                fuse = Fuse(randomness.randint(1, 80), power=randomness.random() < 0.7)
                await machine.run_until_done(fuse, randomness)
        await machine.run(Fuse())
        machine.check()

    anyio.run(main)
