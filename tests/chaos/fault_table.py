"""Every fault with what is promised, what it may cost and how it is tried; rendered into
docs/guarantees.md.

In: the kept runs of the gates. Out: lines between two marks of the document, with the figures the
gates last gave. Numbers are those of the list that the project was planned by.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.report import GateReport, GateTotal, totals

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
BEGIN = "<!-- faults: begin -->"
END = "<!-- faults: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: its number, what happens, what is promised then, what it may cost, gates and tests
    that try it.
    """

    number: str
    happens: str
    promised: str
    lost: str
    gates: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


FAULTS = (
    Fault(
        number="F1",
        happens="`kill -9`, anywhere",
        promised="acknowledged rows are there once, in order; transactions whole; a producer's "
        "retry gets the first result",
        lost="nothing acknowledged",
        gates=("kill", "failpoints"),
        tests=("tests/crash", "tests/test_kill.py", "tests/test_killed_feed.py"),
    ),
    Fault(
        number="F2",
        happens="power goes",
        promised="the same, with the default durability",
        lost="nothing; with `os` a suffix of at most the sync interval, never a hole",
        gates=("power", "simulation"),
        tests=("tests/crash", "tests/simulation"),
    ),
    Fault(
        number="F3",
        happens="torn or reordered pages behind the last sync",
        promised="found; the tail is dropped and logged, the node starts",
        lost="what was neither acknowledged nor read",
        gates=("power", "simulation"),
        tests=("tests/wal/rocks", "tests/simulation"),
    ),
    Fault(
        number="F4",
        happens="the disk is full on an append",
        promised="`STORAGE_FULL`; reading goes on; appends go on within 5 s of space being freed",
        lost="nothing",
        gates=("full",),
        tests=("tests/test_full_disk.py",),
    ),
    Fault(
        number="F5",
        happens="the disk is full on a flush or a file of a cut",
        promised="no part of the cut is visible, no log is deleted; the cut is made once there is "
        "room",
        lost="nothing",
        gates=("full",),
        tests=("tests/test_full_disk.py", "tests/flusher/test_full_disk.py"),
    ),
    Fault(
        number="F6",
        happens="a write or sync fails",
        promised="no acknowledgement; the log is closed, verified and opened again by itself",
        lost="nothing; the write may be there or not, and its call reports that",
        gates=("syscalls", "simulation"),
        tests=(
            "tests/test_failed_write.py",
            "tests/test_disk_error.py",
            "tests/wal/rocks/test_reopening.py",
        ),
    ),
    Fault(
        number="F7",
        happens="bits of the log flip",
        promised="the node does not start, names file and place, exits with 3; `export --salvage` "
        "takes out the rest",
        lost="nothing that a backup has; else what the export names",
        gates=("rot", "bytes", "fuzz"),
        tests=("tests/streamingnode/care",),
    ),
    Fault(
        number="F8",
        happens="bits of a table, a segment or a manifest flip",
        promised="reading it is `CORRUPT`, `verify` finds it, `restore --file` puts it back, "
        "`export --salvage` takes out the rest; never other data",
        lost="as F7",
        gates=("rot", "bytes", "fuzz"),
        tests=("tests/streamingnode/care",),
    ),
    Fault(
        number="F9",
        happens="a file of the log is gone or short",
        promised="the node does not start: the floor is past what is there",
        lost="as F7",
        tests=("tests/streamingnode/care", "tests/test_bad_directory.py"),
    ),
    Fault(
        number="F10",
        happens="the clock goes back, leaps or stands still",
        promised="ticks ascend, over restarts too; a leap of over an hour is logged and not "
        "followed; "
        "log and cuts of a clock that was ahead get old all the same",
        lost="nothing",
        gates=("simulation",),
        tests=("tests/test_clock.py", "tests/wal/test_timetick.py"),
    ),
    Fault(
        number="F11",
        happens="the disk is slow",
        promised="a bounded queue, then back-pressure; deadlines give a typed error; the event "
        "loop goes on",
        lost="nothing",
        gates=("syscalls",),
        tests=("tests/test_slow_disk.py", "tests/wal/rocks/test_back_pressure.py"),
    ),
    Fault(
        number="F12",
        happens="a reader does not read",
        promised="only this reader waits; memory stays flat",
        lost="nothing; a reader without a name may meet `TRUNCATED`",
        gates=("soak",),
        tests=("tests/test_slow_reader.py", "tests/streamingnode/remote/test_session_abuse.py"),
    ),
    Fault(
        number="F13",
        happens="a caller goes away inside a transaction",
        promised="it expires or is rolled back, its locks are free, readers are not held up",
        lost="the transaction, whole",
        gates=("failpoints", "simulation", "network"),
        tests=(
            "tests/interceptors/txn",
            "tests/test_cancellation.py",
            "tests/streamingnode/remote",
        ),
    ),
    Fault(
        number="F14",
        happens="an answer is lost and the write repeated",
        promised="the first result, no second write; over kills too",
        lost="nothing; beyond 1,024 later writes of the producer, `SEQUENCE_TOO_OLD`",
        gates=("kill", "takeover", "simulation", "network"),
        tests=(
            "tests/test_retries.py",
            "tests/test_killed_feed.py",
            "tests/interceptors/idempotency",
        ),
    ),
    Fault(
        number="F15",
        happens="two owners",
        promised="the second is refused; where `flock` does not work, the fencing token alone: the "
        "older one acknowledges "
        "nothing from its next write on",
        lost="nothing acknowledged before; without a lock, what the older one's threads spoil of "
        "the newer one's files",
        gates=("takeover",),
        tests=(
            "tests/wal/rocks/test_reopening.py",
            "tests/wal/rocks/test_ownership_of_a_directory.py",
        ),
    ),
    Fault(
        number="F16",
        happens="a file or manifest is written in part",
        promised="it is never visible; left-overs are removed at the next start",
        lost="nothing",
        gates=("failpoints", "power"),
        tests=("tests/flusher", "tests/crash/test_failpoints.py"),
    ),
    Fault(
        number="F17",
        happens="an ingest, its Spark or both are killed, or two run at once",
        promised="every row is in its table once, every version of a table is its collection at a "
        "cut",
        lost="nothing",
        gates=("ingest",),
        tests=("tests/spark_sink/test_ingest_killed.py",),
    ),
    Fault(
        number="F18",
        happens="a giant message or length",
        promised="refused before memory is taken",
        lost="nothing",
        gates=("fuzz",),
        tests=("tests/wal/test_codec.py", "tests/test_bad_input.py", "tests/streamingnode/remote"),
    ),
    Fault(
        number="F19",
        happens="malformed bytes",
        promised="a typed error, within a second and 256 MiB; of a connection, that one ends and "
        "others go on",
        lost="nothing",
        gates=("fuzz", "network"),
        tests=("tests/fuzz", "tests/wal/test_codec.py", "tests/streamingnode/remote"),
    ),
    Fault(
        number="F20",
        happens="rows that do not fit the schema",
        promised="refused, with column and row; the log is untouched",
        lost="nothing",
        tests=("tests/test_bad_input.py", "tests/streamingnode/test_rows.py"),
    ),
    Fault(
        number="F21",
        happens="a name that would be a path, is reserved or is no name at all",
        promised="refused, by the node too, whoever sends it: ids become paths, names only those "
        "of tables, as checked",
        lost="nothing",
        tests=("tests/test_bad_input.py", "tests/streamingnode/remote/test_session_abuse.py"),
    ),
    Fault(
        number="F22",
        happens="a client without credentials, or without the right",
        promised="nothing but its hello is looked at, for 10 s and 64 KiB; then `UNAUTHENTICATED`, "
        "or `ACCESS_DENIED`",
        lost="nothing",
        tests=(
            "tests/streamingnode/remote/test_auth.py",
            "tests/streamingnode/remote/test_session.py",
        ),
    ),
    Fault(
        number="F23",
        happens="TLS without a key, with one that others may read, or with a certificate that is "
        "not valid now",
        promised="the node does not start; a client verifies certificate and name, "
        "unless its own `ssl.SSLContext` says otherwise",
        lost="nothing",
        tests=("tests/streamingnode/remote/test_auth.py",),
    ),
    Fault(
        number="F24",
        happens="a thousand connections that say nothing, or a byte now and then",
        promised="each is ended by its deadline; connections over the bound, in all or of one "
        "address, are refused, and others are served",
        lost="nothing",
        tests=(
            "tests/streamingnode/remote/test_session.py",
            "tests/streamingnode/remote/test_floods.py",
        ),
    ),
    Fault(
        number="F25",
        happens="few bytes that would become many: compressed rows, MessagePack in MessagePack, a "
        "frame of a million writes",
        promised="compressed rows are refused unread, lists over their bound undecoded; that "
        "connection ends",
        lost="nothing",
        tests=(
            "tests/streamingnode/remote/test_session_abuse.py",
            "tests/streamingnode/remote/test_session.py",
        ),
    ),
    Fault(
        number="F26",
        happens="ids, positions and sequences at the ends of their ranges",
        promised="checked where they come in, refused with the range",
        lost="nothing",
        gates=("fuzz",),
        tests=(
            "tests/test_bad_input.py",
            "tests/wal/test_message_id.py",
            "tests/wal/test_codec.py",
        ),
    ),
    Fault(
        number="F27",
        happens="no descriptors are left",
        promised="64 suffice for any number of segments, cuts and tables; without any, `flush` "
        "raises `OVERLOADED` and the "
        "cut is made once there are some; connections wait, and a node that cannot accept them "
        "tries once a second",
        lost="nothing; for the log itself it is a failed write like others",
        gates=("soak",),
        tests=(
            "tests/test_open_files.py",
            "tests/wal/rocks/test_many_tables.py",
            "tests/streamingnode/remote/test_floods.py",
        ),
    ),
    Fault(
        number="F28",
        happens="`SIGTERM` or `Ctrl-C`",
        promised="the program decides; leaving the node's block, also by cancellation, drains and "
        "closes in order; "
        "`serve` does so at the first signal, within 10 s on a quiet machine, answering the writes "
        "it has, and ends at the second",
        lost="nothing acknowledged",
        tests=(
            "tests/test_busy_close.py",
            "tests/test_cancellation.py",
            "tests/streamingnode/test_serve.py",
        ),
    ),
)


