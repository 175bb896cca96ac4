"""Entries of many writes in cuts: what is in the files does not tell which writes went together."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flusher.directory import NodeDirectory
from flusher.run import MESSAGES_PER_STEP, FlushOptions
from tests.flusher.cut_reading import deletes_in, manifests, read_file, rows_in
from tests.flusher.stamped_log import StampedLog, Table, flusher_of
from wal.memory_store import MemoryLogStore

OPTIONS = {
    "as it is": FlushOptions(),
    "row groups": FlushOptions(row_group_bytes=2_000),
    "no memory": FlushOptions(row_group_bytes=2_000, buffered_bytes_max=1),
}


class Step(NamedTuple):
    """One write to one of two tables, or a cut."""

    what: str
    table: int
    keys: Sequence[int]


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["insert", "insert", "partition", "delete", "upsert", "cut"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    ),
    min_size=1,
    max_size=25,
)


async def flushed(
    root: Path, log: StampedLog, store: MemoryLogStore, options: FlushOptions
) -> list[dict[str, pa.Table]]:
    """Flush a log, check its cuts against the model, and return their files by path."""
    flusher = flusher_of(NodeDirectory(root), store, log.log, options=options)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(flusher.run)
        await flusher.wait_for_cut(len(log.cuts))
        tasks.cancel_scope.cancel()
    found = manifests(root)
    for manifest, cut in zip(found, log.cuts, strict=True):
        assert rows_in(root, manifest) == log.rows_of(cut)
        assert deletes_in(root, manifest) == log.deletes_of(cut)
    return [
        {file.path: read_file(root, file) for file in (*cut.segments, *cut.deletes)}
        for cut in found
    ]


async def new_log() -> tuple[StampedLog, MemoryLogStore, list[Table]]:
    """Return a log in which each write has the tick after that of the write before it, packed or
    not.
    """
    store = MemoryLogStore()
    store.node_id = "node"
    log = StampedLog(await store.open_log("p0"), ms_per_append=0)
    return log, store, [log.create(shards=2, partitions=2), log.create()]


def make_segments(log: StampedLog, tables: Sequence[Table]) -> None:
    """Have segments for all that follows, so that none is made between two writes."""
    for table in tables:
        for partition in range(len(table.partitions)):
            log.insert(table, [100, 101], partition=partition)


def write(log: StampedLog, table: Table, step: Step) -> None:
    match step.what:
        case "insert":
            log.insert(table, step.keys)
        case "partition":
            log.insert(table, step.keys, partition=len(table.partitions) - 1, item="there")
        case "delete":
            log.delete(table, step.keys)
        case _:
            log.upsert(table, step.keys, item="new")


async def write_all(
    log: StampedLog, tables: Sequence[Table], steps: Sequence[Step], rng: random.Random | None
) -> None:
    """Write one by one, or in packs of random size."""
    make_segments(log, tables)
    at = 0
    while at < len(steps):
        if steps[at].what == "cut":
            log.cut()
            make_segments(log, tables)
            at += 1
            continue
        end = at + 1 if rng is None else rng.randint(at + 1, min(len(steps), at + 8))
        end = next((index for index in range(at, end) if steps[index].what == "cut"), end)
        with log.together():
            for step in steps[at:end]:
                write(log, tables[step.table], step)
        at = end
    log.cut()


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    steps=STEPS, rng=st.integers(0, 1 << 32).map(random.Random), case=st.sampled_from(list(OPTIONS))
)
def test_packed_writes_leave_the_rows_ticks_and_offsets_of_writes_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], rng: random.Random, case: str
) -> None:
    async def main() -> None:
        found = []
        for packing in (None, rng):
            log, store, tables = await new_log()
            await write_all(log, tables, steps, packing)
            found.append(await flushed(tmp_path_factory.mktemp("node"), log, store, OPTIONS[case]))
        one_by_one, packed = found
        assert [list(cut) for cut in packed] == [list(cut) for cut in one_by_one]
        for cut, expected in zip(packed, one_by_one, strict=True):
            for path, table in cut.items():
                assert table.to_pylist() == expected[path].to_pylist()

    anyio.run(main)


def test_a_delete_takes_of_its_own_entry_what_was_written_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        log, store, (table, _) = await new_log()
        with log.together():
            log.insert(table, [2], item="first")
            log.delete(table, [2])
            log.insert(table, [2], item="second")
            log.upsert(table, [2], item="third")
        log.cut()
        (cut,) = await flushed(tmp_path, log, store, FlushOptions())
        rows, deletes = [
            [(each["_offset"], each["_tick"] - log.cuts[0].tick) for each in found.to_pylist()]
            for found in cut.values()
        ]
        assert rows == [(0, -4), (1, -2), (2, -1)]
        assert deletes == [(1, -3), (2, -1)]

    anyio.run(main)


def test_rows_of_writers_who_know_their_table_since_different_times_are_in_order_of_their_offsets(
    tmp_path: Path,
) -> None:
    """A transaction that was begun before a partition was made, say, goes with inserts that came
    after it.
    """

    async def main() -> None:
        log, store, (table, _) = await new_log()
        old = table.inserts, table.deletes
        table.renew_targets()
        new = table.inserts, table.deletes
        with log.together():
            for key, (table.inserts, table.deletes) in enumerate((new, old, new, old)):
                log.insert(table, [2 * key, 2 * key + 1])
                log.delete(table, [key, key + 1])
        log.cut()
        (cut,) = await flushed(tmp_path, log, store, FlushOptions())
        for found in cut.values():
            for column in ("_offset", "_tick"):
                numbers = found[column].to_numpy()
                assert (numbers[1:] >= numbers[:-1]).all()

    anyio.run(main)


def test_a_pack_with_rows_of_a_dropped_partition_leaves_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        log, store, (table, other) = await new_log()
        with log.together():
            log.insert(table, [1, 2], partition=1)
            log.insert(table, [3])
            log.insert(other, [4])
        log.drop_partition(table, 1)
        log.drop_collection(other)
        log.cut()
        (cut,) = await flushed(tmp_path, log, store, FlushOptions())
        assert [found["id"].to_pylist() for found in cut.values()] == [[3]]

    anyio.run(main)


@pytest.mark.parametrize("writes, waits", [(3, True), (MESSAGES_PER_STEP, False)])
def test_flusher_waits_for_more_after_a_few_writes_and_not_after_a_full_entry(
    writes: int, waits: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        store = MemoryLogStore()
        log = StampedLog(await store.open_log("p0"))
        table = log.create()
        flusher = flusher_of(
            NodeDirectory(tmp_path), store, log.log, options=FlushOptions(gather_s=1e6)
        )

        async def taken(more_than: int = 0) -> int:
            while flusher._run is None or flusher._run.open_cut.taken_bytes <= more_than:
                await anyio.lowlevel.checkpoint()
            return flusher._run.open_cut.taken_bytes

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            with log.together():
                for key in range(writes):
                    log.insert(table, [key])
            before = await taken()
            log.insert(table, [writes])
            with anyio.move_on_after(0.1 if waits else None):
                await taken(before)
                assert not waits
            tasks.cancel_scope.cancel()

    anyio.run(main)
