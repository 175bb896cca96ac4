"""What signals do to commands that work long is what the page says of each."""

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import streamingnode as sn
from streamingnode.signals import EXIT_AT_ONCE
from tests.streamingnode.cli.conftest import HANGS_S

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "operations.md"
PROGRAM = [sys.executable, "-m", "streamingnode"]
COLUMNS = {signal.SIGINT: 2, signal.SIGTERM: 3, signal.SIGHUP: 4}

Started = subprocess.Popen[str]
Start = Callable[..., Started]


def code_on_page(command: str, number: signal.Signals) -> int:
    table = PAGE.read_text("utf-8").partition("## Signals")[2].partition("\n## ")[0]
    (row,) = [line for line in table.splitlines() if re.match(rf"\|[^|]*`{command}`[^|]*\|", line)]
    return int(row.strip("|").split("|")[COLUMNS[number]].split(";")[0])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command, which is killed at the end of the test if it has not ended."""
    with ExitStack() as ending:

        def begin(*arguments: str) -> Started:
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            process: Started = subprocess.Popen(
                [*PROGRAM, *arguments], cwd=ROOT, text=True, **pipes
            )
            ending.enter_context(process)
            ending.callback(process.kill)
            return process

        yield begin


def first_line(process: Started) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def goes_on(process: "subprocess.Popen[Any]") -> bool:
    """Whether a command has not ended, a moment later."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.01)
    return process.poll() is None


@pytest.fixture
def node(data: Path) -> Iterator[sn.sync.SyncNode]:
    with sn.sync.open_node(data) as opened:
        opened.mq.create_topic("events")
        yield opened


@pytest.mark.usefixtures("default_interrupt")
@pytest.mark.parametrize("number", COLUMNS, ids=lambda each: each.name)
def test_what_works_until_a_signal_ends_as_the_page_says(
    number: signal.Signals, data: Path, node: sn.sync.SyncNode, start: Start
) -> None:
    place = str(data)
    with node.read("orders", sn.DeliverPolicy.latest()) as messages:
        commands = {
            "tail": start("tail", place, "orders", "--follow"),
            "info top": start("info", "top", place, "--json", "--interval", "0.1"),
            "bridge": start("bridge", place, "events", "orders"),
            "insert": start("insert", place, "orders"),
        }
        assert commands["insert"].stdin is not None
        commands["insert"].stdin.write('{"id": 7, "item": "jam"}\n')
        commands["insert"].stdin.flush()
        node.mq.produce("events", [b'{"id": 8, "item": "oil"}'])
        for _ in ("insert", "bridge"):
            assert next(iter(messages)).num_rows == 1
        for name in ("tail", "info top"):
            assert first_line(commands[name])
        for process in commands.values():
            process.send_signal(number)
        ended = {name: process.wait(HANGS_S) for name, process in commands.items()}
        said = {name: process.stderr.read() for name, process in commands.items() if process.stderr}
    assert ended == {name: code_on_page(name, number) for name in commands}
    assert "Traceback" not in "".join(said.values())
    words = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
    assert said["tail"] == f"{words[number]}\n"


def test_an_export_that_is_terminated_leaves_nothing_behind(
    data: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "rows"
    served = start("serve", str(data))
    assert first_line(served)
    served.send_signal(signal.SIGSTOP)  # so that the export is under way for as long as it takes
    export = start("export", str(data), str(out))
    while not [*tmp_path.glob("rows.*")]:
        assert goes_on(export)
    export.send_signal(signal.SIGTERM)
    assert export.wait(HANGS_S) == code_on_page("export", signal.SIGTERM)
    assert not [*tmp_path.glob("rows*")]
    served.send_signal(signal.SIGCONT)
    served.send_signal(signal.SIGHUP)
    assert served.wait(HANGS_S) == code_on_page("serve", signal.SIGHUP)


@pytest.mark.usefixtures("default_interrupt")
@pytest.mark.parametrize("form, number", [("json", signal.SIGINT), ("arrow", signal.SIGTERM)])
def test_a_tail_that_writes_into_a_full_pipe_ends_too(
    form: str, number: signal.Signals, data: Path, node: sn.sync.SyncNode
) -> None:
    node.insert("orders", [{"id": key, "item": "tea" * 10} for key in range(100, 8_000)])
    unread, full = os.pipe()
    command = [*PROGRAM, "tail", str(data), "orders", "-o", form]
    with subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE) as tail:
        try:
            while select.select([], [full], [], 0)[1]:
                assert goes_on(tail)
            tail.send_signal(number)
            assert tail.wait(HANGS_S) == code_on_page("tail", number)
        finally:
            tail.kill()
            os.close(unread)
            os.close(full)


