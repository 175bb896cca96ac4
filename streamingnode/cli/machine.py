"""A node on this machine: `serve` runs one, `bench` says how fast, `config show` with which settings, `demo` shows all."""

import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import pyarrow as pa

from streamingnode.cli.command import DEMO, argument, command, require
from streamingnode.cli.output import EXIT_FAILED, EXIT_OK, Output, format_count
from streamingnode.config import DEFAULT_ORIGIN, load_config
from streamingnode.opening import open_node, run_async
from streamingnode.progress import Progress
from streamingnode.remote.auth import Endpoint, server_tls
from streamingnode.serve import audit_to, serve_node
from wal.errors import InvalidArgument
from wal.files import disk_errors_typed

ROW_BYTES = 1024


@command(
    argument(
        "--dir", dest="directory", metavar="DIR", type=Path, default=".", help="on the disk to measure (default: .)"
    ),
    argument("--seconds", type=float, default=3.0, help="how long to measure (default: 3)"),
    argument("--callers", type=int, default=64, metavar="N", help="inserts outstanding (default: 64)"),
    argument("--rows", type=int, default=1, metavar="N", help="rows of 1 KiB in each insert (default: 1)"),
    examples=("streamingnode bench", "streamingnode bench --callers 16 --rows 100 --seconds 10 --dir /tmp --json"),
)
def bench(output: Output, *, directory: Path, seconds: float, callers: int, rows: int) -> None:
    """Measure durable inserts into a temporary node.

    The node is made under --dir and removed. What one fsync takes there, `doctor` measures.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"{directory} is no directory — make it, or name another with --dir")
    if not (0 < seconds < math.inf and callers >= 1 and rows >= 1):
        raise InvalidArgument("--seconds, --callers or --rows is out of range — give more than 0")
    with tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as scratch:
        took = run_async(partial(_insert, Path(scratch) / "node", seconds, callers, rows))
    rate, ordered = callers * rows / statistics.mean(took), sorted(took)
    p50_ms, p99_ms = (round(ordered[int(len(took) * share)] * 1000, 3) for share in (0.5, 0.99))
    output.show({"callers": callers, "rows": rows, "rows_per_s": round(rate, 1), "p50_ms": p50_ms, "p99_ms": p99_ms})


async def _insert(path: Path, seconds: float, callers: int, rows: int) -> list[float]:
    """Insert from so many callers, each once at least; return what each insert took."""
    columns: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
    dicts = [{"id": key, "value": os.urandom(ROW_BYTES)} for key in range(rows)]
    # One row is given as a dict, as small inserts are mostly written.
    given = dicts if rows == 1 else pa.RecordBatch.from_pylist(dicts, schema=pa.schema(columns))
    took = list[float]()

    async with open_node(path) as node, anyio.create_task_group() as tasks:
        await node.create_collection("rows", pa.schema(columns), primary_key="id")
        until = time.perf_counter() + seconds

        async def insert() -> None:
            ended = 0.0
            while ended < until:
                began = time.perf_counter()
                await node.insert("rows", given)
                ended = time.perf_counter()
                took.append(ended - began)

        for _ in range(callers):
            tasks.start_soon(insert)
    return took


@command(
    argument("directory", type=Path, help="the node's directory, made if it is new"),
    argument("--listen", action="append", default=[], metavar="URL", help="also at tcp://host:port or tls://host:port"),
    argument(
        "--tokens", type=Path, metavar="FILE", help="who may connect at --listen, a TOML file (docs/operations.md)"
    ),
    argument("--tls-cert", type=Path, metavar="FILE", help="the certificate for tls://, with its chain"),
    argument("--tls-key", type=Path, metavar="FILE", help="its key, readable by this user alone"),
    argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="clients at tls:// need a certificate of this authority"
    ),
    argument("--audit-log", type=Path, metavar="FILE", help="who connects, who is refused, and what admins do"),
    argument("--config", type=Path, metavar="FILE", help="a TOML file of settings"),
    examples=(
        "streamingnode serve data",
        "streamingnode serve data --json",
        "streamingnode serve data --listen tcp://127.0.0.1:7070 --tokens tokens.toml",
        "streamingnode serve data --listen tls://0.0.0.0:7070 --tls-cert node.pem --tls-key node.key --tokens tokens.toml",
    ),
)
def serve(
    output: Output,
    *,
    directory: Path,
    listen: list[str],
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    audit_log: Path | None,
    config: Path | None,
) -> None:
    """Run a node for other processes, in the foreground.

    Clients reach it at node.sock in its directory, and at --listen. Prints a line when it is ready, after recovery, and
    says so to systemd. SIGTERM and SIGINT end it: clients finish what they have begun, and it exits with 0; a second
    one exits at once. An address other than loopback needs --tokens or --tls-client-ca, and TLS.
    """
    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    endpoints = [Endpoint.of(url, tokens=tokens, tls=tls, client_ca=tls_client_ca is not None) for url in listen]
    if audit_log is not None:
        with disk_errors_typed(audit_log):
            audit_to(audit_log)

    def ready(addresses: list[str]) -> None:
        output.line(f"ready: {' '.join(addresses)}")
        output.document({"ready": True, "pid": os.getpid(), "addresses": addresses})
        output.flush()

    run_async(partial(serve_node, directory, endpoints, config, ready))


@command(
    argument("action", choices=["show"], help="show: print the settings a node would be opened with here"),
    argument("--file", type=Path, help="a TOML file of settings (default: what STREAMINGNODE_CONFIG names)"),
    argument("--changed", action="store_true", help="only what is not a default"),
    examples=(
        "streamingnode config show",
        "streamingnode config show --changed --file node.toml",
        "streamingnode config show --json",
    ),
)
def config(output: Output, *, action: str, file: Path | None, changed: bool) -> None:
    """Show every setting, its value, and where that comes from.

    Settings come from defaults, then a TOML file, then STREAMINGNODE_* environment variables, then the arguments of
    open_node; later ones win. A variable is the setting's name in capitals with `_` for `.`.
    """
    assert action == "show", "the only choice"
    settings = load_config(file=file, environment=os.environ).origins()
    shown = [each._asdict() for each in settings if not changed or each.origin != DEFAULT_ORIGIN]
    output.records(shown)
    output.document(shown)


@command(
    argument("--dir", dest="directory", metavar="DIR", type=Path, default="demo-data", help="(default: demo-data)"),
    argument("--seconds", type=float, default=20.0, help="how long to sample (default: 20)"),
    argument("--rounds-per-second", type=float, default=10.0, help="how often to look at all processes (default: 10)"),
    examples=("streamingnode demo", "streamingnode demo --dir /tmp/demo --seconds 5 --json"),
)
def demo(output: Output, *, directory: Path, seconds: float, rounds_per_second: float) -> int:
    """This machine's processes, through a node, into checked tables.

    Shows everything on real input: samples every process into a node (each round is one transaction over the
    collections `samples` and `live`), cuts, lets Spark ingest the cuts, checks that the tables hold exactly what
    was acknowledged, prints the top processes from Spark SQL and draws report.png. Replaces a directory that an
    earlier demo made, and nothing else. Exit code 1 when a check fails.
    """
    if not (0 < seconds < math.inf and 0 < rounds_per_second < math.inf):
        raise InvalidArgument("--seconds or --rounds-per-second is out of range — give more than 0")
    require(DEMO)
    from streamingnode import demo as job

    with Progress(output.stderr) as progress:
        result = job.run_demo(directory, seconds, rounds_per_second, progress)
    output.line(
        f"{result.rounds} rounds with {result.samples} samples acknowledged, and ingested in {result.cuts} cuts"
    )
    output.line()
    output.records(result.top)
    output.line()
    for check in result.checks:
        output.line(f"{'ok  ' if check.passed else 'FAIL'}  {check.what} ({format_count(check.rows, 'row')})")
    picture = directory / job.PICTURE
    output.line(f"picture: {picture}")
    passed = all(check.passed for check in result.checks)
    output.document({**vars(result), "directory": directory, "passed": passed, "picture": picture})
    return EXIT_OK if passed else EXIT_FAILED
