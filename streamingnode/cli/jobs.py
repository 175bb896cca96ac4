"""The commands that run for a while: `serve`, `ingest`, `bench` and `demo`."""

import math
import os
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import streamingnode as sn
from streamingnode.cli.command import (
    DEMO,
    DIRECTORY,
    FILE,
    PROGRAM,
    SPARK,
    Place,
    at_place,
    require,
    with_node,
)
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_count, format_tick
from streamingnode.progress import Progress
from streamingnode.signals import ENDING, Interrupted
from wal.errors import AlreadyOwned, InvalidArgument, StorageFailed

if TYPE_CHECKING:
    from spark_sink import IngestReport, IngestRound

CLOSED_NODE_CUT_S = 30.0
"""Seconds between two cuts of a node that no process has open: each cut opens it, and only other
commands can have written to it.
"""

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
ROW_BYTES = 1024
KEY_BYTES = 8
DROP_S_MAX = 10.0
"""Maximum seconds that the end of a measurement waits for dropping its collection."""


@PROGRAM.verb(
    "serve",
    "streamingnode serve data",
    "streamingnode serve data --json",
    "streamingnode serve data --http 127.0.0.1:9464 --log-format json",
    "streamingnode serve data --listen tcp://127.0.0.1:7070 --tokens tokens.toml",
    "streamingnode serve data --listen tls://0.0.0.0:7070 --tls-cert node.pem --tls-key node.key "
    "--tokens tokens.toml",
)
@click.argument("directory", type=FILE, help="The node's directory, created if it is new.")
@click.option(
    "--listen", multiple=True, metavar="URL", help="Also at tcp://host:port or tls://host:port."
)
@click.option(
    "--tokens",
    type=FILE,
    metavar="FILE",
    help="A TOML file of who may connect at --listen (docs/operations.md).",
)
@click.option(
    "--tls-cert", type=FILE, metavar="FILE", help="The certificate for tls://, with its chain."
)
@click.option("--tls-key", type=FILE, metavar="FILE", help="Its key, readable by this user alone.")
@click.option(
    "--tls-client-ca",
    type=FILE,
    metavar="FILE",
    help="Clients at tls:// need a certificate of this authority.",
)
@click.option(
    "--audit-log",
    type=FILE,
    metavar="FILE",
    help="Log connections, refusals and the actions of admins to this file.",
)
@click.option(
    "--http", metavar="HOST:PORT", help="Serve /livez, /readyz and /metrics for monitors."
)
@click.option(
    "--http-for-anybody",
    is_flag=True,
    help="Allow --http at an address that other machines reach.",
)
@click.option("--traces", is_flag=True, help="Create OpenTelemetry spans, which its SDK exports.")
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="json: every event as a line of JSON.",
)
@click.option("--config", type=FILE, metavar="FILE", help="A TOML file of settings.")
def serve(  # noqa: PLR0913 - one for each option
    output: Output,
    *,
    directory: Path,
    listen: tuple[str, ...],
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    audit_log: Path | None,
    http: str | None,
    http_for_anybody: bool,
    traces: bool,
    log_format: str,
    config: Path | None,
) -> None:
    """Run a node for other processes, in the foreground.

    Clients reach it at node.sock in its directory, and at --listen. Prints a line when it is ready,
    after recovery, and notifies systemd. SIGTERM, SIGINT and SIGHUP end it: clients finish the
    calls they have begun, and it exits with 0; a second signal exits at once. With --tokens, SIGHUP
    instead reads that file again and prints a line. An address other than loopback needs --tokens
    or --tls-client-ca, and TLS.
    """
    with suppress(KeyboardInterrupt):  # a signal before the node was open
        from streamingnode.opening import run_async
        from streamingnode.remote.audit import audit_to
        from streamingnode.remote.auth import Endpoint, server_tls
        from streamingnode.serve import TokensRead, log_as_json, serve_node

        if not listen and (tokens or tls_cert or tls_key or tls_client_ca):
            raise InvalidArgument(
                "--tokens and --tls-... apply to --listen — add that, or leave them out"
            )
        tls = server_tls(tls_cert, tls_key, tls_client_ca)
        endpoints = [
            Endpoint.of(url, tokens=tokens, tls=tls, client_ca=tls_client_ca is not None)
            for url in listen
        ]
        if audit_log is not None:
            audit_to(audit_log)
        if log_format == "json":
            log_as_json()
        given = {
            "serve.http": http,
            "serve.http_for_anybody": http_for_anybody,
            "serve.traces": traces,
        }
        settings = {name: value for name, value in given.items() if value}

        def ready(addresses: list[str]) -> None:
            document = {"ready": True, "pid": os.getpid(), "addresses": addresses}
            output.result(f"ready: {' '.join(addresses)}", document)
            output.flush()

        def report(text: str, document: Mapping[str, object]) -> None:
            with suppress(BrokenPipeError, StorageFailed):  # the reader of the output is gone
                output.result(text, document)
                output.flush()

        reading = None if tokens is None else TokensRead(tokens, report)
        run_async(partial(serve_node, directory, endpoints, config, settings, ready, reading))


