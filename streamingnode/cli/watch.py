"""The commands that inspect a node and its machine: `info`, `check` and `doctor`."""

import itertools
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import streamingnode as sn
from streamingnode.cli.command import FILE, PROGRAM, NodeUrl, Place, at_place, group, with_node
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_tick
from wal.errors import InvalidArgument, StorageFailed, StreamingNodeError
from wal.timetick import AHEAD_MS_MAX, physical_ms

if TYPE_CHECKING:
    from streamingnode.holders import ReaderInfo, TransactionInfo
    from streamingnode.statistics import NodeStatistics

    Sample = tuple[NodeStatistics, Sequence[ReaderInfo], Sequence[TransactionInfo]]

ANSWER_S = 5.0
"""How many seconds `info` waits for the node; the rest comes from its files."""
INTERVAL_S_MIN = 0.1
"""Minimum seconds between two requests to a node."""

IN_SHORT = frozenset(
    {
        "directory",
        "node_id",
        "open",
        "pid",
        "term",
        "time",
        "ahead_s",
        "readers",
        "topics",
        "leases",
    }
    | {
        "cuts.newest",
        "cuts.time",
        "cuts.held_by",
        "statistics.log.state",
        "statistics.log.last_error",
    }
    | {
        "statistics.appends.insert_rows",
        "statistics.flusher.state",
        "statistics.flusher.last_error",
    }
    | {"statistics.flusher.unflushed_rows", "statistics.space.level"}
)


INFO = group("info", "Show a node, its activity, and its settings.")


@INFO.verb(
    "show",
    "streamingnode info show data",
    "streamingnode info show data --all",
    "streamingnode info show data --json",
)
@at_place()
@click.option("--all", "everything", is_flag=True, help="Show all values, as with --json.")
def show(output: Output, *, place: Place, everything: bool) -> None:
    """Show a node: its identity, owner, cuts, readers, leases and topics.

    Reads files and changes nothing, so it also works beside a running node, which is also asked for
    its statistics. At an address it shows only the statistics. Times are UTC. Without --all, values
    that are none or 0 are left out.
    """
    only = None if everything else IN_SHORT
    if isinstance(place, NodeUrl):
        output.show(with_node(place, _asked), only)
        return
    from streamingnode.care.inspect import check_node, holder
    from wal.address import SOCKET_NAME

    pid = holder(check_node(place))
    document = _describe(place, pid, output)
    if pid is not None:
        try:
            document |= {
                "statistics": with_node(
                    NodeUrl(f"unix:{place}/{SOCKET_NAME}"), _asked, within_s=ANSWER_S
                )["statistics"]
            }
        except (StreamingNodeError, TimeoutError) as error:
            # the owner takes no clients, or its disk hangs
            output.note(f"no statistics from its owner: {error or 'no answer'}")
    output.show({"statistics": None} | document, only)


async def _asked(node: "sn.Node") -> dict[str, object]:
    return {"directory": node.path, "node_id": node.node_id, "statistics": await node.statistics()}


def _describe(directory: Path, pid: int | None, output: Output) -> dict[str, object]:
    """Return the facts in a node's files; print a note when checkpoints and readers cannot be
    read.
    """
    from flusher.cuts import Lease, lease_files
    from flusher.directory import CutLog
    from streamingnode.care.inspect import cut_holders, floor_of
    from streamingnode.care.records import PCHANNEL, NodeRecords, read_node_records
    from streamingnode.cli.topics import line_of_topic
    from wal.runtime import unix_ms

    def when(tick: int) -> dict[str, object]:
        return {"tick": tick, "time": format_tick(tick)}

    floor = floor_of(directory)
    cuts = CutLog(directory)
    records = NodeRecords()
    try:
        records = read_node_records(directory)[1]
    except StreamingNodeError as error:
        if pid is None and not isinstance(error, StorageFailed):
            raise
        # Beside a running owner files may disappear between two reads, and a disk may be read-only;
        # show the rest.
        output.note(f"checkpoints and readers cannot be read: {error}")
    mark = records.checkpoint
    checkpoint = {
        "pchannel": PCHANNEL,
        "cut": mark.cut_number,
        "position": mark.position,
        **when(mark.tick),
    }
    newest_tick = cuts.read(cuts.newest).tick if cuts.numbers else 0
    ahead_ms = physical_ms(floor.tick) - unix_ms()
    return {
        "directory": str(directory),
        "node_id": floor.node_id,
        "open": pid is not None,
        "pid": pid or None,
        "term": floor.term,
        **when(floor.tick),
        # clock corrections are as small as that
        "ahead_s": ahead_ms // 1000 if ahead_ms > AHEAD_MS_MAX else 0,
        "position": max(floor.positions.values(), default=0),
        "cuts": {
            "first": cuts.first,
            "newest": cuts.newest,
            **when(newest_tick),
            "held_by": cut_holders(cuts),
        },
        "checkpoints": [checkpoint] if mark.cut_number else [],
        "readers": [
            {"reader": name, "pchannel": at.pchannel, "position": at.position, **when(at.tick)}
            for name, at in records.readers.items()
        ],
        "topics": [line_of_topic(name, topic.info) for name, topic in records.topics.items()],
        "leases": [
            {
                "table": lease.table,
                "collection_id": lease.collection_id,
                "cut": lease.cut,
                **when(lease.tick),
            }
            for _, lease in lease_files(cuts.directory)
            if isinstance(lease, Lease)
        ],
    }


