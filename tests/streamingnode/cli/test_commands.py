"""Commands on real node directories: what they print, what they change, and what they refuse."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flusher.cuts import Lease, write_lease
from flusher.directory import CutLog
from spark_sink.cut_request import AnsweredCut
from streamingnode.composition import compose
from streamingnode.config import load_config
from streamingnode.opening import OpenNode, open_node
from wal.files import LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]

ROOT = Path(__file__).resolve().parents[3]

_HOLD = """
import anyio, sys
from streamingnode.opening import open_node
async def hold():
    async with open_node(sys.argv[1], listen=False):
        print("open", flush=True)
        await anyio.sleep_forever()
anyio.run(hold)
"""


def _items(printed: "Printed") -> dict[str, dict[str, object]]:
    collections = cast("list[dict[str, object]]", printed.document["collections"])
    return {str(collection["name"]): collection for collection in collections}


# --- ls, info, flush ------------------------------------------------------------------------------


def test_ls_shows_what_a_collection_is_and_counts_its_rows(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 1, "item": "x"}\n{"id": 9, "item": "y"}\n')
    run("insert", data, "orders", more, "--upsert")
    orders = _items(run("collection", "ls", data, "--json"))["orders"]
    assert "rows" not in orders
    assert "rows" not in run("collection", "ls", data).out
    assert _items(run("collection", "ls", data, "--count", "--json"))["orders"] == {
        "name": "orders",
        "id": orders["id"],
        "primary_key": "id",
        "columns": {"id": "int64", "item": "string"},
        "shards": 2,
        "partitions": ["_default"],
        "rows": 4,
    }


def test_ls_table_has_a_line_for_each_collection(data: Path, run: "Run") -> None:
    names, orders = (
        line.split() for line in run("collection", "ls", data, "--count").out.splitlines()
    )
    assert names == ["name", "id", "primary_key", "shards", "partitions", "columns", "rows"]
    assert [orders[0], *orders[2:]] == [
        "orders", "id", "2", '["_default"]', '{"id":"int64","item":"string"}', "3"
    ]  # fmt: skip


def test_flush_makes_a_cut_once_and_then_says_so(data: Path, run: "Run") -> None:
    first = run("flush", data, "--json").document
    assert (first["made"], first["number"]) == (True, 1)
    assert (
        sum(cast("int", s["rows"]) for s in cast("list[dict[str, object]]", first["segments"])) == 3
    )
    again = run("flush", data)
    assert again.code == 0
    assert "nothing new" in again.out


def test_flush_tells_the_checksum_by_which_an_ingest_knows_the_cut(data: Path, run: "Run") -> None:
    answered = [
        msgspec.json.decode(run("flush", data, "--json").out, type=AnsweredCut) for _ in range(2)
    ]
    cut = CutLog(data).read(1)
    assert answered == [AnsweredCut(number=1, tick=cut.tick, crc32c=cut.crc32c)] * 2


def test_info_changes_nothing_and_names_the_cut(data: Path, run: "Run") -> None:
    run("flush", data)
    before = run("info", "show", data, "--json").document
    after = run("info", "show", data, "--json").document
    assert before == after
    assert before["open"] is False
    assert cast("dict[str, int]", before["cuts"])["newest"] == 1
    assert [mark["cut"] for mark in cast("list[dict[str, int]]", before["checkpoints"])] == [1]


def test_info_names_ticks_that_are_ahead_of_the_clock(tmp_path: Path, run: "Run") -> None:
    async def make() -> None:
        ahead_ms = time.time_ns() // 1_000_000 + 48 * 3_600_000
        async with OpenNode(
            tmp_path / "data", load_config, partial(compose, now_ms=lambda: ahead_ms)
        ):
            pass

    anyio.run(make)
    assert (
        47
        < cast("float", run("info", "show", tmp_path / "data", "--json").document["ahead_s"]) / 3600
        < 48.01
    )


def test_info_says_what_holds_the_cuts(data: Path, run: "Run") -> None:
    run("flush", data)
    run("insert", data, "gone", data.with_name("orders.jsonl"), "--create", "--primary-key", "id")
    run("flush", data)

    def held_by() -> object:
        return cast("dict[str, object]", run("info", "show", data, "--json").document["cuts"])[
            "held_by"
        ]

    assert held_by() == [f"collection {name}, which has no table" for name in ("orders", "gone")]

    async def drop() -> None:
        async with open_node(data) as node:
            await node.drop_collection("gone")
            await node.flush()

    anyio.run(drop)
    assert held_by() == ["collection orders, which has no table"]
    node_id = str(run("info", "show", data, "--json").document["node_id"])
    orders = next(int(path.name) for path in sorted((data / "segments").iterdir()))
    for cut, expected in ((1, ["table /t/orders at cut 1"]), (3, [])):
        write_lease(
            data, Lease(table="/t/orders", node_id=node_id, collection_id=orders, cut=cut, tick=1)
        )
        assert held_by() == expected
    shown = run("info", "show", data).out.splitlines()
    assert "leases:" in shown
    assert len(shown) < 20, "people want ten lines, and what there is of leases"
    assert not [line for line in shown if line.split()[1:] in (["[]"], ["null"], ["0"])]
    everything = run("info", "show", data, "--all").out.splitlines()
    assert any(line.startswith("cuts.held_by ") and line.endswith(" []") for line in everything)
    (data / "leases" / "torn.json").write_text("{")
    assert held_by() == ["table leases/torn.json at cut 0"]


def test_empty_node_has_nothing_to_list_or_cut(tmp_path: Path, run: "Run") -> None:
    async def make() -> None:
        async with open_node(tmp_path / "data"):
            pass

    anyio.run(make)
    assert _items(run("collection", "ls", tmp_path / "data", "--json")) == {}
    assert run("flush", tmp_path / "data", "--json").document["made"] is False
    assert run("info", "show", tmp_path / "data").code == 0


# --- tail -----------------------------------------------------------------------------------------


def test_tail_prints_each_message_and_ends(data: Path, run: "Run") -> None:
    lines = run("tail", data, "orders").lines
    assert [line["type"] for line in lines] == ["create_collection", "insert"]
    rows = cast("list[dict[str, object]]", lines[1]["rows"])
    assert sorted(str(row["item"]) for row in rows) == ["milk", "salt", "tea"]


def test_tail_prints_times_beyond_the_years_that_python_has(tmp_path: Path, run: "Run") -> None:
    far = pa.array([1 << 60], pa.timestamp("us", "UTC"))
    nested = pa.StructArray.from_arrays([pa.array([1 << 30], pa.date32())], ["day"])
    pq.write_table(pa.table({"id": [1], "at": far, "s": nested}), tmp_path / "far.parquet")
    inserted = run(
        "insert",
        tmp_path / "node",
        "far",
        tmp_path / "far.parquet",
        "--create",
        "--primary-key",
        "id",
    )
    assert inserted.code == 0, inserted.err
    lines = run("tail", tmp_path / "node", "far", "--types", "insert").lines
    assert lines[0]["rows"] == [{"id": 1, "at": 1 << 60, "s": {"day": 1 << 30}}]


def test_tail_starts_where_it_is_told(data: Path, run: "Run") -> None:
    everything = run("tail", data, "orders").lines
    last = everything[-1]
    for start, expected in (
        (last["message_id"], [last]),
        (everything[0]["tick"], [last]),
        (last["tick"], []),
        ("end", []),
        ("start", everything),
    ):
        assert run("tail", data, "orders", "--from", start).lines == expected, start


def test_tail_shows_only_the_kinds_asked_for(data: Path, run: "Run") -> None:
    run("insert", data, "orders", data.parent / "orders.jsonl", "--upsert")
    shown = run("tail", data, "orders", "--types", "txn", "--limit", 1).lines
    assert [line["type"] for line in shown] == ["txn"]
    bodies = cast("list[dict[str, object]]", shown[0]["bodies"])
    assert [body["type"] for body in bodies] == ["delete", "insert"]


@pytest.mark.parametrize(
    "arguments", [["--from", "yesterday"], ["--types", "select"], ["--limit", "0"]]
)
def test_tail_refuses_what_it_does_not_know(data: Path, run: "Run", arguments: list[str]) -> None:
    refused = run("tail", data, "orders", *arguments)
    assert refused.code == 2
    assert arguments[0] in refused.err


def test_what_tail_cannot_end_at_is_not_offered_as_an_end(data: Path, run: "Run") -> None:
    step = run("tail", data, "orders", "--until", "latest").err.partition(" — ")[2]
    assert step == "give @1h, a time such as 2026-11-24T10:00:00Z, or a tick that tail prints\n"


def test_tail_into_a_reader_that_goes_away_is_quiet(data: Path, run: "Run") -> None:
    command = [sys.executable, "-m", "streamingnode", "tail", str(data), "orders"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 141
    assert run("collection", "ls", data).code == 0


@pytest.mark.usefixtures("default_interrupt")
def test_followed_tail_ends_with_130_at_an_interrupt(data: Path) -> None:
    command = [sys.executable, "-m", "streamingnode", "tail", str(data), "orders", "--follow"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        for _ in range(2):
            assert running.stdout.readline()
        running.send_signal(signal.SIGINT)
        assert "Traceback" not in running.stderr.read()
    assert running.returncode == 130


# --- a node that somebody has open ----------------------------------------------------------------


def test_owned_node_without_clients_refuses_with_pid_and_four_while_info_answers(
    data: Path, run: "Run"
) -> None:
    run("flush", data)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _HOLD, str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == "open\n"
            os.utime(data / LOCK_NAME, (0, 0))  # long ago: it is not just opening
            for refused in (
                run("flush", data),
                run("tail", data, "orders"),
                run("collection", "ls", data),
            ):
                assert refused.code == 4
                assert f"process {owner.pid}, which takes no clients — try again" in refused.err
            shown = run("info", "show", data, "--json")
            information = shown.document
            assert (information["open"], information["pid"], information["statistics"]) == (
                True,
                owner.pid,
                None,
            )
            assert "no statistics from its owner" in shown.err
            assert run("partition", "create", data, "orders", "eu").code == 4
        finally:
            owner.kill()
    assert run("flush", data).code == 0


# --- doctor, config, bench ------------------------------------------------------------------------


def test_doctor_finds_a_sound_node_sound(data: Path, run: "Run") -> None:
    examined = run("doctor", data, "--json")
    facts = cast("dict[str, str]", examined.document["facts"])
    assert examined.code == 0, examined.out
    assert {"python", "fsync", "disk space", "node"} <= facts.keys()


def test_doctor_finds_a_setting_that_no_node_opens_with(
    run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMINGNODE_FREE_BYTES_MIN", str(1 << 20))
    assert "appends are refused below 1 MiB" in run("doctor").out
    monkeypatch.setenv("STREAMINGNODE_DURABILTY", "os")
    examined = run("doctor", "--json")
    assert examined.code == 1
    assert "did you mean 'STREAMINGNODE_DURABILITY'" in examined.out


def test_doctor_warns_of_checksums_without_their_c_extension(
    run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    def checksums() -> list[dict[str, str]]:
        findings = cast("list[dict[str, str]]", run("doctor", "--json").document["findings"])
        return [each for each in findings if each["place"] == "checksums"]

    assert checksums() == []
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    [found] = checksums()
    assert found["severity"] == "warning"
    assert "2 MB/s" in found["detail"]
    assert "pip install" in found["next_step"]


def test_doctor_fails_for_a_damaged_manifest(data: Path, run: "Run") -> None:
    run("flush", data)
    manifest = next((data / "cuts").glob("*.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"number":1', b'"number":2'))
    examined = run("doctor", data)
    assert examined.code == 1
    assert "fails its checksum" in examined.out


@pytest.mark.parametrize(
    "name, text",
    [
        ("holiday.jpg", "'holiday.jpg' and no node"),
        ("backup.json", "is a backup"),
        ("segments", "'segments' and no node"),
        ("log", "is not a node's"),
    ],
)
def test_doctor_says_why_a_directory_takes_no_node(
    tmp_path: Path, run: "Run", name: str, text: str
) -> None:
    place = tmp_path / "place"
    (place / name).mkdir(parents=True)
    examined = run("doctor", place, "--json")
    (node,) = [
        each
        for each in cast("list[dict[str, str]]", examined.document["findings"])
        if each["place"] == "node"
    ]
    assert node["severity"] == "damage"
    assert text in node["detail"]
    assert node["next_step"]
    assert examined.code == 1


def test_doctor_says_that_an_empty_directory_takes_a_node(tmp_path: Path, run: "Run") -> None:
    for place in (tmp_path, tmp_path / "new"):
        examined = run("doctor", place, "--json")
        assert examined.code == 0
        assert "holds no node yet" in cast("dict[str, str]", examined.document["facts"])["node"]


def test_config_shows_where_a_value_comes_from(
    tmp_path: Path, run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[flush.schedule]\ninterval_s = 3.0\n")
    monkeypatch.setenv("STREAMINGNODE_DURABILITY", "os")
    shown = run("info", "config", "--changed", "--file", file)
    assert [line.split()[:2] for line in shown.out.splitlines()[1:]] == [
        ["flush.schedule.interval_s", "3.0"],
        ["log.durability", "os"],
    ]
    assert str(file) in shown.out
    assert "STREAMINGNODE_DURABILITY" in shown.out


def test_unknown_setting_is_refused_with_a_suggestion(
    run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMINGNODE_DURABILTY", "os")
    refused = run("info", "config")
    assert refused.code == 2
    assert "DURABILITY" in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["speed"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--callers", "0"],
        ["--rows", "0"],
        ["--dir", "absent"],
    ],
)
def test_bench_refuses_what_it_cannot_run(run: "Run", arguments: list[str]) -> None:
    assert run("bench", *arguments).code == 2


@pytest.mark.parametrize("rows", [1, 100])
def test_bench_measures_inserts_into_a_node(tmp_path: Path, run: "Run", rows: int) -> None:
    measured = run(
        "bench", "--dir", tmp_path, "--seconds", "0.1", "--callers", "4", "--rows", rows, "--json"
    ).document
    figures = cast("dict[str, float]", measured)
    assert figures["rows_per_s"] > 0
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert not list(tmp_path.iterdir())