def test_a_second_signal_ends_a_command_at_once(
    data: Path, node: sn.sync.SyncNode, start: Start
) -> None:
    tail = start("tail", str(data), "orders", "--follow")
    assert first_line(tail)
    tail.send_signal(signal.SIGSTOP)  # so that it finds both
    tail.send_signal(signal.SIGHUP)
    tail.send_signal(signal.SIGTERM)
    tail.send_signal(signal.SIGCONT)
    assert tail.wait(HANGS_S) == EXIT_AT_ONCE


def test_what_is_ignored_at_the_start_stays_ignored(data: Path, node: sn.sync.SyncNode) -> None:
    command = [*PROGRAM, "tail", str(data), "orders", "--follow"]
    shell = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "nohup", *command]
    with subprocess.Popen(shell, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tail:
        for _ in range(2):  # two shards
            assert first_line(tail)
        tail.send_signal(signal.SIGHUP)
        tail.send_signal(signal.SIGINT)
        node.insert("orders", [{"id": 70, "item": "goes on"}])
        assert "goes on" in first_line(tail)
        tail.send_signal(signal.SIGTERM)
        assert tail.wait(HANGS_S) == 143


# --- the file of tokens ---------------------------------------------------------------------------


def client(name: str, rights: str) -> str:
    digest = hashlib.sha256(token(name).encode()).hexdigest()
    return f'[[client]]\nname = "{name}"\nsha256 = "{digest}"\n{rights}\n'


def token(name: str) -> str:
    return f"{name}-0123456789abcdef"


EVERYTHING = 'consume = ["*"]\nproduce = ["*"]'


def test_at_a_hangup_a_service_reads_its_tokens_anew_and_says_so(
    data: Path, tmp_path: Path, start: Start
) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(0o600)
    file.write_text(
        client("stays", EVERYTHING) + client("goes", EVERYTHING) + client("less", EVERYTHING)
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as ending:
        served = start("serve", str(data), "--listen", url, "--tokens", str(file), "--json")
        assert json.loads(first_line(served))["ready"]

        def connect(name: str) -> sn.sync.SyncNode:
            opened = sn.sync.connect(url, token=token(name), give_up_s=HANGS_S)
            return ending.enter_context(opened)

        def hung_up() -> dict[str, Any]:
            served.send_signal(signal.SIGHUP)
            told: dict[str, Any] = json.loads(first_line(served))
            return told

        stays = connect("stays")
        goes = connect("goes")
        less = connect("less")
        local = ending.enter_context(sn.sync.connect(f"unix:{data}/node.sock"))
        file.write_text(
            client("stays", EVERYTHING)
            + client("less", 'consume = ["*"]')
            + client("new", EVERYTHING)
        )
        assert hung_up() == {"tokens": 3, "ended": 2}
        row = [{"id": 50, "item": "tea"}]
        for each in (stays, local, connect("new")):
            each.insert("orders", row)
        with pytest.raises(sn.errors.Unauthenticated):
            goes.insert("orders", row)
        less.snapshot("orders")
        with pytest.raises(sn.errors.AccessDenied):
            less.insert("orders", row)
        for spoil in spoils(file):
            spoil()
            told = hung_up()
            assert told["tokens"] is None
            assert "token file" in told["error"]
            stays.insert("orders", row)
        served.terminate()
        assert served.wait(HANGS_S) == 0


def spoils(file: Path) -> tuple[Callable[[], object], ...]:
    return (lambda: file.write_text("no toml ["), lambda: file.chmod(0o644), file.unlink)


def test_signals_are_left_alone_outside_of_the_main_thread(data: Path) -> None:
    from streamingnode.cli import main

    before = signal.getsignal(signal.SIGTERM)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(main(["info", "show", str(data)])))
    thread.start()
    thread.join()
    assert ended == [0]
    assert signal.getsignal(signal.SIGTERM) is before