async def _ask(node: "sn.Node") -> "Sample":
    return await node.statistics(), await node.readers(), await node.transactions()


@INFO.verb(
    "top",
    "streamingnode info top data",
    "streamingnode info top --node tcp://127.0.0.1:7070 --interval 1",
    "streamingnode info top data --json -n 1",
)
@at_place()
@click.option(
    "--interval", default=2.0, metavar="S", help="Seconds between two samples (default: 2)."
)
@click.option(
    "-n",
    "--rounds",
    type=int,
    metavar="N",
    help="End after this many samples (default: at an interrupt).",
)
def top(output: Output, *, place: Place, interval: float, rounds: int | None) -> None:
    """Show the activity of a node repeatedly.

    Rates are since the last sample. The flusher's lag is how long the oldest row has waited for a
    cut; the lag of a named reader is the age of the position from which it holds the log. With
    --json one line for each sample. An interrupt ends it with exit code 0.
    """
    if not INTERVAL_S_MIN <= interval < math.inf or (rounds is not None and rounds < 1):
        raise InvalidArgument(
            f"--interval or --rounds is out of range — give {INTERVAL_S_MIN} s and 1 or more"
        )
    import anyio
    import anyio.to_thread

    async def watch(node: "sn.Node") -> None:
        before = await _ask(node)
        for _ in itertools.count() if rounds is None else range(rounds):
            await anyio.sleep(interval)
            now = await _ask(node)
            # In a thread: a pipe without a reader must not block the node.
            document = _look(before[0], now)
            await anyio.to_thread.run_sync(show, document, abandon_on_cancel=True)
            before = now

    # An interrupt is the normal end.
    with suppress(KeyboardInterrupt), output.live() as show:
        with_node(place, watch, lasting=True)


def _look(before: "NodeStatistics", sample: "Sample") -> dict[str, object]:
    """Return the activity of a node since an earlier sample."""
    from streamingnode.care.health import flusher_lag_s

    now, readers, transactions = sample
    passed_s = max(1, now.at_ms - before.at_ms) / 1000

    def rate(count: int, count_before: int) -> float:
        # another process now has the node, and its counts start at 0
        return round(max(0, count - count_before) / passed_s, 1)

    one = before.appends
    two = now.appends
    flusher = now.flusher
    space = now.space
    return {
        "time": format_tick(now.ticks.last),
        "log": now.log.state,
        "rows_per_s": rate(two.insert_rows + two.delete_rows, one.insert_rows + one.delete_rows),
        "bytes_per_s": rate(int(two.message_bytes.total), int(one.message_bytes.total)),
        "appends_per_s": rate(two.succeeded, one.succeeded),
        "append_p99_ms": round(two.seconds.p99 * 1000, 1),
        "flusher": {
            "state": flusher.state.value,
            "unflushed_rows": flusher.unflushed_rows,
            "lag_s": round(flusher_lag_s(now), 1),
        },
        "transactions": {
            "open": len(transactions),
            "oldest_s": max((round(each.age_s, 1) for each in transactions), default=0),
        },
        "free_mib": None if space is None else space.free_bytes >> 20,
        "readers": [
            {
                "reader": each.name,
                "collections": ",".join(each.collections),
                "open": each.is_open,
                "backlog": each.backlog,
                "lag_s": round(each.behind_s, 1),
            }
            for each in readers
        ],
    }


Limits = tuple[float, float]


def limits(text: str) -> Limits:
    """Return the two numbers of WARNING:CRITICAL. Raises `BadParameter`."""
    with suppress(ValueError):
        warning, critical = map(float, text.split(":"))
        if warning >= 0 and critical >= 0:  # false for NaN
            return warning, critical
    raise click.BadParameter(f"{text!r} is not two numbers of 0 or more, as 30:120")


LIMITS: Any = {"type": limits, "metavar": "WARN:CRIT"}


