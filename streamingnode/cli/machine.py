"""What a node is like on this machine: `bench`, how fast, and `config show`, with which settings."""

import math
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from streamingnode.cli.command import Place, command, operand, option, with_node
from streamingnode.cli.output import Output
from wal.errors import InvalidArgument

if TYPE_CHECKING:
    from streamingnode.node import Node

ROW_BYTES = 1024
KEY_BYTES = 8
DROP_S_MAX = 10.0
"""How long the end of a measurement waits until its collection is dropped."""


@command(
    "streamingnode bench",
    "streamingnode bench --callers 16 --rows 100 --seconds 10 --dir /tmp --json",
    "streamingnode bench --node tcp://127.0.0.1:7070 --outstanding 256 --size 200",
)
def bench(
    output: Output,
    *,
    place: Place | None,
    directory: Path = option("on the disk to measure (default: .)", "--dir", metavar="DIR", default="."),
    seconds: float = option("how long to measure (default: 3)", default=3.0),
    callers: int = option("inserts (default: 64)", "--outstanding", "--callers", default=64, metavar="N"),
    rows: int = option("rows in each insert (default: 1)", default=1, metavar="N"),
    size: int = option(f"of each row (default: {ROW_BYTES})", default=ROW_BYTES, metavar="BYTES"),
) -> None:
    """Measure durable inserts into a temporary node, or into one that is there.

    The temporary node is made under --dir and removed. In a node that is there a collection of its own is made, and
    dropped at the end; what was written goes from its log and files by retention. What one fsync takes, `doctor`
    measures.
    """
    if not directory.is_dir():
        raise InvalidArgument(f"{directory} is no directory — make it, or name another with --dir")
    if not (0 < seconds < math.inf and callers >= 1 and rows >= 1 and size >= 1):
        raise InvalidArgument("--seconds, --outstanding, --rows or --size is out of range — give more than 0")
    from streamingnode.opening import open_node, run_async

    measure = partial(_insert, seconds=seconds, callers=callers, rows=rows, value_bytes=max(0, size - KEY_BYTES))
    if place is not None:
        took = with_node(place, measure)
    else:

        async def alone(path: Path) -> list[float]:
            async with open_node(path) as node:
                return await measure(node)

        with tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as scratch:
            took = run_async(partial(alone, Path(scratch) / "node"))
    measured = {
        "rows_per_s": round(callers * rows / statistics.mean(took), 1),
        "p50_ms": round(statistics.median(took) * 1000, 3),
        "p99_ms": round(sorted(took)[int(len(took) * 0.99)] * 1000, 3),
    }
    output.show({"callers": callers, "rows": rows, "size": size, **measured})


async def _insert(node: "Node", *, seconds: float, callers: int, rows: int, value_bytes: int) -> list[float]:
    """Insert from so many callers, each once at least, into a new collection; return what each insert took."""
    import anyio
    import pyarrow as pa

    columns: dict[str, pa.DataType] = {"id": pa.int64(), "value": pa.binary()}
    dicts = [{"id": key, "value": os.urandom(value_bytes)} for key in range(rows)]
    # One row is given as a dict, as small inserts are mostly written.
    given = dicts if rows == 1 else pa.RecordBatch.from_pylist(dicts, schema=pa.schema(columns))
    took, name = list[float](), f"bench-{uuid4().hex}"

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
    finally:
        with anyio.move_on_after(DROP_S_MAX, shield=True):
            await node.drop_collection(name)
    return took


@command(
    "streamingnode serve data",
    "streamingnode serve data --json",
    "streamingnode serve data --http 127.0.0.1:9464 --log-format json",
    "streamingnode serve data --listen tcp://127.0.0.1:7070 --tokens tokens.toml",
    "streamingnode serve data --listen tls://0.0.0.0:7070 --tls-cert node.pem --tls-key node.key --tokens tokens.toml",
)
def serve(  # noqa: PLR0913 - one for each option
    output: Output,
    *,
    directory: Path = operand("the node's directory, made if it is new"),
    listen: list[str] = option("also at tcp://host:port or tls://host:port", metavar="URL"),
    tokens: Path | None = option("who may connect at --listen, a TOML file (docs/operations.md)", metavar="FILE"),
    tls_cert: Path | None = option("the certificate for tls://, with its chain", metavar="FILE"),
    tls_key: Path | None = option("its key, readable by this user alone", metavar="FILE"),
    tls_client_ca: Path | None = option("clients at tls:// need a certificate of this authority", metavar="FILE"),
    audit_log: Path | None = option("who connects, who is refused, and what admins do", metavar="FILE"),
    http: str | None = option("answer monitors there: /livez, /readyz, /metrics", metavar="HOST:PORT"),
    http_for_anybody: bool = option("allow --http at an address that other machines reach"),
    traces: bool = option("make spans for OpenTelemetry, which its SDK exports"),
    log_format: Literal["text", "json"] = option("json: every event as a line of JSON", default="text"),
    config: Path | None = option("a TOML file of settings", metavar="FILE"),
) -> None:
    """Run a node for other processes, in the foreground.

    Clients reach it at node.sock in its directory, and at --listen. Prints a line when it is ready, after recovery, and
    says so to systemd. SIGTERM and SIGINT end it: clients finish what they have begun, and it exits with 0; a second
    one exits at once. An address other than loopback needs --tokens or --tls-client-ca, and TLS.
    """
    from streamingnode.opening import run_async
    from streamingnode.remote.auth import Endpoint, server_tls
    from streamingnode.serve import audit_to, log_as_json, serve_node
    from wal.files import disk_errors_typed

    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    endpoints = [Endpoint.of(url, tokens=tokens, tls=tls, client_ca=tls_client_ca is not None) for url in listen]
    if audit_log is not None:
        with disk_errors_typed(audit_log):
            audit_to(audit_log)

    if log_format == "json":
        log_as_json()
    given = {"serve.http": http, "serve.http_for_anybody": http_for_anybody, "serve.traces": traces}
    settings = {name: value for name, value in given.items() if value}

    def ready(addresses: list[str]) -> None:
        document = {"ready": True, "pid": os.getpid(), "addresses": addresses}
        output.result(f"ready: {' '.join(addresses)}", document)
        output.flush()

    run_async(partial(serve_node, directory, endpoints, config, settings, ready))


@command(
    "streamingnode config show",
    "streamingnode config show --changed --file node.toml",
    "streamingnode config show --json",
)
def config(
    output: Output,
    *,
    action: Literal["show"] = operand("show: print the settings a node would be opened with here"),
    file: Path | None = option("a TOML file of settings (default: what STREAMINGNODE_CONFIG names)"),
    changed: bool = option("only what is not a default"),
) -> None:
    """Show every setting, its value, and where that comes from.

    Settings come from defaults, then a TOML file, then STREAMINGNODE_* environment variables, then the arguments of
    open_node; later ones win. A variable is the setting's name in capitals with `_` for `.`.
    """
    from streamingnode.config import DEFAULT_ORIGIN, load_config

    assert action == "show", "the only choice"
    settings = load_config(file=file, environment=os.environ).origins()
    shown = [each._asdict() for each in settings if not changed or each.origin != DEFAULT_ORIGIN]
    output.records(shown)
    output.document(shown)
