"""A node as it runs, on the command line: `top` for people, `check` for monitors."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from streamingnode.cli.command import Place, command, option, with_node
from streamingnode.cli.output import EXIT_OK, Output, format_tick
from wal.errors import InvalidArgument, StreamingNodeError

if TYPE_CHECKING:
    from streamingnode.care.findings import Report
    from streamingnode.holders import ReaderInfo, TransactionInfo
    from streamingnode.node import Node
    from streamingnode.statistics import NodeStatistics

    Sample = tuple[NodeStatistics, Sequence[ReaderInfo], Sequence[TransactionInfo]]

CLEAR_SCREEN = "\x1b[H\x1b[J"
INTERVAL_S_MIN = 0.1
"""More often a node is not asked."""


async def _ask(node: "Node") -> "Sample":
    return await node.statistics(), await node.readers(), await node.transactions()


@command(
    "streamingnode top data",
    "streamingnode top --node tcp://127.0.0.1:7070 --interval 1",
    "streamingnode top data --json -n 1",
)
def top(
    output: Output,
    *,
    place: Place,
    interval: float = option("seconds between two looks (default: 2)", default=2.0, metavar="S"),
    rounds: int | None = option("end after so many (default: at an interrupt)", "-n", "--rounds", metavar="N"),
) -> int:
    """Show what a node does, again and again.

    Rates are those since the last look. The flusher's lag is how long the oldest row that is in no cut waits for one,
    that of a named reader how old the place is that it holds the log from. With --json one line for each look. An
    interrupt ends it with exit code 0.
    """
    if not INTERVAL_S_MIN <= interval < math.inf or (rounds is not None and rounds < 1):
        raise InvalidArgument(f"--interval or --rounds is out of range — give {INTERVAL_S_MIN} s and 1 or more")
    import anyio

    async def watch(node: "Node") -> None:
        before, shown = await _ask(node), 0
        while shown != rounds:
            await anyio.sleep(interval)
            now = await _ask(node)
            _show(before[0], now, output)
            before, shown = now, shown + 1

    try:
        with_node(place, watch, lasting=True)
    except KeyboardInterrupt:
        output.line()
    return EXIT_OK


def _show(before: "NodeStatistics", sample: "Sample", output: Output) -> None:
    from streamingnode.care.health import flusher_lag_s

    now, readers, transactions = sample
    passed_s = max(1, now.at_ms - before.at_ms) / 1000

    def rate(count: int, count_before: int) -> float:
        return round(max(0, count - count_before) / passed_s, 1)  # another process has the node since, and counts anew

    one, two, flusher, space = before.appends, now.appends, now.flusher, now.space
    if output.stdout.isatty() and not output.as_json:
        output.write(CLEAR_SCREEN)
    output.show(
        {
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
    )
    output.flush()


Limits, LIMITS = tuple[float, float], "WARN:CRIT"


def limits(text: str) -> Limits:
    """Return the two numbers of WARNING:CRITICAL. Raises `ValueError`."""
    warning, critical = map(float, text.split(":"))
    if not (warning >= 0 and critical >= 0):  # not a number is neither
        raise ValueError(text)
    return warning, critical


@command(
    "streamingnode check data",
    "streamingnode check --node tcp://127.0.0.1:7070 --token-file token --json",
    "streamingnode check data --flusher-lag 30:120 --disk-free 20000:5000",
)
def check(
    output: Output,
    *,
    place: Place,
    flusher_lag: Limits | None = option(
        "seconds that a row waits for its cut (default: 120:900)", type=limits, metavar=LIMITS
    ),
    disk_free: Limits | None = option(
        "MiB that are free (default: 4096, and what the node needs to take appends)", type=limits, metavar=LIMITS
    ),
    transaction_age: Limits | None = option(
        "seconds that a transaction is open (default: 60:300)", type=limits, metavar=LIMITS
    ),
    reader_lag: Limits | None = option(
        "seconds that a named reader holds the log for (default: 86400:604800)", type=limits, metavar=LIMITS
    ),
    timeout: float = option("seconds the node has to answer (default: 10)", default=10.0, metavar="S"),
) -> int:
    """Say in one line whether a node is well: for monitors.

    Asks the node for a tick, which its log has to give, and looks at log, flusher, disk, open transactions and named
    readers. A directory that no process has open is opened, which is a warning of its own. `doctor` looks at the
    machine instead. Exit code 0 when all is well, 1 for a warning, 2 when it is critical or the node does not answer.
    """
    if not 0 < timeout < math.inf:
        raise InvalidArgument("--timeout is out of range — give more than 0 s")
    from streamingnode.care.findings import Report, Severity
    from streamingnode.care.health import Thresholds, judge
    from streamingnode.care.inspect import check_node, holder

    given = {
        "flusher_lag_s": flusher_lag,
        "free_bytes": disk_free and (disk_free[0] * (1 << 20), disk_free[1] * (1 << 20)),
        "transaction_age_s": transaction_age,
        "reader_behind_s": reader_lag,
    }
    thresholds = Thresholds(**{name: value for name, value in given.items() if value is not None})
    report, facts = Report(), dict[str, str]()

    async def ask(node: "Node") -> "Sample":
        await node.consistent_tick(timeout=timeout)
        return await _ask(node)

    try:
        if isinstance(place, Path) and holder(check_node(place)) is None:
            step = "start the service, if there is to be one: streamingnode serve"
            report.warn("owner", "no process has the node open, so this check opened it", step)
        facts = judge(*with_node(place, ask, within_s=timeout), thresholds, report)
    except StreamingNodeError as error:
        report.error("node", error)
    except TimeoutError:
        report.damage("node", f"no answer within {timeout:g} s", "look at its process and its disk")
    verdict = {None: "ok", Severity.WARNING: "warning", Severity.DAMAGE: "critical"}[report.worst]
    document = {"verdict": verdict, "facts": facts, "findings": report.findings}
    output.result(f"{verdict.upper()}: {_in_short(report, facts)}", document)
    return {"ok": 0, "warning": 1, "critical": 2}[verdict]


def _in_short(report: "Report", facts: dict[str, str]) -> str:
    """Return what is wrong, the worst first, or what is well."""
    found = sorted(report.findings, key=lambda finding: finding not in report.damages)
    told = [f"{each.place}: {each.detail} — {each.next_step}" for each in found]
    return "; ".join(told or [f"{name} {text}" for name, text in facts.items()])
