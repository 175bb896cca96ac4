"""The demo: what its check sees, which directory it takes, and that it records what the node acknowledged."""

import io
import os
from pathlib import Path

import pyarrow as pa
import pytest

from streamingnode.demo import (
    MARKER,
    SCHEMA,
    Check,
    Recording,
    check_rows,
    prepare,
    record,
    sample_processes,
)
from streamingnode.opening import open_node
from streamingnode.progress import Progress
from wal.errors import AlreadyOwned, InvalidArgument
from wal.files import DirectoryLock

# --- the check ---


def _processes(number: int, *pids: int) -> pa.RecordBatch:
    rows = [
        {
            "pid": pid,
            "name": f"p{pid}",
            "status": "running",
            "threads": 1,
            "cpu_seconds": 0.5,
            "rss_bytes": pid,
            "round": number,
        }
        for pid in pids
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _table(*batches: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches(batches, schema=SCHEMA)


TWO = _table(_processes(1, 1, 2))


def test_same_rows_in_another_order_with_more_columns_pass() -> None:
    found = _table(_processes(2, 1), _processes(1, 2, 1)).append_column("_tick", pa.array([1, 1, 1]))
    assert check_rows("live", _table(_processes(1, 1, 2), _processes(2, 1)), found) == Check("live", True, 3)


@pytest.mark.parametrize(
    "found",
    [
        TWO[:1],
        _table(_processes(1, 1, 2, 3)),
        _table(_processes(1, 1, 3)),
        _table(_processes(1, 1, 2, 2)),
        TWO.set_column(1, "name", pa.array(["p1", None])),
    ],
    ids=["missing", "extra", "changed", "twice", "null"],
)
def test_every_kind_of_difference_is_seen(found: pa.Table) -> None:
    assert check_rows("live", TWO, found) == Check("live", False, found.num_rows)


# --- the directory ---


def test_missing_directory_is_made_and_marked(tmp_path: Path) -> None:
    demo = tmp_path / "a" / "demo"
    prepare(demo)
    assert [path.name for path in demo.iterdir()] == [MARKER]


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert (tmp_path / MARKER).is_file()


def test_earlier_demo_is_cleared_but_a_note_beside_it_stays(tmp_path: Path) -> None:
    prepare(tmp_path / "demo")
    for part in ("node", "tables"):
        (tmp_path / "demo" / part).mkdir()
        (tmp_path / "demo" / part / "old").touch()
    for name in ("report.png", "note.txt"):
        (tmp_path / "demo" / name).touch()
    prepare(tmp_path / "demo")
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {MARKER, "note.txt"}


def test_directory_of_somebody_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "rows").touch()
    with pytest.raises(InvalidArgument, match="--dir"):
        prepare(tmp_path)
    assert (tmp_path / "node" / "rows").exists()
    assert not (tmp_path / MARKER).exists()


def test_file_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").touch()
    with pytest.raises(InvalidArgument):
        prepare(tmp_path / "demo")


def test_node_that_somebody_has_open_is_not_removed(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "node").mkdir()
    lock = DirectoryLock(tmp_path / "node")
    try:
        with pytest.raises(AlreadyOwned):
            prepare(tmp_path)
        assert (tmp_path / "node").exists()
    finally:
        lock.release()


# --- the recording ---


class Enough(Exception):
    pass


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[pa.RecordBatch]:
    """Processes come and go; 2 ends and its number is used again."""
    looks = [_processes(1, 1, 2), _processes(2, 1, 3), _processes(3), _processes(4, 2, 4)]
    monkeypatch.setattr("streamingnode.demo.sample_processes", lambda number: looks[number - 1])
    return looks


@pytest.mark.anyio
async def test_live_is_the_last_round_and_samples_are_all(rounds: list[pa.RecordBatch]) -> None:
    kept = Recording()

    class UntilAll(Progress):
        def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
            if note.startswith(f"{len(rounds)} rounds"):
                raise Enough

    async with open_node(None) as node:
        with pytest.raises(Enough):
            await record(node, kept, 60, 1_000, UntilAll(io.StringIO()))
        for recorded in kept:
            live = await node.snapshot("live", as_of=recorded.time_tick)
            assert live.select(SCHEMA.names).sort_by("pid").equals(kept.live_at(recorded.time_tick))
        assert check_rows("samples", kept.samples(), await node.snapshot("samples")).passed
    assert kept.samples().num_rows == sum(look.num_rows for look in rounds)
    assert kept.live_at(kept[0].time_tick - 1).num_rows == 0


def test_look_at_this_machine_sees_this_process() -> None:
    rows = {row["pid"]: row for row in sample_processes(7).to_pylist()}
    mine = rows[os.getpid()]
    assert mine["round"] == 7
    assert mine["rss_bytes"] > 1 << 20
    assert len(rows) > 1
