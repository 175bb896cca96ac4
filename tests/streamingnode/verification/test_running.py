"""A running node verifies and scrubs itself while rows come in; damage under it is found, and its pace is kept."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

import streamingnode as sn
from streamingnode.errors import LogReopening
from streamingnode.inspection.node_records import read_node_records
from streamingnode.node import Node
from streamingnode.verification.cut_walk import CutExpectation, walk_cuts
from streamingnode.verification.finding import Kind, Report, Severity
from streamingnode.verification.scrubber import NEVER, SETTLE_S, Scrubber, ScrubOptions, read_status
from tests.failing_disk import FailingDisk
from tests.streamingnode.sample_node import SETTINGS, Sample, copy_of, flip, segment
from tests.test_failed_write import FOR_EVER, HANGS_S, error_of, opened, row, until
from wal.errors import Corrupt, InvalidArgument, OnShutdown, StorageFailed

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


async def test_a_running_node_is_sound_under_appends_and_cuts(sample: Sample, tmp_path: Path) -> None:
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


async def test_a_file_damaged_under_a_running_node_is_found_and_others_are_read(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    async with sn.open_node(path, **SETTINGS) as node:
        flip(segment(path, 2), 700)
        [finding] = (await node.verify()).findings
        assert finding.place == segment(path, 2).relative_to(path).as_posix()
        assert finding.kind is Kind.CHECKSUM
        await node.insert("orders", [{"id": -1, "item": None}])
        with pytest.raises(Corrupt):
            await node.snapshot("orders")


async def test_damage_in_the_log_of_a_running_node_is_found(sample: Sample, tmp_path: Path) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    table = max(path.glob("log/*.sst"), key=lambda each: each.stat().st_size)
    flip(table, table.stat().st_size // 3)
    async with sn.open_node(path, **SETTINGS) as node:
        [finding] = (await node.verify()).findings
        assert finding.kind is Kind.GAP
        assert finding.place.startswith("log 'p0', from position ")


async def test_a_node_in_memory_has_nothing_to_verify_or_to_back_up(tmp_path: Path) -> None:
    async with sn.open_node(None) as node:
        with pytest.raises(InvalidArgument, match="in memory"):
            await node.verify()
        with pytest.raises(InvalidArgument, match="in memory"):
            await node.backup(tmp_path / "backup")
        assert node.scrub_status == NEVER


# --- the scrubber -----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when somebody sleeps; ends the sleeper's loop after so many sleeps."""

    def __init__(self, sleeps_max: int = 1000) -> None:
        self.now_ms = 1_000_000
        self.slept: list[float] = []
        self._sleeps_max = sleeps_max

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_ms += int(seconds * 1000)
        if len(self.slept) >= self._sleeps_max:
            raise OnShutdown("the test has seen enough")
        await anyio.lowlevel.checkpoint()


def scrubber(path: Path, clock: Clock, steps: list[int], **options: float) -> Scrubber:
    async def walk(report: Report) -> AsyncIterator[int]:
        for step in steps:
            yield step
        report.count("steps", len(steps))

    return Scrubber(walk, path, ScrubOptions(**options), now_ms=lambda: clock.now_ms, sleep=clock.sleep)  # type: ignore[arg-type]


async def test_the_scrubber_keeps_its_pace(tmp_path: Path) -> None:
    clock = Clock()
    status = await scrubber(tmp_path, clock, [1 << 20] * 8, bytes_per_s=2 << 20).scrub()
    assert clock.slept == [0.5] * 8
    assert (status.bytes, status.seconds, status.verdict) == (8 << 20, 4.0, "sound")


async def test_the_last_round_is_kept_on_disk_and_the_next_is_due_an_interval_later(tmp_path: Path) -> None:
    clock = Clock()
    first = scrubber(tmp_path, clock, [], interval_s=3600)
    assert (await first.scrub()) == await anyio.to_thread.run_sync(read_status, tmp_path)
    clock.now_ms += 600_000
    later = Clock(sleeps_max=1)
    later.now_ms = clock.now_ms
    again = scrubber(tmp_path, later, [], interval_s=3600)
    with pytest.raises(OnShutdown):
        await again.run()
    assert later.slept == [3000.0]
    assert again.status.verdict == "sound"


async def test_a_node_never_scrubbed_is_scrubbed_soon_after_it_settled(tmp_path: Path) -> None:
    clock = Clock(sleeps_max=1)
    with pytest.raises(OnShutdown):
        await scrubber(tmp_path, clock, []).run()
    assert clock.slept == [SETTLE_S]


async def test_a_round_that_is_interrupted_is_begun_again(tmp_path: Path) -> None:
    clock, rounds = Clock(sleeps_max=4), []

    async def walk(_report: Report) -> AsyncIterator[int]:
        rounds.append(clock.now_ms)
        if len(rounds) == 1:
            raise StorageFailed("the log is being reopened")
        yield 0

    await Scrubber(walk, tmp_path, ScrubOptions(), now_ms=lambda: clock.now_ms, sleep=clock.sleep).run()
    assert len(rounds) == 2


async def test_a_scrubber_without_a_pace_never_runs(tmp_path: Path) -> None:
    clock = Clock(sleeps_max=1)
    await scrubber(tmp_path, clock, [], bytes_per_s=0).run()
    assert clock.slept == []


async def test_what_the_scrubber_finds_is_said_and_kept(
    sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")
    flip(segment(path, 2), 700)
    clock = Clock()
    async with sn.open_node(path, **SETTINGS) as node:
        round_ = node._services.upkeep.scrubber
        assert round_ is not None
        round_._sleep = clock.sleep
        round_._options = ScrubOptions()
        with caplog.at_level("INFO"):
            await round_.scrub()
        assert node.scrub_status.verdict == Severity.DAMAGE.value
        [text] = node.scrub_status.findings
        assert segment(path, 2).name in text
        assert msgspec.json.decode((path / "scrub.json").read_bytes())["verdict"] == "damage"
    events = [record.getMessage() for record in caplog.records if record.name.endswith("scrubber")]
    assert [event.partition(" ")[0] for event in events] == ["event=scrub_found", "event=scrub_finished"]


async def test_verifying_while_the_log_comes_back_says_so_and_leaves_nothing_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    with anyio.fail_after(HANGS_S):
        async with opened(tmp_path) as node:
            await node.insert("a", [row(1)])
            disk.fail_at(1, times=FOR_EVER)
            writing = asyncio.ensure_future(node.insert("a", [row(2)]))
            await until(lambda: node.statistics().log.attempts > 0)
            assert isinstance(await error_of(node.verify()), LogReopening)
            disk.heal()
            await writing
            assert (await node.verify()).findings == []


def test_cuts_that_retention_takes_while_they_are_walked_are_no_gap(sample: Sample, tmp_path: Path) -> None:
    path, report = copy_of(sample.closed, tmp_path / "node"), Report()
    node_id = read_node_records(path).survey.node_id
    steps = walk_cuts(path, CutExpectation(node_id=node_id, checkpoint=None, running=True), report)
    next(steps)
    for number in (1, 2):
        (path / f"cuts/{number:016d}.json").unlink()
    assert list(steps)
    assert report.findings == []