def duration(text: str) -> float:
    """Return the seconds of `2s`, `500ms`, `5m` or `1h`; a number alone is seconds. Raises
    `InvalidArgument`.
    """
    number = text.rstrip("hms")
    with suppress(ValueError, KeyError):
        if 0 < (seconds := float(number) * _UNITS_S[text[len(number) :] or "s"]) < math.inf:
            return seconds
    raise InvalidArgument(f"{text!r} is not a duration — give one such as 500ms, 2s or 1h")


@PROGRAM.verb(
    "ingest",
    "streamingnode ingest data --tables tables",
    "streamingnode ingest data --tables tables --no-cut",
    "streamingnode ingest data --tables tables --every-cut --json",
    "streamingnode ingest data --tables tables --every 2s",
    "streamingnode ingest data --tables tables --every 500ms --keep 24h --json",
)
@DIRECTORY
@click.option(
    "--tables",
    type=FILE,
    required=True,
    help="Where the tables are, one for each collection.",
)
@click.option("--no-cut", is_flag=True, help="Take only existing cuts, request no new one.")
@click.option(
    "--every-cut",
    is_flag=True,
    help="Make each cut a version of its own: slower, but every state is visible.",
)
@click.option(
    "--every",
    metavar="DURATION",
    help="Keep running and ingest this often, as 2s; also keeps the tables small.",
)
@click.option(
    "--keep",
    default="1h",
    metavar="DURATION",
    help="With --every: how long versions can be read (default: 1h).",
)
@click.option(
    "--link",
    is_flag=True,
    help="Link the files of inserts instead of copying them: half the disk, but node and table "
    "then share damage and read permissions.",
)
def ingest(
    output: Output,
    *,
    directory: Path,
    tables: Path,
    no_cut: bool,
    every_cut: bool,
    every: str | None,
    keep: str,
    link: bool,
) -> int:
    """Bring a node's cuts into Spark tables, each exactly once.

    Requests a cut from the node first. If a process has the node open and takes no clients, it
    takes the existing cuts, prints the age of the newest, and ends with exit code 4: the tables are
    stale. With --no-cut it requests no cut, and tables are never stale. It can be interrupted and
    run again at any moment, also twice at once. Tables are Delta tables. Cuts that delete no row
    are copied; Spark is started for others.

    With --every it keeps running, prints a line for each round, and continues after failures: each
    table fails alone, and it also continues without the node. SIGTERM, SIGINT and SIGHUP end an
    ingest after its current commit; with --every the exit code is then 0, or 4 if the last round
    was stale. A second signal ends it at once.
    """
    stop = threading.Event()
    # In a thread: the event has a lock, which the main thread may hold when the signal arrives.
    with ENDING.reacting(partial(start_new_thread, stop.set, ())):
        require(SPARK)
        import spark_sink
        from streamingnode.care.inspect import check_node

        node = _Asked(check_node(directory))
        how: dict[str, Any] = {
            "request_cut": not no_cut,
            "every_cut": every_cut,
            "link": link,
            "stop": stop,
        }
        if every is None:
            return _ingest_once(output, partial(spark_sink.ingest, None, node, tables, **how))
        how |= {"every_s": duration(every), "keep_s": math.ceil(duration(keep))}
        return _show_rounds(output, spark_sink.ingest_every(node, tables, **how))


def _show_rounds(output: Output, rounds: "Iterator[IngestRound]") -> int:
    is_stale = False
    with suppress(KeyboardInterrupt):  # a signal during a request for a cut
        for each in rounds:
            _show_round(output, each)
            is_stale = each.stale
    return AlreadyOwned.exit_code if is_stale else EXIT_OK


