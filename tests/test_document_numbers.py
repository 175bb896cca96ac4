"""Numbers, events, statistics, options and exit codes that the documents name are those of the
code.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from flusher.run import FlushOptions
from interceptors.window import ProducerLimits
from spark_sink.commit import COPIED_FILES_MAX
from spark_sink.resident import KEEP_S_MIN
from spark_sink.runtime import JAVA_MAJOR_MIN
from spark_sink.table import CHECKPOINT_COMMITS
from spark_sink.upkeep import NEWEST_FILES, SMALL_FILE_BYTES, SMALL_FILES_MAX
from streamingnode import http, listening, metrics
from streamingnode.bridging import ROWS_BYTES_MAX
from streamingnode.care.health import Thresholds
from streamingnode.cli import rows_in
from streamingnode.cli.jobs import CLOSED_NODE_CUT_S
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_OK
from streamingnode.config import NodeConfig, ServeOptions
from streamingnode.ownership import ROOT_PACKAGES
from streamingnode.remote import audit, server
from streamingnode.remote.answers import WRITE_BYTES_MAX
from streamingnode.remote.auth import TOKEN_BYTES_MIN
from streamingnode.remote.link import GIVE_UP_S_MAX
from streamingnode.remote.room import CLIENTS_BYTES_MAX, SENT_BYTES_MAX, sent_bytes_each
from streamingnode.remote.writes import GROUPS_MAX, PIECES_MAX
from streamingnode.serve import COMPONENTS
from streamingnode.signals import EXIT_SIGNALLED, SIGNALS
from streamingnode.statistics import SLOW_APPEND_S, NodeStatistics
from streamingnode.streams.stream import PRODUCE_BYTES_MAX
from streamingnode.writing.producer import NOTE_BYTES_MAX
from tests.parsed_command import COMMANDS, options_of
from wal.address import PING_S, SOCKET_PATH_BYTES_MAX
from wal.address import SILENT_S_MAX as NODE_SILENT_S_MAX
from wal.errors import StreamingNodeError
from wal.files import OWNER_S_MAX
from wal.frames import FRAME_BYTES_MAX
from wal.lifecycle import ReopenOptions
from wal.rocks.layout import OPEN_TABLES_MAX
from wal.timetick import LOGICAL_BITS

ROOT = Path(__file__).parents[1]
CONFIG = NodeConfig()
MIB = 1 << 20
LAG, FREE, AGE, BEHIND = (
    tuple(map(int, limits))
    for limits in (
        Thresholds().flusher_lag_s,
        Thresholds().free_bytes,
        Thresholds().transaction_age_s,
        Thresholds().reader_behind_s,
    )
)

NUMBERS = {
    "README": [
        f"A write is atomic up to {CONFIG.wal.group_bytes_max // MIB} MiB",
        f"Java {JAVA_MAJOR_MIN} or newer",
    ],
    "docs/operations": [
        f"waits up to {OWNER_S_MAX:g} seconds for a command to end",
        f"a path over {SOCKET_PATH_BYTES_MAX} bytes",
        f"answers the calls and writes it has for up to {listening.GRACE_S:g} seconds",
        f"A token has at least {TOKEN_BYTES_MIN} characters",
        (
            f"| `serve.connections_max`, {ServeOptions().connections_max:,}; of one address a "
            "quarter of that |"
        ),
        f"{ServeOptions().connections_max:,} is the bound",
        f"| calls of one connection | {server.CALLS_MAX:,} |",
        f"| bytes of writes of one connection without an answer | {WRITE_BYTES_MAX // MIB} MiB |",
        f"| a frame | {FRAME_BYTES_MAX // MIB} MiB, {GROUPS_MAX:,} writes |",
        (
            f"to be silent | {server.HELLO_S_MAX:g} s, {server.HELLO_S_MAX:g} s, "
            f"{server.SILENT_S_MAX:g} s |"
        ),
        (
            f"calls, writes | {CLIENTS_BYTES_MAX // MIB} MiB | clients wait; after "
            f"{server.ROOM_S_MAX:g} s"
        ),
        f"read it | {SENT_BYTES_MAX // MIB} MiB: {sent_bytes_each(127) // MIB} MiB each up to 127",
        f"at most {ProducerLimits().producers_max:,} named ones",
        f"a disk with less than {CONFIG.log.free_bytes_min // MIB} MiB free",
        f"| `--flusher-lag` | {LAG[0]}, {LAG[1]} |",
        f"| `--disk-free` | {FREE[0] // MIB}, and what appends need",
        f"| `--transaction-age` | {AGE[0]}, {AGE[1]} |",
        f"takes at most {ROWS_BYTES_MAX // MIB} MiB as rows",
        f"by itself every {FlushOptions().retry_max_s:g} seconds at the latest",
        f"({2 * CONFIG.log.free_bytes_min // MIB} MiB by default) the node makes room",
        f"and more than {COPIED_FILES_MAX} files at once",
        f"{KEEP_S_MIN} s or more",
        f"opened for a cut every {CLOSED_NODE_CUT_S:g} seconds",
        f"{SMALL_FILES_MAX} files of a partition below {SMALL_FILE_BYTES // MIB} MiB",
        f"at most {SMALL_FILES_MAX + NEWEST_FILES + 24} such files",
        f"a checkpoint every {CHECKPOINT_COMMITS} commits",
        f"RocksDB's tables, at most {OPEN_TABLES_MAX} and a quarter",
        f"it tries again, every {ReopenOptions().longest_pause_s:g} s at most",
        f"A request has {http.HEAD_BYTES_MAX >> 10} KiB and {http.REQUEST_S_MAX:g} seconds",
        f"would take it over {audit.FILE_BYTES_MAX // MIB} MiB begins a new one",
        f"`FILE.1` to `FILE.{audit.FILES_MAX - 1}`",
        f"have at most {audit.FILES_MAX * audit.FILE_BYTES_MAX // MIB} MiB",
        f"{audit.REFUSALS_PER_S} a second each of `connection_refused`",
        f"{audit.LINES_PER_S} each of `client_connected`",
        f"there are {http.CONNECTIONS_MAX} connections",
        f"rendered every {http.METRICS_S_MIN:g} s at most",
        f"takes nothing of its answer for {http.ANSWER_S_MAX:g} seconds",
    ],
    "docs/metrics": [
        f"shifted right by {LOGICAL_BITS} bits",
        (
            f"Topics have series up to {metrics.TOPICS_MAX}, by name, their groups up to "
            f"{metrics.GROUPS_MAX}"
        ),
        f"a pack took {SLOW_APPEND_S:g} s or more",
    ],
    "docs/guide": [
        f"the results of the {ProducerLimits().results_per_producer_max:,} highest sequences",
        f"in batches of up to {rows_in.ROWS_MAX:,} rows or {rows_in.BYTES_MAX // MIB} MiB",
        f"up to {NOTE_BYTES_MAX >> 10} KiB kept with the name",
        f"One is made every {CONFIG.flush.schedule.interval_s:g} seconds",
    ],
    "docs/production": [
        f"to {CONFIG.writes.pending_bytes_max // MIB} MiB of writes on their way",
        f"{CONFIG.flush.buffered_bytes_max // MIB} MiB of rows for files",
        f"{CONFIG.tail.capacity_bytes // MIB} MiB each of log for readers and for the disk",
        f"memtables of {CONFIG.log.memtable_bytes // MIB} MiB",
        f"shifted right by {LOGICAL_BITS} bits",
    ],
    "docs/protocol": [
        f"`HELLO`, within {server.HELLO_S_MAX:g} seconds",
        f"when {server.CALLS_MAX:,} of the connection are under way",
        f"together have up to {CLIENTS_BYTES_MAX // MIB} MiB of frames",
        f"sends it a `PONG` every {server.SILENCE_LOOK_S:g} seconds meanwhile",
        f"one has waited for {server.ROOM_S_MAX:g} seconds",
        f"before did not end within {server.SETTLE_S_MAX:g} seconds",
        f"at most {GROUPS_MAX:,} groups, {PIECES_MAX:,} targets",
        f"silent for {server.SILENT_S_MAX:g} seconds, or a node for {NODE_SILENT_S_MAX:g}",
        f"sends a `PING` every {PING_S:g} seconds",
        f"a client gives up after {GIVE_UP_S_MAX / 60:g} at the latest",
    ],
    "docs/streams": [f"up to {PRODUCE_BYTES_MAX // MIB} MiB to one channel"],
}
SAID = [(page, text) for page, texts in NUMBERS.items() for text in texts]


@cache
def page(name: str) -> str:
    return (ROOT / f"{name}.md").read_text("utf-8")


@pytest.mark.parametrize("name, text", SAID, ids=[f"{name}: {text}" for name, text in SAID])
def test_a_number_of_a_page_is_that_of_the_code(name: str, text: str) -> None:
    assert text in " ".join(page(name).split())


# --- events ---------------------------------------------------------------------------------------


@cache
def said_by(module: str) -> frozenset[object]:
    """Return the constants in a module: an event and its level are among them, or names of it."""
    tree = ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")))
    return frozenset(
        each.value if isinstance(each, ast.Constant) else each.attr
        for each in tree
        if isinstance(each, ast.Constant | ast.Attribute)
    )


def test_every_event_of_the_page_is_said_by_its_logger_at_its_level() -> None:
    events = re.findall(
        r"^\| (`[a-z_`, ]+`) \| (`[a-z_.`, ]+`) \| (warning|error|info)",
        page("docs/metrics"),
        re.MULTILINE,
    )
    assert len(events) > 20
    for names, loggers, level in events:
        modules = [said_by(module) for module in re.findall(r"[a-z_.]+", loggers)]
        for name in re.findall(r"[a-z_]+", names):
            assert any({name, level} <= said for said in modules), name


def test_every_component_of_the_json_log_is_on_the_page_and_has_a_logger() -> None:
    listed = re.search(r"`component` \((.*?)\)", page("docs/operations"), re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(.*?)`", listed[1])) == set(COMPONENTS.values())
    logging = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ROOT_PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "event_log(" in path.read_text("utf-8")
    ]
    of_logger = {"streamingnode.audit"}
    assert all(
        any(f"{module}.".startswith(f"{prefix}.") for module in logging)
        for prefix in COMPONENTS.keys() - of_logger
    )


# --- statistics -----------------------------------------------------------------------------------


def fields_of(kind: type) -> Iterator[str]:
    """Yield the fields of a struct, and those of structs in it, which a list or a null may stand in
    for.
    """
    for name, hint in get_type_hints(kind).items():
        inside = [
            each
            for each in (hint, *get_args(hint))
            if is_dataclass(each) or hasattr(each, "__struct_fields__")
        ]
        yield name if not inside else ""
        yield from (f"{name}.{inner}" for each in inside for inner in get_type_hints(each))


def test_every_field_of_the_statistics_is_on_the_page_and_no_other_is() -> None:
    section = (
        page("docs/metrics")
        .partition("## In the process: `await node.statistics()`")[2]
        .partition("\n## ")[0]
    )
    documented = set()
    of_table = ""
    before = ""
    for table, cell in re.findall(r"^(?:\*\*`(\w+)`\*\*|\| (`.*?) \|)", section, re.MULTILINE):
        of_table = table or of_table
        for name in re.findall(r"`([a-z0-9_.]+)`", cell):
            parent, dot, _ = name.rpartition(".")
            before = parent if dot else before if cell.index(f"`{name}`") and before else ""
            documented.add(
                f"{of_table}.{name}"
                if of_table
                else name
                if dot or not before
                else f"{before}.{name}"
            )
    whole = {"readers", "flusher", "spool", "topics"}  # of topics the text names what there is
    there = {name for name in fields_of(NodeStatistics) if name and not name.startswith("topics.")}
    assert documented == there | whole


# --- names ----------------------------------------------------------------------------------------

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PROGRAMS = {
    "--no-deps",
    "--workers",
    "--home-dir",
    "--now",
    "--preload",
    "--system",
    "--user-group",
    "--master",
    "--list",
}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_option_and_every_series_that_a_page_names_is_there(path: Path) -> None:
    text = path.read_text("utf-8")
    flags = {name for command in COMMANDS.values() for name in options_of(command)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - OTHER_PROGRAMS <= flags
    series = set(re.findall(r"^\| `(streamingnode_\w+)` \|", page("docs/metrics"), re.MULTILINE))
    assert set(re.findall(r"\bstreamingnode_[a-z_]+", text)) <= series


def test_every_exit_code_is_on_the_page_and_no_other_is() -> None:
    table = page("docs/operations").partition("## Exit codes")[2]
    waiting = [StreamingNodeError]
    codes = {EXIT_OK, EXIT_BROKEN_PIPE, *(EXIT_SIGNALLED + each for each in SIGNALS)}
    while waiting:
        codes.add((each := waiting.pop()).exit_code)
        waiting += each.__subclasses__()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
