"""What may be given up, and that giving it up leaves nothing half there."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flusher.cuts import Lease, decode_first_kept, kept_cuts_key, read_leases
from flusher.directory import CutLog, NodeDirectory, cut_numbers, file_paths, manifest_path
from flusher.manifest import (
    Checkpoint,
    CutPosition,
    decode_checkpoint,
    decode_manifest,
    encode_manifest,
)
from flusher.retention import Retention, may_remove_cut
from flusher.run import FlushOptions, RetentionOptions
from tests.flusher.cut_reading import manifests, rows_in
from tests.flusher.stamped_log import START_MS, StampedLog, Table, context_of, flusher_of
from wal.errors import Corrupt, Truncated
from wal.memory_store import MemoryLogStore
from wal.timetick import compose_tick, physical_ms

HOUR_MS = 3_600_000


@given(
    ages_ms=st.lists(st.integers(0, 48 * HOUR_MS), max_size=8, unique=True),
    reader_floor=st.none() | st.integers(1, 100),
)
def test_truncation_passes_neither_checkpoint_nor_reader_nor_age(
    ages_ms: list[int], reader_floor: int | None
) -> None:
    now_ms = START_MS
    retention_ms = 24 * HOUR_MS
    cuts = [
        CutPosition(compose_tick(now_ms - age), 10 * i, now_ms - age)
        for i, age in enumerate(sorted(ages_ms, reverse=True), 1)
    ]
    checkpoint = Checkpoint(position=cuts[-1].position if cuts else 0, history=tuple(cuts))

    async def bound_now() -> int:
        store = MemoryLogStore()
        directory = NodeDirectory(Path("nowhere"))
        context = context_of(
            directory, store, await store.open_log("p0"), reader_floor=lambda: reader_floor
        )
        retention = Retention(context, CutLog(directory))
        return retention.bound(checkpoint, retention.newest_old(cuts, retention_ms / 1000))

    bound = anyio.run(bound_now)
    assert bound <= checkpoint.position
    assert reader_floor is None or bound <= reader_floor
    young = [cut.position for cut in cuts if physical_ms(cut.tick) > now_ms - retention_ms]
    assert all(bound < position for position in young)
    if not young and reader_floor is None:
        assert bound == checkpoint.position


class Node:
    """Cuts an hour apart, the newest now; leases as an ingest writes them."""

    def __init__(self, root: Path, store: MemoryLogStore, log: StampedLog) -> None:
        self.root = root
        self.store = store
        self.log = log
        self.reader_floor: int | None = None
        self.now_ms: Callable[[], int] = lambda: physical_ms(self.log.tick)

    @classmethod
    async def create(cls, root: Path, *, cuts: int) -> "Node":
        store = MemoryLogStore()
        store.node_id = "me"
        node = cls(root, store, StampedLog(await store.open_log("p0")))
        table = node.log.create()
        other = node.log.create()
        for number in range(cuts):
            node.log.insert(table, [number])
            node.log.delete(other, [number])
            node.log.cut()
            node.log.tick += HOUR_MS << 18
        return node

    @property
    def tables(self) -> list[Table]:
        return list(self.log.tables.values())

    def lease(self, table: Table, cut: int, *, node_id: str = "me", name: str = "") -> None:
        content = {
            "table": "t",
            "node_id": node_id,
            "collection_id": table.id,
            "cut": cut,
            "tick": 5,
        }
        (self.root / "leases").mkdir(exist_ok=True)
        (self.root / "leases" / f"{name or table.id}.json").write_text(json.dumps(content))

    async def enforce(
        self,
        *,
        min_age_s: float,
        taken_cuts_s: float | None = None,
        held: bool = False,
        open_s: float = 0,
    ) -> None:
        """Open a flusher, let `open_s` pass, and enforce; cuts in tables stay as long as others,
        unless it is said.
        """
        elapsed_s = 0.0
        taken_cuts_s = min_age_s if taken_cuts_s is None else taken_cuts_s
        options = FlushOptions(
            retention=RetentionOptions(min_age_s=min_age_s, taken_cuts_s=taken_cuts_s)
        )
        flusher = flusher_of(
            NodeDirectory(self.root),
            self.store,
            self.log.log,
            options=options,
            now_ms=self.now_ms,
            reader_floor=lambda: self.reader_floor,
            elapsed_ms=lambda: int(elapsed_s * 1000),
        )
        elapsed_s = open_s
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            await flusher.wait_for_cut(len(self.log.cuts))
            async with flusher.retention.hold_cuts() if held else nullcontext():
                await flusher.enforce_retention()
            tasks.cancel_scope.cancel()

    def kept(self) -> list[int]:
        """The cuts that are left, after checking that exactly their files are."""
        named = {path for manifest in manifests(self.root) for path in file_paths(manifest)}
        on_disk = {path.relative_to(self.root).as_posix() for path in self.root.rglob("*.parquet")}
        assert named == on_disk
        return cut_numbers(NodeDirectory(self.root))


def test_without_a_lease_every_cut_is_kept_and_the_log_is_truncated(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=5)
        await node.enforce(min_age_s=0)
        assert node.kept() == [1, 2, 3, 4, 5]
        (last,) = await node.log.log.read(node.log.log.first_position, bytes_max=1 << 20)
        assert last.time_tick == node.log.cuts[-1].tick

    anyio.run(main)


def test_cuts_taken_by_every_table_go_but_never_the_newest(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=5)
        first, second = node.tables
        node.lease(first, 5)
        await node.enforce(min_age_s=0)
        assert node.kept() == [1, 2, 3, 4, 5], "the second collection has no table yet"
        node.lease(second, 2)
        await node.enforce(min_age_s=0)
        assert node.kept() == [3, 4, 5]
        node.lease(second, 5)
        await node.enforce(min_age_s=0)
        assert node.kept() == [5]

    anyio.run(main)


def test_cuts_in_tables_go_earlier_than_the_log_and_than_cuts_of_a_collection_without_one(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=6)
        first, second = node.tables
        node.lease(first, 6)
        await node.enforce(min_age_s=24 * 3600, taken_cuts_s=2.5 * 3600)
        assert node.kept() == [1, 2, 3, 4, 5, 6], "the second collection has no table yet"
        node.lease(second, 3)
        await node.enforce(min_age_s=24 * 3600, taken_cuts_s=2.5 * 3600)
        assert node.kept() == [4, 5, 6], "a table has not taken the fourth"
        node.lease(second, 6)
        await node.enforce(min_age_s=24 * 3600, taken_cuts_s=1.5 * 3600)
        assert node.kept() == [6], "all but the newest are old enough"
        assert node.log.log.first_position == 1, "the log is kept for a day"

    anyio.run(main)


def data_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.parquet"))


@pytest.mark.parametrize("kind", ["pipe", "holes", "link"])
def test_a_lease_that_is_no_file_of_an_ingest_holds_every_cut(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        for table in node.tables:
            node.lease(table, 3)
        lease = tmp_path / "leases" / "other.json"
        match kind:
            case "pipe":
                os.mkfifo(lease)
            case "holes":
                lease.touch()
                os.truncate(lease, 1 << 40)
            case _:
                lease.symlink_to(f"{node.tables[0].id}.json")
        await node.enforce(min_age_s=0)
        assert node.kept() == [1, 2, 3]
        lease.unlink()
        await node.enforce(min_age_s=0)
        assert node.kept() == [3]

    anyio.run(main)


def test_a_lease_given_up_while_leases_are_read_holds_nothing(tmp_path: Path) -> None:
    class Overtaken(NodeDirectory):
        def files(self, under: str) -> list[str]:
            found = super().files(under)
            (self.root / found[0]).unlink()
            return found

    (tmp_path / "leases").mkdir()
    for name in ("given_up", "kept"):
        content = {"table": f"/{name}", "node_id": "me", "collection_id": 1, "cut": 1, "tick": 1}
        (tmp_path / "leases" / f"{name}.json").write_text(json.dumps(content))
    assert [lease.table for lease in read_leases(Overtaken(tmp_path), node_id="me")] == ["/kept"]


def test_an_edited_cut_and_its_files_are_not_removed(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=4)
        await node.enforce(min_age_s=0)
        for table in node.tables:
            node.lease(table, 4)
        path = tmp_path / manifest_path(2)
        edited = msgspec.structs.replace(decode_manifest(path.read_bytes(), name=""), created_ms=1)
        path.write_bytes(encode_manifest(edited))
        before = data_files(tmp_path)
        with pytest.raises(ExceptionGroup) as caught:
            await node.enforce(min_age_s=0)
        assert caught.group_contains(Corrupt, match="not the cut 2 that this node made")
        assert data_files(tmp_path) == before

    anyio.run(main)


def test_held_cuts_stay_until_they_are_let_go(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=5)
        for table in node.tables:
            node.lease(table, 5)
        await node.enforce(min_age_s=0, held=True)
        assert node.kept() == [1, 2, 3, 4, 5]
        await node.enforce(min_age_s=0)
        assert node.kept() == [5]
        assert decode_first_kept(await node.store.state.get(kept_cuts_key("p0"))) == 5

    anyio.run(main)


def test_young_cuts_stay_and_so_does_the_log_after_them(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=6)
        for table in node.tables:
            node.lease(table, 6)
        await node.enforce(min_age_s=3.5 * 3600)
        assert node.kept() == [4, 5, 6]
        entries = await node.log.log.read(node.log.log.first_position, bytes_max=1 << 20)
        assert entries[0].time_tick == node.log.cuts[2].tick

    anyio.run(main)


def test_cuts_of_a_clock_that_was_ahead_go_by_the_clock_of_a_later_cut(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=2)  # and now the clock is set back by ten years
        ahead_ms = 10 * 365 * 24 * HOUR_MS
        for table in node.tables:
            node.lease(table, 99)
        hours = 0
        node.now_ms = lambda: START_MS - ahead_ms + hours * HOUR_MS
        for hours in range(5):
            node.log.insert(node.tables[0], [hours])
            node.log.cut()
            await node.enforce(min_age_s=2.5 * 3600)
        # Cuts 3 to 7 were made 4 to 0 hours ago; when 1 and 2 were, nobody knows, but before 3.
        assert node.kept() == [5, 6, 7]
        entries = await node.log.log.read(node.log.log.first_position, bytes_max=1 << 20)
        assert entries[0].time_tick == node.log.cuts[3].tick

    anyio.run(main)


def test_cuts_ahead_of_the_clock_count_from_the_opening_that_finds_them(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        for table in node.tables:
            node.lease(table, 3)
        await node.enforce(min_age_s=3600 * 24)
        ahead_ms = physical_ms(node.log.tick)
        node.now_ms = lambda: ahead_ms // 2  # no cut is made under the right clock
        await node.enforce(min_age_s=3600 * 24, open_s=3600 * 23)
        assert node.kept() == [1, 2, 3]
        assert node.log.log.first_position == 1
        await node.enforce(min_age_s=3600 * 24, open_s=3600 * 25)
        assert node.kept() == [3]
        assert node.log.log.first_position > 1

    anyio.run(main)


def test_a_clock_that_is_behind_for_one_cut_gives_up_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        for table in node.tables:
            node.lease(table, 99)
        right_ms = physical_ms(node.log.tick)
        await node.enforce(min_age_s=24 * 3600)
        node.now_ms = lambda: 1_000_000  # 1970, as a machine without a battery has it
        node.log.insert(node.tables[0], [9])
        node.log.cut()
        await node.enforce(min_age_s=24 * 3600)
        node.now_ms = lambda: right_ms + HOUR_MS
        node.log.insert(node.tables[0], [10])
        node.log.cut()
        await node.enforce(min_age_s=24 * 3600)
        assert node.kept() == [1, 2, 3, 4, 5]
        assert node.log.log.first_position == 1

    anyio.run(main)


def test_a_named_reader_holds_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        node.reader_floor = 4
        await node.enforce(min_age_s=0)
        assert node.log.log.first_position <= 4

    anyio.run(main)


def test_a_transaction_open_over_a_cut_holds_the_log_from_its_begin(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=1)
        begin = node.log.log.next_position
        txn_id = node.log.begin()
        node.log.stream(txn_id, node.tables[0], [7], item="slow")
        node.log.cut()
        await node.enforce(min_age_s=0)
        assert node.log.log.first_position == begin
        assert decode_checkpoint(await node.store.state.get("checkpoint/p0")).position == begin
        node.log.commit(txn_id)
        node.log.cut()
        await node.enforce(min_age_s=0)
        assert [row.key for row in rows_in(tmp_path, manifests(tmp_path)[-1])] == [7]

    anyio.run(main)


def test_a_collection_that_was_dropped_needs_no_table_to_let_its_cuts_go(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        first, second = node.tables
        node.log.drop_collection(second)
        node.log.cut()
        node.lease(first, 4)
        await node.enforce(min_age_s=0)
        assert node.kept() == [4]

    anyio.run(main)


def test_waiting_for_a_cut_that_was_given_up_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        for table in node.tables:
            node.lease(table, 3)
        await node.enforce(min_age_s=0)
        flusher = flusher_of(NodeDirectory(tmp_path), node.store, node.log.log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            await flusher.wait_for_cut(3)
            with pytest.raises(Truncated, match="cut 3"):
                await flusher.wait_for_cut(2)
            tasks.cancel_scope.cancel()

    anyio.run(main)


def test_leases_of_other_nodes_do_not_count_and_unreadable_ones_hold_everything(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=2)
        first, second = node.tables
        node.lease(first, 2)
        node.lease(second, 2)
        node.lease(first, 1, node_id="other", name="foreign")
        assert {lease.cut for lease in read_leases(NodeDirectory(tmp_path), node_id="me")} == {2}
        (tmp_path / "leases" / "torn.json").write_text('{"table": ')
        await node.enforce(min_age_s=0)
        assert node.kept() == [1, 2]

    anyio.run(main)


def test_a_link_in_place_of_the_leases_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "leases").symlink_to("elsewhere")
    with pytest.raises(Corrupt, match="leases"):
        read_leases(NodeDirectory(tmp_path), node_id="me")


def test_a_cut_goes_without_a_lease_only_when_nothing_in_it_lives(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=1)
        await node.enforce(min_age_s=0)
        (manifest,) = manifests(tmp_path)
        old = manifest.tick
        (first, second) = (table.id for table in node.tables)
        assert may_remove_cut(manifest, leases=[], live=frozenset(), old_tick=old)
        assert not may_remove_cut(manifest, leases=[], live=frozenset({first}), old_tick=old)
        assert not may_remove_cut(manifest, leases=[], live=frozenset(), old_tick=old - 1)
        leases = [Lease(table="/t", node_id="me", collection_id=first, cut=1, tick=1)]
        assert may_remove_cut(manifest, leases=leases, live=frozenset({first}), old_tick=old)
        assert not may_remove_cut(
            manifest, leases=leases, live=frozenset({first, second}), old_tick=old
        )

    anyio.run(main)


def test_of_lost_cuts_only_the_later_ones_are_missed(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=4)
        for table in node.tables:
            node.lease(table, 2)
        await node.enforce(min_age_s=0)
        flusher = flusher_of(NodeDirectory(tmp_path), node.store, node.log.log)
        assert node.kept() == [3, 4]
        await flusher.check_cuts()
        (tmp_path / manifest_path(3)).unlink()
        with pytest.raises(Corrupt, match="cuts 3 to 3 are lost"):
            await flusher.check_cuts()

    anyio.run(main)


def test_files_of_a_dropped_collection_go_although_their_cuts_stay(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=3)
        first, second = node.tables
        node.log.drop_collection(second)

        def left(table: Table) -> int:
            return sum(
                1 for path in tmp_path.rglob("*.parquet") if path.parent.name == str(table.id)
            )

        await node.enforce(min_age_s=0)
        assert (left(first), left(second)) == (3, 3), "no cut names the drop yet"
        node.log.insert(first, [9])
        node.log.cut()
        node.lease(second, 3)
        await node.enforce(min_age_s=0)
        assert left(second) == 3, "its table waits for them"
        (tmp_path / "leases" / f"{second.id}.json").unlink()
        await node.enforce(min_age_s=7200)
        assert left(second) == 3, "too young"
        await node.enforce(min_age_s=0)
        assert (left(first), left(second)) == (4, 0)
        assert cut_numbers(NodeDirectory(tmp_path)) == [1, 2, 3, 4]

    anyio.run(main)


def test_drop_is_remembered_until_its_files_may_go(tmp_path: Path) -> None:
    async def main() -> None:
        node = await Node.create(tmp_path, cuts=2)
        first, second = node.tables
        node.log.drop_collection(second)
        node.log.insert(first, [9])
        node.log.cut()
        node.lease(second, 2)
        options = FlushOptions(retention=RetentionOptions(min_age_s=0))
        flusher = flusher_of(
            NodeDirectory(tmp_path), node.store, node.log.log, options=options, now_ms=node.now_ms
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flusher.run)
            await flusher.wait_for_cut(3)
            await flusher.enforce_retention()
            assert flusher._run is not None
            assert second.id in [
                info.id for info in flusher._run.state.catalog.collections(dropped=True)
            ]
            assert len(list((tmp_path / "deletes" / str(second.id)).iterdir())) == 2
            (tmp_path / "leases" / f"{second.id}.json").unlink()
            others = [
                tmp_path / "deletes" / str(second.id) / "notes.txt",
                tmp_path / "segments" / "999" / "1.parquet",
            ]
            for path in others:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            await flusher.enforce_retention()
            assert second.id not in [
                info.id for info in flusher._run.state.catalog.collections(dropped=True)
            ]
            tasks.cancel_scope.cancel()
        assert list((tmp_path / "deletes" / str(second.id)).iterdir()) == others[:1]
        assert others[1].exists()
        assert (
            len([path for path in data_files(tmp_path) if path.parent.name == str(first.id)]) == 3
        )

    anyio.run(main)
