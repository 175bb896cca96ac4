"""Transactions of a web service: FastAPI with an embedded node against the same with sqlite3, and
without storage.

Each POST commits one transaction over two collections, a row of 1 KiB inserted and one upserted,
and is answered after fsync; sqlite3 has one connection in one thread (WAL, `synchronous=FULL`),
which is how a service has it. The service has one worker, the load is a process of its own that
keeps its connections, each with one request outstanding; all are on loopback and share the machine.
Every run has a new service and a new directory on the same disk, in turn.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec

from bench.baseline import scratch
from bench.http_load import GIVE_UP_S, Loaded
from bench.measurement import Measurement, median
from bench.report import Settings, main, note

CONNECTIONS = (32, 128)
AIM = 2.0
"""Transactions with a node for each with sqlite3."""
STOP_S = 60.0
"""A service that has not ended so long after it was asked to is killed."""
_PROGRAMS = ("fastapi", "httptools", "uvicorn", "uvloop")


def lacking() -> str:
    """Return what is missing to run the service, empty when nothing is."""
    missing = [name for name in _PROGRAMS if find_spec(name) is None]
    return f"needs {', '.join(missing)} — pip install '.[bench]'" if missing else ""


def run(settings: Settings) -> list[Measurement]:
    """Return transactions per second for each number of connections; nothing without the extra,
    which is said.
    """
    if lack := lacking():
        note(f"the service is left out: {lack}")
        return []
    found = []
    for connections in CONNECTIONS:
        loaded: dict[str, list[Loaded]] = {"node": [], "sqlite3": [], "nothing": []}
        for _ in range(settings.repeats):
            for store, runs in loaded.items():
                note(f"service, {connections} connections, {store}")
                runs.append(measure_service(store, connections, settings))
        found += _summaries(connections, loaded)
    return found


def measure_service(store: str, connections: int, settings: Settings) -> Loaded:
    """Return what a new service with `store` does under the load of so many connections."""
    with scratch(settings.directory) as path:
        path.mkdir()
        with serving(store, path) as port:
            return put_load_on(port, connections, settings.seconds)


@contextmanager
def serving(store: str, directory: Path) -> Iterator[int]:
    """Yield the port of a new service, which has ended afterwards. Raises `ConnectionError` when it
    does not start.
    """
    command = [sys.executable, "-m", "bench.service_app", store, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None, "asked for"
        try:
            port = service.stdout.readline()
            if not port:
                raise ConnectionError(f"the service with {store} did not start: it says why above")
            yield int(port)
        finally:
            service.terminate()
            try:
                service.wait(STOP_S)
            except subprocess.TimeoutExpired:
                service.kill()


def put_load_on(port: int, connections: int, seconds: float) -> Loaded:
    """Run the load in a process of its own. Raises `CalledProcessError` when a request is
    refused.
    """
    command = [sys.executable, "-m", "bench.http_load", str(port), str(connections), str(seconds)]
    said = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, timeout=2 * (seconds + GIVE_UP_S)
    )  # what goes wrong is said on stderr
    return msgspec.json.decode(said.stdout, type=Loaded)


def _summaries(connections: int, loaded: dict[str, list[Loaded]]) -> list[Measurement]:
    def rate(store: str) -> float:
        return median([each.requests_per_s for each in loaded[store]])

    def said(store: str) -> str:
        p50_ms, p99_ms = (
            median([value(each) * 1000 for each in loaded[store]]) for value in (_p50_s, _p99_s)
        )
        core = median([each.core for each in loaded[store]])
        return f"p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, load {core:.2f} of a core"

    case = f"{connections} connections"
    bare = rate("nothing")
    return [
        Measurement(
            name="service",
            case=f"{case}, node",
            value=rate("node"),
            unit="transactions/s",
            baseline=rate("sqlite3"),
            aim=AIM,
            note=f"{said('node')}; sqlite3 {said('sqlite3')}",
        ),
        *(
            Measurement(
                name="service",
                case=f"{case}, {store} of no storage",
                value=rate(store),
                unit="transactions/s",
                baseline=bare,
                note=said("nothing") if store == "node" else "",
            )
            for store in ("node", "sqlite3")
        ),
    ]


def _p50_s(loaded: Loaded) -> float:
    return loaded.p50_s


def _p99_s(loaded: Loaded) -> float:
    return loaded.p99_s


if __name__ == "__main__":
    sys.exit(main("transactions of a web service", run))
