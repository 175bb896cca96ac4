"""How many files and functions one operation passes through.

Run it as `python -m tests.doors [--list | --json]`. A profiler counts frames of the six packages,
on the event loop and on every thread that starts later, over a warmed-up node on disk with one
collection of one shard. Ticks and statistics run beside an operation now and then. Each operation
is therefore repeated, and the walk with the fewest files counts, of these the shortest one.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import anyio
import pyarrow as pa

import streamingnode as sn
from streamingnode.ownership import ROOT_PACKAGES

ROOT = f"{Path(__file__).resolve().parent.parent}/"
TIMES = 5
PAUSE_S = 0.1  # what the operation before left to do is done by then

_COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(_COLUMNS)
QUIET: dict[str, Any] = {
    "ticks.interval_s": 3600,
    "flush.retention.interval_s": 3600,
}  # on a busy machine it would run beside each


class Frame(NamedTuple):
    """One call of a function of the product."""

    path: str
    line: int
    on_loop: bool


class Walk(NamedTuple):
    """What one operation passed through, in order."""

    frames: tuple[Frame, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order in which they are first entered."""
        return tuple(dict.fromkeys(frame.path for frame in self.frames))

    @property
    def size(self) -> tuple[int, int]:
        """The number of files, then of calls: what runs beside the operation adds to both."""
        return len(self.files), len(self.frames)

    def figures(self) -> dict[str, int]:
        """Return what is counted; changes are those from one call to the next on the event loop."""
        paths = [frame.path for frame in self.frames if frame.on_loop]
        packages = [path.split("/", 1)[0] for path in paths]
        return {
            "files": len(self.files),
            "functions": len({(frame.path, frame.line) for frame in self.frames}),
            "calls": len(self.frames),
            "file changes": sum(one != other for one, other in pairwise(paths)),
            "package changes": sum(one != other for one, other in pairwise(packages)),
        }


class Doors:
    """A profiler that records which functions of the product run during a walk."""

    def __init__(self) -> None:
        self.walks: dict[str, Walk] = {}
        self._frames: list[Frame] = []
        self._recording = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take what `sys.setprofile` tells."""
        code = frame.f_code
        if not (self._recording and event == "call" and code.co_filename.startswith(ROOT)):
            return
        path = code.co_filename.removeprefix(ROOT)
        if path.split("/", 1)[0] in ROOT_PACKAGES:
            on_loop = threading.current_thread() is threading.main_thread()
            self._frames.append(Frame(path, code.co_firstlineno, on_loop))

    def end(self) -> None:
        """Record no more of the walk under way."""
        self._recording = False

    async def walk(self, name: str, operation: Callable[[], Awaitable[object]]) -> None:
        """Record one operation, and keep it when it is smaller than those before."""
        await anyio.sleep(PAUSE_S)
        self._frames, self._recording = [], True
        try:
            await operation()
        finally:
            self.end()
        walk = Walk(tuple(self._frames))
        if name not in self.walks or walk.size < self.walks[name].size:
            self.walks[name] = walk


async def _measure(doors: Doors, directory: Path) -> None:
    async with sn.open_node(directory, cut_interval_s=3600, **QUIET) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id", shards=1)
        for number in range(4):
            await node.insert("orders", [{"id": number, "item": "x"}])
        batch = pa.RecordBatch.from_pydict(
            {"id": list(range(100, 200)), "item": ["y"] * 100}, schema=SCHEMA
        )

        async def transaction() -> None:
            async with node.transaction() as txn:
                await txn.insert("orders", [{"id": 77, "item": "t"}])

        async def read() -> None:
            async with node.read("orders", sn.DeliverPolicy.all(), until=tick) as messages:
                async for message in messages:
                    assert message.time_tick <= tick

        for _ in range(TIMES):
            await doors.walk("insert", lambda: node.insert("orders", [{"id": 10, "item": "x"}]))
            await doors.walk("insert of a batch", lambda: node.insert("orders", batch))
            await doors.walk("upsert", lambda: node.upsert("orders", [{"id": 10, "item": "z"}]))
            await doors.walk("transaction", transaction)
            tick = await node.consistent_tick()
            await doors.walk("read", read)
            await doors.walk("cut", node.flush)

    async def reopen() -> None:
        async with sn.open_node(directory):
            doors.end()  # closing is no part of it

    for _ in range(TIMES):
        await doors.walk("open", reopen)


def measured() -> dict[str, Walk]:
    """Do every operation in this process, whose profiler must be free, and return its walk by
    name.
    """
    doors = Doors()
    with tempfile.TemporaryDirectory() as directory:
        threading.setprofile(doors)
        sys.setprofile(doors)
        try:
            anyio.run(_measure, doors, Path(directory) / "node")
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return doors.walks


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.doors", description=__doc__)
    parser.add_argument(
        "--list", action="store_true", help="name the files in the order in which they are entered"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures of each operation as JSON"
    )
    arguments = parser.parse_args()
    walks = measured()
    if arguments.json:
        print(json.dumps({name: walk.figures() for name, walk in walks.items()}))
        return
    for name, walk in walks.items():
        print(f"{name:18}" + "  ".join(f"{what} {count}" for what, count in walk.figures().items()))
        if arguments.list:
            print("   " + " ".join(walk.files))


if __name__ == "__main__":
    main()
