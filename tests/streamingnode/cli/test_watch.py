"""`top` and `check`: what they tell of a node, with which exit codes, and how they end."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import streamingnode as sn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = [sys.executable, "-m", "streamingnode"]
HANGS_S = 60
CURSOR_UP = b"\x1b[1A"


# --- top ------------------------------------------------------------------------------------------


def test_top_prints_one_line_of_json_for_each_look(place: "Place", run: "Run") -> None:
    with place.open() as node:
        node.insert(place.orders, [{"id": 1, "item": "tea"}])
        with node.read(place.orders, name="billing"):
            pass
    looks: Any = run(
        "info", "top", *place.arguments, "--interval", "0.1", "-n", "2", "--json"
    ).lines
    assert len(looks) == 2
    for look in looks:
        assert look["log"] == "open"
        assert look["free_mib"] > 0
        assert look["flusher"]["lag_s"] >= 0
        assert ("billing", place.orders) in {
            (each["reader"], each["collections"]) for each in look["readers"]
        }


def test_rows_and_keys_are_counted_however_they_are_written(data: Path) -> None:
    with sn.sync.open_node(data) as node:
        before = node.statistics().appends
        node.upsert("orders", [{"id": key, "item": "tea"} for key in range(8)])
        with node.transaction() as txn:
            txn.insert("orders", [{"id": 8, "item": "tea"}])
        streamed = node.begin_transaction()
        node.delete("orders", [1, 2, 3], txn_id=streamed)
        node.commit_transaction(streamed)
        now = node.statistics().appends
        assert now.insert_rows - before.insert_rows == 8 + 1
        assert now.delete_rows - before.delete_rows == 8 + 3, "an upsert deletes its keys, too"


@pytest.mark.usefixtures("default_interrupt")
def test_top_rewrites_a_terminal_in_place_and_an_interrupt_ends_it_with_zero(data: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "info", "top", str(data), "--interval", "0.1"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    ) as running:
        os.close(theirs)
        shown = b""
        while shown.count(b"rows_per_s") < 3:
            shown += os.read(ours, 4096)
        running.send_signal(signal.SIGINT)
        assert running.wait(HANGS_S) == 0
        assert running.stderr is not None
        assert "Traceback" not in running.stderr.read()
    os.close(ours)
    assert shown.count(CURSOR_UP) >= 2 * shown.count(b"rows_per_s")


@pytest.mark.parametrize("wrong", [["--interval", "0"], ["--interval", "nan"], ["-n", "0"]])
def test_top_refuses_what_it_cannot_do(data: Path, run: "Run", wrong: list[str]) -> None:
    refused = run("info", "top", data, *wrong)
    assert (refused.code, refused.err.split(":")[0]) == (2, "INVALID_ARGUMENT")


def test_info_asks_whoever_has_the_node_what_it_counts_and_opens_none(
    place: "Place", run: "Run"
) -> None:
    term: Any = (
        run("info", "show", place.arguments[0], "--json").document if place.way != "tcp" else {}
    )
    shown = run("info", "show", *place.arguments, "--json")
    statistics: Any = shown.document["statistics"]
    assert (statistics is None) is (place.way == "closed")
    assert shown.err == ""
    assert statistics is None or statistics["log"]["state"] == "open"
    assert term.get("term") == shown.document.get("term")


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["owned", "tcp"], indirect=True)
def test_check_finds_a_served_node_well_in_one_line(place: "Place", run: "Run") -> None:
    lenient = ("--disk-free", "1:0", "--flusher-lag", "1e9:1e9")
    checked = run("check", *place.arguments, *lenient)
    assert checked.code == 0, checked.out
    assert checked.out.startswith("OK: log open, ")
    assert checked.out.count("\n") == 1
    document: Any = run("check", *place.arguments, *lenient, "--json").document
    assert (document["verdict"], document["findings"]) == ("ok", [])
    assert {"log", "flusher", "disk space", "transactions", "readers"} <= document["facts"].keys()


def test_check_finds_a_directory_that_nobody_has_open_well_and_a_service_that_is_down_not(
    data: Path, run: "Run"
) -> None:
    checked = run("check", data, "--disk-free", "1:0")
    assert (checked.code, checked.out.partition(":")[0]) == (0, "OK")
    assert "owner none, so this check opened the node" in checked.out
    down = run("check", f"unix:{data}/node.sock", "--disk-free", "1:0")
    assert (down.code, down.out.partition(":")[0]) == (2, "CRITICAL")


@pytest.mark.parametrize("place", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    "option, thing", [("--transaction-age", "transactions"), ("--reader-lag", "readers")]
)
def test_check_names_what_holds_the_log_and_how_to_end_it(
    place: "Place", run: "Run", option: str, thing: str
) -> None:
    with place.open() as node:
        with node.read(place.orders, name="billing"):
            pass
        id_ = node.begin_transaction(keepalive_s=300)
        node.insert(place.orders, [{"id": 7, "item": "jam"}], txn_id=id_)
        step = (
            f"txn abort DIR {id_}"
            if thing == "transactions"
            else f"reader rm DIR {place.orders} billing"
        )
        base = ("check", *place.arguments, "--disk-free", "1:0")
        for limits, code in (("0:1e9", 1), ("0:0", 2), ("1e9:1e9", 0)):
            checked = run(*base, option, limits)
            assert checked.code == code, checked.out
            assert (step in checked.out) is (code > 0)
        node.rollback_transaction(id_)
        node.delete_reader(place.orders, "billing")


def test_check_says_that_no_node_answers(
    tmp_path: Path, data: Path, run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (f"unix:{tmp_path / 'none'}", tmp_path / "absent"):
        checked = run("check", place)
        assert checked.code == 2
        assert checked.out.startswith("CRITICAL: node: ")
        assert " — " in checked.out

    async def hang(*_: object, **__: object) -> None:
        import anyio

        await anyio.sleep_forever()

    monkeypatch.setattr(sn.Node, "consistent_tick", hang)
    document: Any = run("check", data, "--timeout", "0.01", "--json").document
    assert document["verdict"] == "critical"
    assert "no answer within 0.01 s" in document["findings"][-1]["detail"]


@pytest.mark.parametrize(
    "wrong",
    [["--flusher-lag", "5"], ["--disk-free", "x:1"], ["--reader-lag", "nan:1"], ["--timeout", "0"]],
)
def test_check_refuses_thresholds_that_are_none(data: Path, run: "Run", wrong: list[str]) -> None:
    refused = run("check", data, *wrong)
    assert refused.code == 2
    assert wrong[0] in refused.err
    assert "limits value" not in refused.err
