"""The demo: what its check sees, which directory it takes, and that it records what the node
acknowledged.
"""

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
    Round,
    State,
    Step,
    _checks,
    check_rows,
    prepare,
    record,
    sample_processes,
)
from streamingnode.opening import open_node
from streamingnode.progress import Progress
from wal.errors import AlreadyOwned, InvalidArgument
from wal.files import DirectoryLock

# --- the check ------------------------------------------------------------------------------------


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
    found = _table(_processes(2, 1), _processes(1, 2, 1)).append_column(
        "_tick", pa.array([1, 1, 1])
    )
    assert check_rows("live", _table(_processes(1, 1, 2), _processes(2, 1)), found) == Check(
        "live", True, 3
    )


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


# --- the directory --------------------------------------------------------------------------------


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


# --- the recording --------------------------------------------------------------------------------


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


def _step(number: int, processes: pa.RecordBatch) -> Step:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        stream.write_batch(processes)
    return Step(number, rows=sink.getvalue().to_pybytes())


@pytest.mark.anyio
@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
async def test_a_round_of_which_nobody_knows_is_there_once(
    rounds: list[pa.RecordBatch], written: bool
) -> None:
    said = list[Step]()
    kept = Recording()
    silent = Progress(io.StringIO())

    class UntilAll(Progress):
        def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
            if note.startswith("2 rounds"):
                raise Enough

    async with open_node(None) as node:
        with pytest.raises(Enough):
            await record(node, kept, 60, 1_000, UntilAll(io.StringIO()), say=said.append)
        assert [(step.number, bool(step.time_tick)) for step in said] == [
            (1, False),
            (1, True),
            (2, False),
            (2, True),
        ]
        in_doubt = _step(2 if written else 3, rounds[1 if written else 2])
        await record(node, again := Recording(), 0, 1_000, silent, again=in_doubt, say=said.append)
        assert (again[0].time_tick == kept[1].time_tick) is written
        everything = kept if written else Recording([*kept, *again])
        assert check_rows("samples", everything.samples(), await node.snapshot("samples")).passed
        live = await node.snapshot("live")
        assert check_rows("live", everything.live_at(again[0].time_tick), live).passed


def test_a_table_without_a_round_or_with_half_of_one_fails_its_check() -> None:
    recording = Recording([Round(1, 10, _processes(1, 1, 2)), Round(2, 20, _processes(2, 1, 3))])
    recording.killed_round = 2
    both = recording.samples()
    live = recording.live_at(20)
    assert all(check.passed for check in _checks(recording, [State(20, 0, both, live)]))
    for samples, found in (
        (both[:2], live),
        (both[:3], live),
        (both, live[:1]),
        (both, recording.live_at(10)),
    ):
        assert not all(check.passed for check in _checks(recording, [State(20, 0, samples, found)]))
    assert not all(check.passed for check in _checks(recording, []))
    older = State(10, 0, recording.samples_at(10), recording.live_at(10))
    assert [check.passed for check in _checks(recording, [older])] == [
        *(True, True),  # the version is right, and it is not all
        *(False, False),
    ]


def test_look_at_this_machine_sees_this_process() -> None:
    rows = {row["pid"]: row for row in sample_processes(7).to_pylist()}
    mine = rows[os.getpid()]
    assert mine["round"] == 7
    assert mine["rss_bytes"] > 1 << 20
    assert len(rows) > 1
