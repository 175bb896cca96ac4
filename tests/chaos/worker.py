"""One life of a node process: open the directory, read everything back, then work until somebody
kills it.

In: a `Job`. Out: files outside the node directory - the read-back, written once it is whole, the
journal, line by line. Runs in a child of the fork server, or by itself as
`python -m tests.chaos.worker` where strace has to start it.
"""

import asyncio
import fcntl
import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal

import anyio
import msgspec

import streamingnode as sn
from bench.loop_hold import heartbeat
from streamingnode.care.verify import verify_directory
from tests.chaos import failpoint_life, small_node
from tests.chaos.feed import feed
from tests.chaos.operations import OperationWriter
from tests.chaos.read_back import Audit, ReadBack, audit, read_back, refused
from tests.chaos.rows import COLLECTIONS
from tests.chaos.soak import soak
from tests.chaos.workload import Load, Recorder, fill, make_collections, run_load
from wal.errors import StreamingNodeError

EXIT_REFUSED = 3


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process does: `work` opens, reads back and works, `read` opens and reads back,
    `audit` looks below.

    `fill` writes so many bytes, `open` only opens and notes how long that took; both then wait to
    be killed. `pass` is a life past every failpoint, `look` the one that reads what such lives
    left: both add to one journal beside the directory. `out` is a directory of this process's own
    for its journal, read-back and audit; `first` starts its ids and numbers. `armed` are
    failpoints, as in their environment variable. `small` is one of the lives of a small node,
    `verify` notes what a verification finds, `soak` loads a node steadily for some `seconds`.
    """

    do: Literal["work", "read", "audit", "fill", "open", "pass", "look", "small", "verify", "soak"]
    directory: str
    out: str
    first: int = 0
    seed: int = 0
    settings: dict[str, object] = {}
    load: Load = Load()
    fill_bytes: int = 0
    armed: str = ""
    seconds: float = 0.0
    lockless: bool = False
    """As on a file system without locks."""


def run(job: Job) -> int:
    """Do a job and return the exit code: 0, or 3 when the node refused to open or be read; the
    read-back says why.
    """
    out = Path(job.out)
    out.mkdir(parents=True, exist_ok=True)
    if job.lockless:
        fcntl.flock = _lock_nothing
    if job.do == "audit":
        return _audit(job, out)
    if job.do in ("pass", "look"):
        return _pass(job, out.parent / PASSED)
    if job.do == "verify":
        found = verify_directory(Path(job.directory)).findings
        _put(out / VERIFIED, "".join(f"{each.place}: {each.detail}\n" for each in found).encode())
        return 0
    if job.do == "soak":
        asyncio.run(soak(Path(job.directory), out, seconds=job.seconds))
        return 0
    if job.do == "small":
        asyncio.run(small_node.live(Path(job.directory), job.first, job.settings))
    try:
        asyncio.run(_open(job, out) if job.do == "open" else _live(job, out))
    except StreamingNodeError as error:
        if not (out / READ_BACK).exists():
            _put(out / READ_BACK, msgspec.msgpack.encode(refused(error)))
        _put(out / REFUSED, f"{error.code}: {error}".encode())
        return EXIT_REFUSED
    return 0


def _lock_nothing(*_: object) -> None:
    """Stand in for `flock`."""


async def _open(job: Job, out: Path) -> None:
    async with heartbeat() as holds:
        await asyncio.sleep(0)
        begun_s = time.monotonic()
        async with _node(job):
            opened_s = time.monotonic() - begun_s
            held_s = max(hold.wall_s for hold in holds)
            _put(
                out / READ_BACK, msgspec.msgpack.encode(ReadBack(opened_s=opened_s, held_s=held_s))
            )
            await asyncio.Event().wait()


def _node(job: Job) -> AbstractAsyncContextManager[sn.Node]:
    return sn.open_node(job.directory, config=sn.load_config(arguments=job.settings))


async def _live(job: Job, out: Path) -> None:
    begun_s = time.monotonic()
    async with _node(job) as node:
        if job.do == "fill":
            rows = await fill(node, job.fill_bytes, first=job.first)
            _put(out / FILLED, str(rows).encode())
            await asyncio.Event().wait()
        seen = await read_back(node, opened_s=time.monotonic() - begun_s)
        _put(out / READ_BACK, msgspec.msgpack.encode(seen))
        if job.do == "work":
            journal = OperationWriter(out / JOURNAL)
            await make_collections(node, COLLECTIONS)
            await _work(node, job, Recorder(journal, first=job.first))
            journal.close()


async def _work(node: sn.Node, job: Job, recorder: Recorder) -> None:
    end_s = None if job.load.seconds is None else time.monotonic() + job.load.seconds
    async with anyio.create_task_group() as tasks:
        for index in range(job.load.producers):
            tasks.start_soon(feed, node, recorder, index, end_s)
        tasks.start_soon(run_load, node, job.load, recorder, job.seed, end_s)


def _pass(job: Job, journal: Path) -> int:
    if job.do == "look":
        failpoint_life.judge(Path(job.directory), journal, job.first)
    else:
        failpoint_life.live(Path(job.directory), journal, job.first, job.armed)
    return 0


def _audit(job: Job, out: Path) -> int:
    try:
        _put(out / AUDIT, msgspec.msgpack.encode(asyncio.run(audit(Path(job.directory)))))
    except StreamingNodeError as error:
        _put(
            out / AUDIT,
            msgspec.msgpack.encode(
                Audit(entries=(), in_files={}, findings=(f"{error.code}: {error}",))
            ),
        )
        return EXIT_REFUSED
    return 0


READ_BACK = "read-back"
JOURNAL = "journal.jsonl"
AUDIT = "audit"
REFUSED = "refused"
FILLED = "filled"
PASSED = "passed.jsonl"
VERIFIED = "verified"


def load_read_back(out: Path) -> ReadBack | None:
    """Return what a process read, None when it was killed before it had everything."""
    path = out / READ_BACK
    return msgspec.msgpack.decode(path.read_bytes(), type=ReadBack) if path.exists() else None


def load_audit(out: Path) -> Audit:
    """Return what an audit found."""
    return msgspec.msgpack.decode((out / AUDIT).read_bytes(), type=Audit)


def _put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; by a link, because renames may be made to fail."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    path.hardlink_to(temporary)


if __name__ == "__main__":
    exit_code = run(msgspec.json.decode(sys.argv[1], type=Job))
    sys.stdout.flush()
    os._exit(exit_code)
