"""Processes that start in milliseconds: a server imports everything once, before any database is
open, and forks.

In: a `Job`. Out: a running process, to be killed or waited for. The server has one thread and opens
nothing, so its children are as good as fresh; each has a session of its own and writes what it
prints to a file.
"""

import gc
import importlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from tests.chaos.worker import Job, run

PRELOADED = (
    "streamingnode.composition",
    "streamingnode.opening",
    "anyio._backends._asyncio",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "pyarrow.compute",
)
PRINTED = "printed.txt"
KILLED = -int(signal.SIGKILL)
WAIT_S_MAX = 120.0


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Start a job, send a signal to a process, or wait for its end."""

    do: Literal["start", "signal", "wait"]
    job: Job | None = None
    pid: int = 0
    signal: int = int(signal.SIGKILL)
    seconds: float = 0.0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The process, and its exit code once it has one: negative for the signal that ended it."""

    pid: int
    exit_code: int | None = None


class Nursery:
    """The client: one fork server, used by one thread at a time; a context that ends all its
    children.
    """

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(WAIT_S_MAX)
        self._server.stdout.close()

    def start(self, job: Job) -> int:
        """Start a process and return its id."""
        return self._order(Order(do="start", job=job)).pid

    def kill(self, pid: int) -> int:
        """Kill a process with SIGKILL and return its exit code, another one than `KILLED` when it
        had ended before.
        """
        self.signal(pid)
        code = self.wait(pid, WAIT_S_MAX)
        assert code is not None, "nothing survives SIGKILL"
        return code

    def signal(self, pid: int, number: int = int(signal.SIGKILL)) -> None:
        """Send a signal and do not wait; nothing happens when the process has ended."""
        self._order(Order(do="signal", pid=pid, signal=number))

    def wait(self, pid: int, seconds: float) -> int | None:
        """Wait for the end of a process, at most so long; return its exit code."""
        return self._order(Order(do="wait", pid=pid, seconds=seconds)).exit_code

    def run(self, job: Job, seconds: float = WAIT_S_MAX) -> int | None:
        """Run a job to its end; one that takes longer is killed, and None returned."""
        pid = self.start(job)
        code = self.wait(pid, seconds)
        if code is None:
            self.kill(pid)
        return code

    def _order(self, order: Order) -> Reply:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(msgspec.json.encode(order) + b"\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise ChildProcessError("the fork server ended; what it printed says why")
        return msgspec.json.decode(line, type=Reply)


def serve() -> None:
    """Obey orders until standard input ends, then kill what still runs."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    ended: dict[int, int] = {}
    running: dict[int, int] = {}
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        reply = _obey(order, running, ended)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _obey(order: Order, running: dict[int, int], ended: dict[int, int]) -> Reply:
    match order.do:
        case "start":
            assert order.job is not None
            pid = _fork(order.job)
            running[pid] = os.pidfd_open(pid)
            ended.pop(pid, None)  # of an earlier process of that number
            return Reply(pid=pid)
        case "signal":
            if order.pid in running:
                os.kill(order.pid, order.signal)
            return Reply(pid=order.pid)
        case "wait":
            if (
                order.pid in running
                and select.select([running[order.pid]], [], [], order.seconds)[0]
            ):
                os.close(running.pop(order.pid))
                ended[order.pid] = os.waitstatus_to_exitcode(os.waitpid(order.pid, 0)[1])
            return Reply(pid=order.pid, exit_code=ended.get(order.pid))


def _fork(job: Job) -> int:
    pid = os.fork()
    if pid:
        return pid
    exit_code = 1
    try:
        os.setsid()
        out = Path(job.out)
        out.mkdir(parents=True, exist_ok=True)
        printed = os.open(out / PRINTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        exit_code = run(job)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


if __name__ == "__main__":
    serve()