def rendered(reports: Iterable[GateReport]) -> str:
    """Return the table between its marks."""
    by_gate = {each.gate: each for each in totals(reports)}
    rows = [_row(fault, by_gate) for fault in FAULTS]
    head = [
        "| # | what happens | promised | lost | tried by | tried so far |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def write_fault_table(reports: Iterable[GateReport]) -> None:
    """Replace what is between the marks of docs/guarantees.md."""
    text = DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    assert rest, f"{DOCUMENT.name} has the mark {BEGIN}"
    DOCUMENT.write_text(before + rendered(reports) + rest.partition(END)[2], "utf-8")


def _row(fault: Fault, by_gate: dict[str, GateTotal]) -> str:
    tried_by = [*(f"gate `{gate}`" for gate in fault.gates), *(f"`{test}`" for test in fault.tests)]
    figures = [_figure(gate, by_gate.get(gate)) for gate in fault.gates] or ["with each commit"]
    cells = (
        fault.number,
        fault.happens,
        fault.promised,
        fault.lost,
        ", ".join(tried_by),
        "; ".join(figures),
    )
    return f"| {' | '.join(cells)} |"


def _figure(gate: str, total: GateTotal | None) -> str:
    if total is None:
        return f"{gate}: no long run kept"
    failed = f"{total.failed:,} failed" if total.failed else "none failed"
    return f"{total.tried:,} {total.unit}, {failed}"
