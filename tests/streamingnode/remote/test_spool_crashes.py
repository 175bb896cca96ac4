"""Clients with a spool are killed while they keep and while they send: what they said was kept is
in the log once.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.streamingnode.remote import spooling_worker
from tests.streamingnode.remote.nodes import Served, keys_in_log, node_behind_proxy
from tests.streamingnode.remote.proxy import Passing, Way, until
from tests.streamingnode.remote.spool_cases import emptied, spool_of
from wal.frames import FrameKind

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


class Worker:
    """One process, and what it said of its writes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.kept: list[int] = []

    async def read(self, writes: int) -> None:
        """Return when so many more writes have returned."""
        for _ in range(writes):
            assert await self._read_line()

    async def kill(self) -> None:
        """End it as a crash would, and take in what it had said."""
        self.process.kill()
        while await self._read_line():
            pass
        await self.process.wait()

    async def _read_line(self) -> bool:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        if not line.endswith("\n"):
            return False
        self.kept.append(int(line))
        return True


@asynccontextmanager
async def worker_of(served: Served, directory: Path, life: int) -> AsyncIterator[Worker]:
    command = [
        sys.executable,
        "-m",
        spooling_worker.__name__,
        served.proxy.url,
        str(directory),
        str(life),
    ]
    worker = Worker(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
    try:
        yield worker
    finally:
        if worker.process.returncode is None:
            await worker.kill()


async def test_clients_that_are_killed_while_they_keep_and_while_they_send_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    acknowledged: list[int] = []
    async with node_behind_proxy() as served:
        proxy = served.proxy
        for life in range(1, 5):
            async with worker_of(served, tmp_path / "spool", life) as worker:
                if life == 1:
                    await worker.read(20)
                if life % 2:  # killed while it keeps
                    proxy.is_refusing = True
                    proxy.cut()
                    await worker.read(150)
                else:  # killed while it sends what others of its directory have kept
                    frames = 0

                    def count(passing: Passing) -> bool:
                        nonlocal frames
                        frames += passing.way is Way.TO_NODE and passing.kind == FrameKind.WRITES
                        return True

                    proxy.on_frame = count
                    proxy.is_refusing = False
                    await until(lambda: frames > 10)  # noqa: B023 - waited for here
                await worker.kill()
            acknowledged += worker.kept
        async with served.client(spool=tmp_path / "spool") as client:
            await emptied(client)
            assert spool_of(client).dead_letters == 0
        times = Counter(await keys_in_log(served.owner))
    assert not [key for key, count in times.items() if count > 1], "twice in the log"
    assert not set(acknowledged) - set(times), "kept, and not in the log"