def _ingest_once(output: Output, ingest: "Callable[..., IngestReport]") -> int:
    with Progress(output.stderr) as progress:
        progress.stage("ingesting cuts")

        def show(stage: str, done: int, total: int) -> None:
            progress.advance(done, stage, total=total)

        report = ingest(progress=show)
    output.records(
        [
            {
                "table": f"{table.table} (dropped)" if table.dropped else table.table,
                "version": table.version,
                "cuts taken": f"{table.first_cut}..{table.last_cut}"
                if table.first_cut
                else "none new",
                "rows added": table.rows_added,
                "rows deleted": table.rows_deleted,
                "path": table.path,
            }
            for table in report.tables
        ]
    )
    at = (
        f"at cut {report.cut}, tick {report.tick} ({format_tick(report.tick)}), in "
        f"{report.seconds:.1f} s"
    )
    output.result(at, report)
    if ENDING.number is not None:
        output.note(f"{ENDING.word}: run it again for what is left")
        return ENDING.exit_code
    if not report.stale:
        return EXIT_OK
    output.note(f"{_stale(report.cut_age_s)} — let its process listen, or ingest with --no-cut")
    return AlreadyOwned.exit_code


def _stale(cut_age_s: float | None) -> str:
    age = "there is none" if cut_age_s is None else f"the newest is {cut_age_s:.1f} s old"
    return f"stale: the running node could not be asked for a cut, {age}"


class _Asked:
    """Requests cuts of a node by its directory: from the process that has it open, or by opening it
    briefly.
    """

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self._open_again = 0.0

    def flush(self) -> object:
        """Return the newest cut, None when no cut is due. Raises as `with_node`."""
        from streamingnode.care.inspect import holder

        if holder(Path(self.path)) is not None:
            self._open_again = 0.0  # once the process closes it, cut its last rows at once
        elif time.monotonic() < self._open_again:
            return None
        else:
            self._open_again = time.monotonic() + CLOSED_NODE_CUT_S
        try:
            return with_node(Path(self.path), lambda node: node.flush())
        finally:
            # the signal may have arrived too late to interrupt the request
            if ENDING.number is not None:
                raise Interrupted


def _show_round(output: Output, ended: "IngestRound") -> None:
    lag = (
        "nothing yet"
        if ended.lag_s is None
        else f"lag {ended.lag_s:.1f} s, {format_count(ended.lag_cuts, 'cut')}"
    )
    copied, by_spark = (
        sum(table.road == road for table in ended.tables) for road in ("copy", "spark")
    )
    did = {
        f"{format_count(ended.rows_added, 'row')} added": ended.rows_added,
        f"{format_count(ended.rows_deleted, 'row')} deleted": ended.rows_deleted,
        f"{format_count(copied, 'table')} by copying": copied,
        f"{format_count(by_spark, 'table')} by Spark": by_spark,
        f"{ended.compacted} files less": ended.compacted,
    }
    done = ", ".join(what for what, count in did.items() if count) or "nothing new"
    output.line(f"cut {ended.cut}: {done}; {lag}; {1000 * ended.seconds:.0f} ms")
    if ended.stale:
        output.line(f"  {_stale(ended.cut_age_s)}")
    for each in ended.failures:
        output.line(f"  {each.table or 'node'}: {each.code}: {each.message}")
    output.document(ended)
    output.flush()


@PROGRAM.verb(
    "bench",
    "streamingnode bench",
    "streamingnode bench --callers 16 --rows 100 --seconds 10 --dir /tmp --json",
    "streamingnode bench --node tcp://127.0.0.1:7070 --outstanding 256 --size 200",
)
@at_place(required=False)
@click.option(
    "--dir",
    "directory",
    type=FILE,
    default=Path(),
    metavar="DIR",
    help="A directory on the disk to measure (default: .).",
)
@click.option("--seconds", type=float, default=3.0, help="How long to measure (default: 3).")
@click.option(
    "--outstanding",
    "--callers",
    "callers",
    default=64,
    metavar="N",
    help="Concurrent inserts (default: 64).",
)
@click.option("--rows", default=1, metavar="N", help="Rows in each insert (default: 1).")
@click.option(
    "--size", default=ROW_BYTES, metavar="BYTES", help=f"Size of each row (default: {ROW_BYTES})."
)
def bench(
    output: Output,
    *,
    place: Place | None,
    directory: Path,
    seconds: float,
    callers: int,
    rows: int,
    size: int,
) -> None:
    """Measure durable inserts into a temporary node, or into an existing one.

    The temporary node is created under --dir and removed. In an existing node a temporary
    collection is created, and dropped at the end; retention later removes its rows from log and
    files. `doctor` measures the time of one fsync.
    """
    if not directory.is_dir():
        raise InvalidArgument(
            f"{directory} is not a directory — create it, or name another with --dir"
        )
    if not (0 < seconds < math.inf and callers >= 1 and rows >= 1 and size >= 1):
        raise InvalidArgument(
            "--seconds, --outstanding, --rows or --size is out of range — give more than 0"
        )
    import statistics
    import tempfile

    measure = partial(
        _insert, seconds=seconds, callers=callers, rows=rows, value_bytes=max(0, size - KEY_BYTES)
    )
    scratch = (
        nullcontext("") if place else tempfile.TemporaryDirectory(dir=directory, prefix="bench-")
    )
    with scratch as made:
        took = with_node(place or Path(made) / "node", measure, may_be_new=place is None)
    measured = {
        "rows_per_s": round(callers * rows / statistics.mean(took), 1),
        "p50_ms": round(statistics.median(took) * 1000, 3),
        "p99_ms": round(sorted(took)[int(len(took) * 0.99)] * 1000, 3),
    }
    output.show({"callers": callers, "rows": rows, "size": size, **measured})


