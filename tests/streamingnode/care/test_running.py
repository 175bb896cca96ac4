"""A running node verifies itself while rows come in; damage under it is found."""

import asyncio
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.findings import Report, Severity
from streamingnode.care.records import NodeRecords, read_node_records
from streamingnode.care.verify import check_cuts
from streamingnode.errors import LogReopening
from streamingnode.node import Node
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.sample_node import SETTINGS, Sample, copy_of, flip, segment
from tests.test_failed_write import FOR_EVER, HANGS_S, error_of, opened, row, until
from wal.errors import Corrupt, InvalidArgument

pytestmark = pytest.mark.anyio


async def append_until(node: Node, stop: anyio.Event) -> int:
    """Insert and cut until told to stop; return how many rows were acknowledged."""
    key = 1_000_000
    while not stop.is_set():
        await node.insert("orders", [{"id": key + i, "item": "x" * 100} for i in range(50)])
        key += 50
        if key % 500 == 0:
            await node.flush()
    return key - 1_000_000


async def test_a_running_node_is_sound_under_appends_and_cuts(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.killed, tmp_path / "node")
    stop = anyio.Event()
    async with sn.open_node(path, **SETTINGS | {"retention_s": 0}) as node:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(append_until, node, stop)
            for _ in range(5):
                report = await node.verify()
                assert report.findings == []
                assert report.counts["log entries"] > 0
            stop.set()
        await node.insert("orders", [{"id": -1, "item": None}])
        await node.flush()
        assert (await node.verify()).counts["cuts"] > 3


async def test_a_file_damaged_under_a_running_node_is_found_and_others_are_read(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    async with sn.open_node(path, **SETTINGS) as node:
        flip(segment(path, 2), 700)
        [finding] = (await node.verify()).findings
        assert finding.place == segment(path, 2).relative_to(path).as_posix()
        assert "fails its checksum" in finding.detail
        await node.insert("orders", [{"id": -1, "item": None}])
        with pytest.raises(Corrupt):
            await node.snapshot("orders")


async def test_damage_in_the_log_of_a_running_node_is_found(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    table = max(path.glob("log/*.sst"), key=lambda each: each.stat().st_size)
    flip(table, table.stat().st_size // 3)
    async with sn.open_node(path, **SETTINGS) as node:
        [finding] = (await node.verify()).findings
        assert finding.severity is Severity.DAMAGE
        assert finding.place.startswith("log 'p0', from position ")


async def test_a_node_in_memory_has_nothing_to_verify_or_to_back_up(tmp_path: Path) -> None:
    async with sn.open_node(None) as node:
        with pytest.raises(InvalidArgument, match="in memory"):
            await node.verify()
        with pytest.raises(InvalidArgument, match="in memory"):
            await node.backup(tmp_path / "backup")


async def test_verifying_while_the_log_comes_back_says_so_and_leaves_nothing_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(1)])
            disk.fail_at(1, times=FOR_EVER)
            writing = asyncio.ensure_future(node.insert("a", [row(2)]))
            await until(lambda: parts_of(node).measure().log.attempts > 0)
            assert isinstance(await error_of(node.verify()), LogReopening)
            disk.heal()
            await writing
            assert (await node.verify()).findings == []


def test_cuts_that_retention_takes_while_they_are_walked_are_no_gap(
    sample: Sample, tmp_path: Path
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    node_id = read_node_records(path)[0].node_id

    def take_two(part: str, _bytes: int) -> None:
        for number in (1, 2) if part == "cuts" else ():
            (path / f"cuts/{number:016d}.json").unlink(missing_ok=True)

    report = Report(on_step=take_two)
    check_cuts(path, [1, 2, 3], node_id, NodeRecords(first_kept=3), report)
    assert report.bytes
    assert report.findings == []
