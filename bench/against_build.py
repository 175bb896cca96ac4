"""Two builds in turn on the same disk: `python -m bench.against_build OLD_PYTHON NEW_PYTHON`.

Each build is installed, with its benchmarks, for an interpreter of its own. This script starts one
process for each, which opens the nodes of a case; then both take short turns, in an order that
alternates. Of each figure it prints the medians over the turns and their ratio, new over old, and
the same of the best tenth of the turns, which other programs disturb least.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from bench.baseline import BareGroupCommit, Load, measure_appends, scratch
from bench.bench_remote import (
    CHANGES_CONNECTIONS,
    CHANGES_OUTSTANDING,
    _deliver,
    _fill_node,
    _read_all,
    changes_of,
    connections,
    serving_node,
)
from bench.bench_writes import AIMS, writes_of
from bench.rows import VALUE_BYTES, create, inserts_of
from streamingnode.node import Node
from streamingnode.opening import connect, open_node, run_async

Figures = dict[str, float]
"""What one turn measured, by unit."""
Append = Callable[[], Awaitable[object]]
Turn = Callable[[], Awaitable[Figures]]
Case = Callable[[Path], AbstractAsyncContextManager[Turn]]

LONE_WRITES = 100
"""In one turn; long enough for a clock of processor time, short beside what else the machine does.
"""
REMOTE_WRITES = 300
DELIVERIES = 200
READ_ROWS = 20_000
LOAD_S = 0.5
STARTS = 3
TURNS = {"lone": 40, "remote": 15, "start": 10}
"""By the first word of a case; 6 for the others, whose turns are loads of `LOAD_S`."""
TURNS_OF_A_LOAD = 6


# --- the turns of one build -----------------------------------------------------------------------


@asynccontextmanager
async def _lone(kind: str, directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of lone writes: processor time of the process, and p50 above a bare commit's."""
    with scratch(directory) as path, scratch(directory) as bare_path:
        async with open_node(path) as node:
            write = await writes_of(node, kind)
            commit = BareGroupCommit(bare_path)
            value = bytes(VALUE_BYTES)

            async def turn() -> Figures:
                bare = await _one_by_one(lambda: commit.append(value), LONE_WRITES)
                ours = await _one_by_one(write, LONE_WRITES)
                return {
                    "us of processor": ours["us of processor"],
                    "us of the loop": ours["us of the loop"],
                    "ms p50": ours["ms p50"],
                    "ms p50 above bare": ours["ms p50"] - bare["ms p50"],
                }

            try:
                await turn()
                yield turn
            finally:
                await commit.close()


async def _one_by_one(write: Append, count: int) -> Figures:
    clock = time.perf_counter
    seconds = []
    began = time.process_time()
    loop_began = time.thread_time()
    for _ in range(count):
        called = clock()
        await write()
        seconds.append(clock() - called)
    return {
        "us of processor": (time.process_time() - began) / count * 1e6,
        "us of the loop": (time.thread_time() - loop_began) / count * 1e6,
        "ms p50": statistics.median(seconds) * 1e3,
    }