async def _insert(
    node: "sn.Node", *, seconds: float, callers: int, rows: int, value_bytes: int
) -> list[float]:
    """Insert from `callers` callers, each at least once, into a new collection; return the seconds
    of each insert.
    """
    from uuid import uuid4

    import anyio
    import pyarrow as pa

    columns: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
    dicts = [{"id": key, "value": os.urandom(value_bytes)} for key in range(rows)]
    # One row is passed as a dict, as in most small inserts.
    given = dicts if rows == 1 else pa.RecordBatch.from_pylist(dicts, schema=pa.schema(columns))
    took = list[float]()
    name = f"bench-{uuid4().hex}"

    async def insert() -> None:
        ended = 0.0
        while ended < until:
            began = time.perf_counter()
            await node.insert(name, given)
            ended = time.perf_counter()
            took.append(ended - began)

    await node.create_collection(name, pa.schema(columns), primary_key="id")
    try:
        until = time.perf_counter() + seconds
        async with anyio.create_task_group() as tasks:
            for _ in range(callers):
                tasks.start_soon(insert)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        with anyio.move_on_after(DROP_S_MAX, shield=True):
            await node.drop_collection(name)
    return took


@PROGRAM.verb("demo", "streamingnode demo", "streamingnode demo --dir /tmp/demo --seconds 5 --json")
@click.option(
    "--dir",
    "directory",
    type=FILE,
    default=Path("demo-data"),
    metavar="DIR",
    help="(default: demo-data).",
)
@click.option("--seconds", type=float, default=20.0, help="How long to sample (default: 20).")
@click.option(
    "--rounds-per-second",
    type=float,
    default=10.0,
    help="How often to look at all processes (default: 10).",
)
def demo(output: Output, *, directory: Path, seconds: float, rounds_per_second: float) -> int:
    """This machine's processes, through a node, into checked tables.

    Shows everything on real input: a process of its own samples every process into a node, while
    Spark ingests its cuts. Each round is one transaction over the collections `samples` and `live`.
    In the middle the sampling process is killed (SIGKILL), and another one continues. Then it
    checks that every version of the tables holds exactly the acknowledged rows, prints the top
    processes from Spark SQL and draws report.png. Replaces a directory that an earlier demo made,
    and nothing else. Exit code 1 when a check fails.
    """
    if not (0 < seconds < math.inf and 0 < rounds_per_second < math.inf):
        raise InvalidArgument("--seconds or --rounds-per-second is out of range — give more than 0")
    require(DEMO)
    from streamingnode import demo as job

    with Progress(output.stderr) as progress:
        result = job.run_demo(directory, seconds, rounds_per_second, progress)
    acknowledged = f"{result.rounds} rounds with {result.samples} samples acknowledged"
    output.line(f"{acknowledged}, and ingested in {result.cuts} cuts")
    if result.killed_round:
        killed = f"killed with SIGKILL while round {result.killed_round} was written"
        output.line(f"{killed}; the next row was acknowledged {result.away_s:.1f} s later")
    output.line()
    output.records(result.top)
    output.line()
    for check in result.checks:
        output.line(
            f"{'ok  ' if check.passed else 'FAIL'}  {check.what} "
            f"({format_count(check.rows, 'row')})"
        )
    picture = directory / job.PICTURE
    passed = all(check.passed for check in result.checks)
    commands = job.next_commands(directory)
    found = {"directory": directory, "passed": passed, "picture": picture, "next": commands}
    output.line(f"picture: {picture}")
    output.line()
    output.line("to try next:")
    for each in commands:
        output.line(f"  {each}")
    output.document({**vars(result), **found})
    return EXIT_OK if passed else EXIT_FAILED