@PROGRAM.verb(
    "check",
    "streamingnode check unix:data/node.sock",
    "streamingnode check --node tcp://127.0.0.1:7070 --token-file token --json",
    "streamingnode check data --flusher-lag 30:120 --disk-free 20000:5000",
)
@at_place()
@click.option(
    "--flusher-lag", **LIMITS, help="Seconds that a row waits for its cut (default: 120:900)."
)
@click.option(
    "--disk-free",
    **LIMITS,
    help="Free MiB (default: 4096, and what the node needs to take appends).",
)
@click.option(
    "--transaction-age", **LIMITS, help="Seconds that a transaction is open (default: 60:300)."
)
@click.option(
    "--reader-lag",
    **LIMITS,
    help="Seconds that a named reader holds the log for (default: 86400:604800).",
)
@click.option(
    "--timeout",
    default=10.0,
    metavar="S",
    help="Seconds that the node has for its answer (default: 10).",
)
def check(
    output: Output,
    *,
    place: Place,
    flusher_lag: Limits | None,
    disk_free: Limits | None,
    transaction_age: Limits | None,
    reader_lag: Limits | None,
    timeout: float,
) -> int:
    """Report in one line whether a node is healthy, for monitors.

    Requests a tick, for which the log must be open, and checks log, flusher, disk, open
    transactions and named readers. A directory that no process has open is opened for the check: to
    detect that a service is down, check its socket, --node unix:DIR/node.sock, or its address.
    `doctor` checks the machine instead. Exit code 0 when the node is healthy, 1 for a warning, 2
    when something is critical or the node does not answer.
    """
    if not 0 < timeout < math.inf:
        raise InvalidArgument("--timeout is out of range — give more than 0 s")
    from streamingnode.care.findings import Report, Severity
    from streamingnode.care.health import Thresholds, judge

    given = {
        "flusher_lag_s": flusher_lag,
        "free_bytes": disk_free and (disk_free[0] * (1 << 20), disk_free[1] * (1 << 20)),
        "transaction_age_s": transaction_age,
        "reader_behind_s": reader_lag,
    }
    thresholds = Thresholds(**{name: value for name, value in given.items() if value is not None})
    report = Report()
    facts = dict[str, str]()

    async def ask(node: "sn.Node") -> "Sample":
        await node.consistent_tick(timeout=timeout)
        return await _ask(node)

    try:
        sample = with_node(place, ask, within_s=timeout)
        facts = judge(*sample, thresholds, report)
        if sample[0].pid == os.getpid():
            facts["owner"] = "none, so this check opened the node"
    except StreamingNodeError as error:
        report.error("node", error)
    except TimeoutError:
        report.damage("node", f"no answer within {timeout:g} s", "look at its process and its disk")
    verdict = {None: "ok", Severity.WARNING: "warning", Severity.DAMAGE: "critical"}[report.worst]
    # the worst first
    found = sorted(report.findings, key=lambda finding: finding not in report.damages)
    named = [f"{each.place}: {each.detail} — {each.next_step}" for each in found]
    text = "; ".join(named or [f"{name} {text}" for name, text in facts.items()])
    document = {"verdict": verdict, "facts": facts, "findings": report.findings}
    output.result(f"{verdict.upper()}: {text}", document)
    return {"ok": 0, "warning": 1, "critical": 2}[verdict]


@PROGRAM.verb(
    "doctor",
    "streamingnode doctor",
    "streamingnode doctor data",
    "streamingnode doctor data --json",
)
@click.argument(
    "directory",
    type=FILE,
    required=False,
    help="A node's directory, or a place for one (default: only the machine).",
)
def doctor(output: Output, *, directory: Path | None) -> int:
    """Check machine, installation and directory, with next steps.

    Checks Python, packages, Java, disk space, the measured time of an fsync, file limits, and the
    directory if one is given. Writes one temporary file and removes it. Exit code 1 when a node
    cannot be opened; a warning is no failure.
    """
    from streamingnode.care.findings import Report
    from streamingnode.care.health import examine

    report = Report()
    facts = examine(directory, report)
    output.fields(facts)
    output.findings(report)
    output.document({"healthy": not report.damages, "facts": facts, "findings": report.findings})
    return EXIT_FAILED if report.damages else EXIT_OK


@INFO.verb(
    "config",
    "streamingnode info config",
    "streamingnode info config --changed --file node.toml",
    "streamingnode info config --json",
)
@click.option(
    "--file", type=FILE, help="A TOML file of settings (default: what STREAMINGNODE_CONFIG names)."
)
@click.option("--changed", is_flag=True, help="Only what is not a default.")
def config(output: Output, *, file: Path | None, changed: bool) -> None:
    """Show every setting, its value, and where that comes from.

    Settings come from defaults, then a TOML file, then STREAMINGNODE_* environment variables, then
    the arguments of open_node; later ones win. A variable is the setting's name in capitals with
    `_` for `.`.
    """
    from streamingnode.config import DEFAULT_ORIGIN

    settings = sn.load_config(file=file, environment=os.environ).origins()
    shown = [each._asdict() for each in settings if not changed or each.origin != DEFAULT_ORIGIN]
    output.records(shown)
    output.document(shown)