@asynccontextmanager
async def _remote_row(directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of lone inserts over a Unix socket: processor time of node and client."""
    with scratch(directory) as path, serving_node(path) as served:
        async with connect(served.url) as node:
            insert = inserts_of(node, await create(node, "rows"), 1)

            async def turn() -> Figures:
                server_began = _processor_s(served.pid)
                ours = await _one_by_one(insert, REMOTE_WRITES)
                server_us = (_processor_s(served.pid) - server_began) / REMOTE_WRITES * 1e6
                return {
                    "us of processor": server_us + ours["us of processor"],
                    "us of the node": server_us,
                    "ms p50": ours["ms p50"],
                }

            await turn()
            yield turn


def _processor_s(pid: int) -> float:
    """Return the processor time that a process has had, as Linux counts it in nanoseconds."""
    clock = (~pid << 3) | 2
    return time.clock_gettime(clock)


@asynccontextmanager
async def _delivery(directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of rows that are read on another connection as they come; each has its node."""

    async def turn() -> Figures:
        with scratch(directory) as path, serving_node(path) as served:
            async with connections(served.url, 2) as (writer, reader):
                delays = await _deliver(writer, reader, DELIVERIES)
        return {"ms p50": statistics.median(delays) * 1e3}

    await turn()
    yield turn


@asynccontextmanager
async def _batched_read(directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of reads over a connection: of inserts of 100 rows, and of inserts of one."""
    with scratch(directory) as many, scratch(directory) as single:
        for path, batch in ((many, 100), (single, 1)):
            with serving_node(path) as served:
                await _fill_node(served, READ_ROWS, batch)
        with serving_node(many) as of_many, serving_node(single) as of_single:
            async with connect(of_many.url) as many_node, connect(of_single.url) as single_node:

                async def rate(node: Node) -> float:
                    until = await node.consistent_tick()
                    began = time.perf_counter()
                    rows = await _read_all(node, until)
                    return rows / (time.perf_counter() - began)

                async def turn() -> Figures:
                    hundreds = await rate(many_node)
                    ones = await rate(single_node)
                    return {
                        "rows/s, inserts of 100": hundreds,
                        "rows/s, inserts of 1": ones,
                        "times as many of inserts of 100": hundreds / ones,
                    }

                await turn()
                yield turn


@asynccontextmanager
async def _changes(kind: str, directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of changes over several connections."""
    with scratch(directory) as path, serving_node(path) as served:
        async with connections(served.url, CHANGES_CONNECTIONS) as nodes:
            append = await changes_of(nodes, kind)
            turn = partial(_under_load, append, CHANGES_OUTSTANDING)
            await turn()
            yield turn


@asynccontextmanager
async def _writes(kind: str, outstanding: int, directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of writes of many callers in the process of the node."""
    with scratch(directory) as path:
        async with open_node(path) as node:
            turn = partial(_under_load, await writes_of(node, kind), outstanding)
            await turn()
            yield turn


async def _under_load(append: Append, outstanding: int) -> Figures:
    count = 0

    async def counted() -> None:
        nonlocal count
        count += 1
        await append()

    began = time.process_time()
    load = Load(outstanding=outstanding, batch=1, seconds=LOAD_S)
    measured = await measure_appends(load, counted)
    return {
        "writes/s": measured.rows_per_s,
        "us of processor": (time.process_time() - began) / count * 1e6,
    }


@asynccontextmanager
async def _start(arguments: str, directory: Path) -> AsyncIterator[Turn]:
    """Yield a turn of starts of the command line."""
    command = [str(Path(sys.executable).with_name("streamingnode")), *arguments.split()]
    with scratch(directory) as path:
        if "--help" not in arguments:
            async with open_node(path) as node:
                await inserts_of(node, await create(node, "rows"), 100)()
            command.append(str(path))

        async def turn() -> Figures:
            seconds = []
            for _ in range(STARTS):
                began = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: ASYNC221
                seconds.append(time.perf_counter() - began)
            return {"ms": min(seconds) * 1e3}

        await turn()
        yield turn


CASES: dict[str, Case] = {
    "lone insert": partial(_lone, "insert of a dict"),
    "lone upsert": partial(_lone, "upsert"),
    "lone delete": partial(_lone, "delete"),
    "remote row": _remote_row,
    "remote delivery": _delivery,
    "read in batches over a connection": _batched_read,
    "upserts over 8 connections": partial(_changes, "upsert"),
    "transactions over 8 connections": partial(_changes, "transaction over two collections"),
    **{
        f"{outstanding} x {kind}": partial(_writes, kind, outstanding)
        for outstanding in (64, 1000)
        for kind in AIMS
    },
    "start of --help": partial(_start, "--help"),
    "start of ls": partial(_start, "ls"),
}


async def _take_turns(directory: Path) -> None:
    """Run the cases that are named on the standard input, one turn for each further line; an empty
    line ends a case.
    """
    while name := await _line():
        async with CASES[name](directory) as turn:
            gc.collect()
            gc.freeze()
            print("ready", flush=True)
            while await _line():
                print(json.dumps(await turn()), flush=True)
        gc.unfreeze()


async def _line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


# --- both builds ----------------------------------------------------------------------------------


class Build:
    """The process that takes the turns of one build."""

    def __init__(self, python: Path, directory: Path) -> None:
        # Isolated from this directory, where another build would be imported.
        place = str(directory.absolute())
        command = [str(python.absolute()), "-P", __file__, "--turns", "--dir", place]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=directory
        )

    def ask(self, line: str) -> str:
        """Return the answer to a line. Raises `ChildProcessError` when the process has ended."""
        self.tell(line)
        assert self._process.stdout is not None, "asked for"
        answer: str = self._process.stdout.readline()
        if not answer:
            raise ChildProcessError("the process of a build ended; it says why above")
        return answer

    def tell(self, line: str) -> None:
        """Send a line that has no answer."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None, "asked for"
        self._process.stdin.close()
        self._process.wait()


def compare(name: str, builds: tuple[Build, Build], turns: int) -> None:
    """Run one case of both builds and print its figures."""
    measured: tuple[list[Figures], list[Figures]] = ([], [])
    for build in builds:
        build.ask(name)
    for number in range(turns):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            measured[which].append(json.loads(builds[which].ask("turn")))
    for build in builds:
        build.tell("")
    for unit in measured[0][0]:
        old = [figures[unit] for figures in measured[0]]
        new = [figures[unit] for figures in measured[1]]
        ratio = statistics.median(new) / statistics.median(old)
        quiet_old = best_tenth(old, unit)
        quiet_new = best_tenth(new, unit)
        print(
            f"{name:44} {unit:32} {statistics.median(old):10,.2f} {statistics.median(new):10,.2f}"
            f" {ratio:5.2f} | {quiet_old:10,.2f} {quiet_new:10,.2f} {quiet_new / quiet_old:5.2f}",
            flush=True,
        )


def best_tenth(values: Sequence[float], unit: str) -> float:
    """Return the value that a tenth of the turns reach: the highest are the best of rates."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[-1] if "/s" in unit or "times" in unit else tenths[0]


def main() -> int:
    """Compare two builds, or take the turns of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", type=Path, help="of the old build and of the new one")
    parser.add_argument("--case", action="append", help="only cases whose name begins so")
    parser.add_argument("--turns-of-each", type=int, default=0, help="turns of each case")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns:
        run_async(partial(_take_turns, arguments.dir))
        return 0
    if len(arguments.pythons) != 2:
        parser.error("name two interpreters: of the old build, and of the new one")
    old, new = arguments.pythons
    builds = (Build(old, arguments.dir), Build(new, arguments.dir))
    print(f"{'case':44} {'unit':32} {'old':>10} {'new':>10} ratio | best tenth: old, new, ratio")
    prefixes = tuple(arguments.case or ("",))
    try:
        for name in [each for each in CASES if each.startswith(prefixes)]:
            turns = arguments.turns_of_each or TURNS.get(name.split()[0], TURNS_OF_A_LOAD)
            compare(name, builds, turns)
    finally:
        for build in builds:
            build.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
