"""Named readers whose log is built anew: what they had not read is not taken silently, and verify names who is stuck."""

from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.inspection.node_records import read_node_records
from streamingnode.node import Node
from streamingnode.repair.plan import ActionKind
from streamingnode.repair.repairing import RepairResult, repair_directory
from streamingnode.verification.finding import Kind, Severity
from streamingnode.verification.walk import verify_directory
from tests.streamingnode.sample_node import SCHEMA, SETTINGS, Sample, copy_of, flip, largest, rows_of
from wal.errors import Truncated


def repair(path: Path, *, accept_loss: bool = False, now_ms: int = 1) -> RepairResult:
    return repair_directory(path, dry_run=False, accept_loss=accept_loss, backup=None, now_ms=lambda: now_ms)


def damage_before_the_checkpoint(path: Path) -> None:
    table = largest(path, "log/*.sst")
    flip(table, int(table.stat().st_size * 0.3))


def given_up(result: RepairResult) -> list[str]:
    return [text for action in result.plan.actions for text in action.gives_up]


async def read_some(node: Node, collection: str, name: str, *, messages: int | None) -> int:
    """Acknowledge so many messages with rows, None for all; return how many there were."""
    seen = 0
    async with node.read(collection, name=name, until=await node.consistent_tick()) as reader:
        async for message in reader:
            seen += 1
            await reader.ack(message)
            if seen == messages:
                break
    return seen


def with_reader(path: Path, name: str, *, messages: int | None) -> Path:
    """Let a named reader of the node read so many messages."""

    async def read() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await read_some(node, "orders", name, messages=messages)

    anyio.run(read)
    return path


@pytest.fixture
def damaged(sample: Sample, tmp_path: Path) -> Path:
    """A node whose reader has read three messages, and whose log has a hole behind them and before the checkpoint."""
    path = with_reader(copy_of(sample.closed, tmp_path / "node"), "billing", messages=3)
    damage_before_the_checkpoint(path)
    return path


def test_log_a_named_reader_has_not_read_is_not_given_up_without_consent(damaged: Path) -> None:
    before = sorted(damaged.rglob("*"))
    result = repair(damaged)
    assert not result.done
    assert sorted(damaged.rglob("*")) == before
    [text] = given_up(result)
    assert "named reader 'billing' of collection 'orders': positions " in text
    assert "rows up to the newest cut, 3, are in files" in text


def test_reader_that_lost_its_place_is_told_so_and_reads_on_when_it_is_opened_anew(
    damaged: Path, sample: Sample
) -> None:
    result = repair(damaged, accept_loss=True)
    assert result.done
    [finding] = result.after.findings
    assert (finding.kind, finding.severity) == (Kind.BEHIND, Severity.WARNING)
    assert finding.place == "log, named reader 'billing' of collection 'orders'"
    [text] = given_up(result)
    last_lost = int(text.partition(" to ")[2].partition(",")[0])
    assert f"the log begins at {last_lost + 1}:" in finding.detail

    async def open_it() -> None:
        async with sn.open_node(damaged, **SETTINGS) as node:
            assert (await node.verify()).findings == [finding]
            with pytest.raises(Truncated, match="no longer kept"):
                await read_some(node, "orders", "billing", messages=None)
            await node.delete_reader("orders", "billing")
            assert await read_some(node, "orders", "billing", messages=None) > 0
            assert (await node.verify()).findings == []

    anyio.run(open_it)
    assert verify_directory(damaged).findings == []
    assert rows_of(damaged) == sample.rows


def test_reader_that_is_behind_the_log_already_is_not_asked_for_again(damaged: Path) -> None:
    repair(damaged, accept_loss=True)

    async def go_on() -> None:
        async with sn.open_node(damaged, **SETTINGS) as node:
            await node.insert("orders", [{"id": -key, "item": "later" * 1000} for key in range(1, 100)])
            await node.flush()

    anyio.run(go_on)
    damage_before_the_checkpoint(damaged)
    result = repair(damaged, now_ms=2)
    assert [action.kind for action in result.plan.actions] == [ActionKind.NEW_LOG]
    assert given_up(result) == []
    assert result.done


def test_reader_whose_place_is_kept_gives_up_nothing(sample: Sample, tmp_path: Path) -> None:
    path = with_reader(copy_of(sample.closed, tmp_path / "node"), "billing", messages=None)
    damage_before_the_checkpoint(path)
    result = repair(path)
    assert given_up(result) == []
    assert result.done
    assert result.after.findings == []


@pytest.mark.parametrize("drop", ["never", "before the cut", "after the cut"])
def test_reader_of_a_dropped_collection_has_nothing_to_give_up(sample: Sample, tmp_path: Path, drop: str) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    async def work() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            await node.create_collection("brief", SCHEMA, primary_key="id")
            await node.insert("brief", [{"id": 1, "item": None}])
            assert await read_some(node, "brief", "idle", messages=1) == 1
            for key in range(1, 100):
                await node.insert("orders", [{"id": -key, "item": "later" * 100}])
            if drop == "before the cut":
                await node.drop_collection("brief")
            await node.flush()
            if drop == "after the cut":
                await node.drop_collection("brief")

    anyio.run(work)
    assert [key for key in read_node_records(path).readers if key.endswith("/idle")], "its record is still there"
    tables = [each for each in path.glob("log/*.sst") if not (sample.closed / "log" / each.name).exists()]
    table = max(tables, key=lambda each: each.stat().st_size)
    flip(table, table.stat().st_size // 2)
    result = repair(path, accept_loss=True)
    assert [action.kind for action in result.plan.actions] == [ActionKind.NEW_LOG]
    assert len(given_up(result)) == len(result.after.findings) == (drop == "never")
