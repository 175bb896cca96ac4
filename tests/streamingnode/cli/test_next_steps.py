"""What an error says to do next serves the command line, too: commands and flags that exist, no
words of a program.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import streamingnode as sn
from streamingnode.ownership import ROOT_PACKAGES
from tests.parsed_command import COMMANDS, options_of
from wal.errors import Truncated
from wal.position import RocksMessageId

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]

ROOT = Path(__file__).resolve().parents[3]
DASH = " — "
WORDS_OF_A_PROGRAM = re.compile(
    r"\w\(|\b[a-z_]+=\S|DeliverPolicy|\b(?:node|sn|pa|messages|spark_sink)\.[a-z]"
    r"|\bpass\b|\bawait\b"
)

SAID_TO_PROGRAMS = {
    "streamingnode/sync.py": "use of a synchronous node",
    "streamingnode/opening.py": "arguments of open_node",
    "streamingnode/node.py": "arguments of its methods",
    "streamingnode/collections.py": "a list of partitions",
    "streamingnode/reader.py": "arguments and use of read()",
    "streamingnode/rows.py": "rows as Python objects and Arrow data",
    "streamingnode/schema.py": "schemas as Python objects",
    "wal/rocksmq": "messages and their ids as Python objects",
    "streamingnode/streams": "use of streams and channels",
    "streamingnode/batching.py": "arguments and use of its classes",
    "streamingnode/remote/client.py": "use of readers and producers",
    "streamingnode/remote/link.py": "use of a client",
    "wal/wire_types.py": "use of readers",
    "streamingnode/remote/queue.py": "arguments of its methods",
    "streamingnode/writing": "arguments and use of transactions and producers",
    "streamingnode/snapshot.py": "as_of",
    "spark_sink/cut_request.py": "nodes as Python objects",
    "spark_sink/source.py": "options of the data source",
    "spark_sink/tables.py": "arguments of read_tables",
    "scanner/deliver_policy.py": "arguments of DeliverPolicy",
    "interceptors/idempotency.py": "named producers",
    "wal/append.py": "ticks of writes that are spooled",
    "wal/position.py": "sequences of producers",
    "wal/timetick.py": "times as Python objects",
}
"""Where next steps are about Python objects that no command takes, and may say so."""


def test_a_next_step_names_commands_and_flags_that_exist() -> None:
    flags = {flag for command in COMMANDS.values() for flag in options_of(command)}
    steps = [
        text.partition(DASH)[2]
        for package in ROOT_PACKAGES
        for path in modules(package)
        for text in texts_of(path)
    ]
    named = {name for step in steps for name in re.findall(r"streamingnode ([a-z]+ ?[a-z]*)", step)}
    unknown = {name for name in named if name.split()[0] not in COMMANDS and name not in COMMANDS}
    assert unknown <= {"there", "in a"}, "a group is named with its action"
    assert {flag for step in steps for flag in re.findall(r"(?<!\w)--[a-z-]+", step)} <= flags


def test_a_next_step_that_a_command_may_show_does_not_speak_to_programs() -> None:
    spoken = [
        f"{path.relative_to(ROOT)}: {text}"
        for package in ROOT_PACKAGES
        for path in modules(package)
        if not any(path.is_relative_to(ROOT / said) for said in SAID_TO_PROGRAMS)
        for text in texts_of(path)
        if WORDS_OF_A_PROGRAM.search(text.partition(DASH)[2])
    ]
    assert spoken == []


def modules(package: str) -> Iterator[Path]:
    return (ROOT / package).rglob("*.py")


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of a module's errors, without what is put in."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for argument in node.args if isinstance(node, ast.Call) else ():
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            yield "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


MISTAKES = [
    "tail {data} nope",
    "tail {data} orders --from rocks/zzzz",
    "tail {data} orders --from rocks/0",
    "tail {data} orders --from rocks/!",
    "tail {data} orders --from nsq/1",
    "tail {data} orders --from yesterday",
    "tail {data} orders --from 99999999999999999999999",
    "tail {data} orders --from 2099-01-01T00:00:00Z",
    "ingest {data} --tables {data}/tables",
    "tail {data} orders --limit 0",
    "tail {data} orders --types select",
    "partition ls {data} nope",
    "partition ls {data} orders eu",
    "partition create {data} orders",
    "partition create {data} orders _mine",
    "partition create {data} orders Eu",
    "partition create {data} orders eu",
    "partition drop {data} orders us",
    "partition drop {data} orders _default",
    "insert {data} nope {rows}",
    "insert {data} orders {rows} --partition us",
    "insert {data} orders {bad}",
    "insert {data} orders {null}",
    "insert {data} new {rows} --create",
    "insert {data} new {rows} --create --primary-key nope",
    "insert {data} new {rows} --create --primary-key item --shards 0",
    "insert {data} new {rows} --create --primary-key id --partition _x",
    "insert {data} New {rows} --create --primary-key id",
    "insert {data} orders {rows} --create --primary-key item",
    "insert {nowhere} orders {rows}",
    "collection ls {nowhere}",
    "info show {nowhere}",
    "flush {nowhere}",
    "verify {data} --tables {nowhere}",
    "backup {data} {data}/inside",
    "backup {nowhere} {nowhere}-backup",
    "restore {nowhere} {nowhere}-node",
    "restore {nowhere} {data} --file floor",
    "export {nowhere} {nowhere}-rows",
    "export {data} {data}/inside",
    "ingest {nowhere} --tables {nowhere}",
    "info config --file {nowhere}",
    "bench --dir {nowhere}",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_to_type(data: Path, run: "Run", mistake: str) -> None:
    for name, line in (("bad", '{{"id": "x"}}'), ("null", '{{"item": "x"}}')):
        (data.parent / name).write_text(line.format() + "\n")
    places = {name: data.parent / name for name in ("bad", "null", "nowhere")}
    assert run("partition", "create", data, "orders", "eu").code == 0
    printed = run(*mistake.format(data=data, rows=data.parent / "orders.jsonl", **places).split())
    assert printed.code in {1, 2}, printed.out
    code, _, text = printed.err.splitlines()[-1].partition(": ")
    assert code.isupper()
    assert DASH in text
    assert not WORDS_OF_A_PROGRAM.search(text), text


def test_log_that_is_no_longer_kept_is_answered_with_flags(data: Path, run: "Run") -> None:
    async def give_up_log() -> None:
        settings: dict[str, Any] = {
            "cut_interval_s": None,
            "retention_s": 0,
            "flush.retention.interval_s": 0.005,
        }
        async with sn.open_node(data, **settings) as node:
            await node.flush()
            with anyio.fail_after(60), pytest.raises(Truncated):
                while True:
                    async with node.read("orders", sn.DeliverPolicy.start_from(RocksMessageId(1))):
                        await node.consistent_tick()

    anyio.run(give_up_log)
    printed = run("tail", data, "orders", "--from", "rocks/1")
    assert printed.err.startswith("TRUNCATED: rocks/1 is no longer kept — start from rocks/")
