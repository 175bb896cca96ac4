"""Snapshots against the model: cuts, tail, deletes by offset, earlier ticks, dropped partitions,
damage.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flusher.directory import NodeDirectory, file_paths, manifest_path
from flusher.manifest import decode_manifest
from flusher.selection import apply_deletes
from flusher.snapshot import SnapshotSource, read_snapshot
from interceptors.shard.state import ShardState
from scanner.deliver_policy import StartingPoint
from scanner.scanner import Scanner
from streamingnode.snapshot import read_rows
from tests.flusher.stamped_log import StampedLog, Table, flusher_of
from wal.entry import Visible, messages_of, up_to
from wal.errors import Corrupt, Truncated
from wal.memory_store import MemoryLogStore
from wal.timetick import TICK_MAX


class Node:
    """A log, and what a node does to take a snapshot of it: flush, read the tail, know the
    catalog.
    """

    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.root = root
        self.store = store
        self.log = log

    @classmethod
    async def create(cls, root: Path) -> "Node":
        store = MemoryLogStore()
        return cls(root, store, StampedLog(await store.open_log("p0")))

    async def snapshot(self, table: Table, *, as_of: int = TICK_MAX) -> list[tuple[int, str]]:
        """Return the keys and items of a table, after checking that all forms of the tail give the
        same.
        """
        source = await self.source(table, as_of=as_of)
        cut_short = [kept for each in source.tail if (kept := up_to(each, as_of)) is not None]
        assert [each.time_tick for each in messages_of(cut_short)] == [
            each.time_tick for each in messages_of(source.tail) if each.time_tick <= as_of
        ]
        tails: list[Sequence[Visible]] = [source.tail, cut_short, list(messages_of(source.tail))]
        found, *others = [
            sorted(
                (row["id"], row["item"])
                for row in read_snapshot(replace(source, tail=tail)).to_pylist()
            )
            for tail in tails
        ]
        assert others == [found, found]
        return found

    async def source(self, table: Table, *, as_of: int = TICK_MAX) -> SnapshotSource:
        flusher = flusher_of(NodeDirectory(self.root), self.store, self.log.log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            if self.log.cuts:
                await flusher.wait_for_cut(len(self.log.cuts))
            checkpoint = flusher.checkpoint
            tasks.cancel_scope.cancel()
        state = ShardState()
        for visible in await self._visible(1, 0):
            state.observe(visible)
        return SnapshotSource(
            cuts=flusher.cuts,
            collection=state.catalog.collection(table.id),
            last_cut=checkpoint.cut_number,
            tail=await self._visible(max(1, checkpoint.position), checkpoint.tick),
            as_of=as_of,
        )

    async def _visible(self, position: int, after_tick: int) -> Sequence[Visible]:
        visible: list[Visible] = []
        async with Scanner(self.log.log, None, StartingPoint(position, after_tick)) as scanner:
            tick = after_tick
            while tick < self.log.tick:
                batch = await scanner.next_batch()
                visible += batch.visible
                tick = batch.confirmed_tick
        return visible


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "upsert", "pack", "cut"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    ),
    min_size=1,
    max_size=12,
)


def pack(log: StampedLog, table: Table, other: Table, keys: list[int], number: int) -> None:
    """Write one entry of several writes to both tables, some to the same keys."""
    with log.together():
        log.insert(table, keys, item=f"pack{number} ")
        log.insert(other, keys)
        log.delete(table, keys[:2])
        if keys[1:]:
            log.upsert(table, keys[1:], item=f"packed{number} ")
        log.insert(table, keys[:1], item=f"again{number} ")


@settings(max_examples=30)
@given(steps=STEPS, choice=st.integers(0, 1 << 32).map(random.Random))
def test_a_snapshot_at_any_tick_is_the_state_at_that_tick(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, list[int]]],
    choice: random.Random,
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path_factory.mktemp("node"))
        table = node.log.create(shards=2)
        other = node.log.create()
        first = node.log.tick
        for number, (step, keys) in enumerate(steps):
            match step:
                case "insert":
                    node.log.insert(table, keys, item=f"new{number} ")
                    node.log.insert(other, keys)
                case "delete":
                    node.log.delete(table, keys)
                case "upsert":
                    node.log.upsert(table, keys, item=f"put{number} ")
                case "pack":
                    pack(node.log, table, other, keys, number)
                case _:
                    node.log.cut()
        ticks = sorted(
            {first, node.log.tick, *(row.tick for row in (*node.log.rows, *node.log.deletes))}
        )
        for as_of in {*choice.sample(ticks, min(4, len(ticks))), ticks[-1]}:
            assert await node.snapshot(table, as_of=as_of) == node.log.state(table, as_of=as_of)
        assert await node.snapshot(table) == node.log.state(table, as_of=TICK_MAX)

    anyio.run(main)


@pytest.mark.parametrize("cut", [False, True], ids=["in the log", "in a cut"])
def test_a_snapshot_as_of_a_tick_between_two_writes_of_one_entry_has_the_first_and_not_the_second(
    tmp_path: Path, cut: bool
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        table = node.log.create(shards=2)
        node.log.insert(table, [1, 2], item="old")
        with node.log.together():
            node.log.insert(table, [3, 4])
            node.log.delete(table, [1, 3])
            node.log.upsert(table, [2, 3], item="new")
            node.log.insert(table, [1], item="back")
        last = node.log.tick
        if cut:
            node.log.cut()
        states = [
            [(1, "old1"), (2, "old2")],
            [(1, "old1"), (2, "old2"), (3, "tea3"), (4, "tea4")],
            [(2, "old2"), (4, "tea4")],
            [(2, "new2"), (3, "new3"), (4, "tea4")],
            [(1, "back1"), (2, "new2"), (3, "new3"), (4, "tea4")],
        ]
        for behind, state in enumerate(reversed(states)):
            assert await node.snapshot(table, as_of=last - behind) == state

    anyio.run(main)


def test_rows_of_a_dropped_partition_are_gone_and_the_state_before_is_refused(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        table = node.log.create(partitions=2)
        node.log.insert(table, [1, 2])
        node.log.insert(table, [3], partition=1)
        before = node.log.cut().tick
        node.log.insert(table, [4], partition=1)
        node.log.drop_partition(table, 1)
        for _ in range(2):  # in the tail, then in a cut
            assert await node.snapshot(table) == [(1, "tea1"), (2, "tea2")]
            with pytest.raises(Truncated):
                await node.snapshot(table, as_of=before)
            node.log.cut()

    anyio.run(main)


def test_rows_in_cuts_that_were_given_up_are_refused_and_others_are_not(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        old = node.log.create(shards=2)
        late = node.log.create(shards=2)
        empty = node.log.create()
        node.log.insert(old, [1, 2])
        given_up = node.log.cut()
        node.log.insert(late, [3, 4])
        node.log.insert(old, [5])
        second = node.log.cut()
        node.log.insert(late, [6])
        node.log.cut()
        node.log.insert(late, [7])
        assert len(await node.snapshot(old)) == 3
        give_up_cut(tmp_path, given_up.number)
        with pytest.raises(
            Truncated,
            match=r"cuts before 2, is no longer kept — every table has taken it: read .*table",
        ):
            await node.snapshot(old)
        assert await node.snapshot(late) == node.log.state(late, as_of=TICK_MAX)
        assert await node.snapshot(late, as_of=second.tick) == node.log.state(
            late, as_of=second.tick
        )
        assert await node.snapshot(empty) == []
        with pytest.raises(Truncated, match=f"ask for {given_up.tick} or later"):
            await node.snapshot(late, as_of=given_up.tick - 1)

    anyio.run(main)


def test_cut_given_up_while_its_files_are_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        table = node.log.create()
        node.log.insert(table, [1])
        node.log.cut()
        node.log.insert(table, [2])
        node.log.cut()
        source = await node.source(table)
        read = NodeDirectory.read

        def read_late(directory: NodeDirectory, path: str, **bounds: int) -> bytes:
            if path.endswith(".parquet"):
                give_up_cut(tmp_path, 1)
            return read(directory, path, **bounds)

        monkeypatch.setattr(NodeDirectory, "read", read_late)
        with pytest.raises(Truncated):
            read_rows(source)

    anyio.run(main)


def test_cut_of_others_given_up_while_manifests_are_read_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        other = node.log.create()
        table = node.log.create()
        node.log.insert(other, [1])
        node.log.cut()
        node.log.insert(table, [2])
        node.log.cut()
        source = await node.source(table)
        read = NodeDirectory.read

        def read_late(directory: NodeDirectory, path: str, **bounds: int) -> bytes:
            if path == manifest_path(1):
                give_up_cut(tmp_path, 1)
            return read(directory, path, **bounds)

        monkeypatch.setattr(NodeDirectory, "read", read_late)
        assert read_rows(source).num_rows == 1

    anyio.run(main)


def give_up_cut(root: Path, number: int) -> None:
    """Remove a cut as retention does: the manifest, then its files."""
    path = root / manifest_path(number)
    if path.exists():
        manifest = decode_manifest(path.read_bytes(), name=path.name)
        path.unlink()
        for file in file_paths(manifest):
            (root / file).unlink()


def test_a_collection_without_rows_has_an_empty_snapshot_with_its_columns(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        found = read_snapshot(await node.source(node.log.create()))
        assert found.num_rows == 0
        assert found.column_names == ["id", "item"]

    anyio.run(main)


def test_damage_in_a_segment_is_an_error_and_no_row(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path)
        table = node.log.create()
        node.log.insert(table, [1, 2])
        node.log.cut()
        source = await node.source(table)
        (segment,) = (tmp_path / "segments").rglob("*.parquet")
        content = bytearray(segment.read_bytes())
        content[10] ^= 1
        segment.write_bytes(content)
        with pytest.raises(Corrupt, match="fails its checksum"):
            read_snapshot(source)
        segment.unlink()
        with pytest.raises(Corrupt, match="missing"):
            read_snapshot(source)

    anyio.run(main)


KEYS: dict[str, tuple[pa.DataType, list[object]]] = {
    "int8": (pa.int8(), [1, -2, 3]),
    "uint64": (pa.uint64(), [2**64 - 1, 1, 2]),
    "string": (pa.string(), ["", "b", "ü"]),
    "large_string": (pa.large_string(), ["", "b", "ü"]),
    "binary": (pa.binary(), [b"", b"\x00", b"a"]),
    "fixed": (pa.binary(2), [b"ab", b"\x00\x00", b"cd"]),
    "bool": (pa.bool_(), [True, False, True]),
    "double": (pa.float64(), [0.5, -1.0, 2.0]),
    "date": (pa.date32(), [1, 2, 3]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [1, 2, 3]),
    "decimal": (pa.decimal128(20, 3), [1, 2, 3]),
}


@pytest.mark.parametrize("case", KEYS)
def test_deletes_remove_smaller_offsets_of_their_key_for_every_key_type(case: str) -> None:
    kind, (first, second, _) = KEYS[case]
    rows = pa.table({".k": pa.array([first, second, first, second], kind), "_offset": [0, 1, 2, 3]})
    deletes = [
        pa.table({".k": pa.array([first, first], kind), "_offset": [1, 2]}),
        pa.table({".k": pa.array([second], kind), "_offset": [1]}),
    ]
    assert apply_deletes(rows, deletes, key=".k")["_offset"].to_pylist() == [1, 2, 3]
