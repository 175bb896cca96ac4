"""What a running node does for its own data: verify it, back it up. Lives on the event loop; the disk is used in threads."""

import asyncio
import shutil
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from flusher.flusher import Flusher
from streamingnode.care.backup import Target, backup_running
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord
from streamingnode.care.verify import run_on, verify_running
from streamingnode.channel import Channel, flush
from wal.errors import InvalidArgument
from wal.files import disk_errors_typed
from wal.rocks.store import RocksStore
from wal.runtime import outlast

T = TypeVar("T")


class Upkeep:
    """The upkeep of the node at `path`, None for one in memory: that one's calls are refused."""

    def __init__(self, path: Path | None, channel: Channel, flusher: Flusher) -> None:
        self._path, self._channel, self._flusher = path, channel, flusher
        self._backing_up = anyio.Lock()

    async def verify(self) -> Report:
        """Check everything the node has, as fast as the disk goes; see `Node.verify`."""
        if self._path is None:
            raise InvalidArgument("a node in memory has nothing on a disk to verify — open one in a directory")
        check = partial(verify_running, self._path, self._channel, self._flusher, asyncio.get_running_loop())
        with disk_errors_typed(self._path):
            return await _in_own_task(to_thread.run_sync(check))

    async def back_up(self, path: Path) -> BackupRecord:
        """Make a verified backup, one at a time; see `Node.backup`."""
        store = self._channel.store
        if self._path is None or not isinstance(store, RocksStore):
            raise InvalidArgument("a node in memory has nothing to back up — open one in a directory")
        made: list[BackupRecord] = []
        try:
            with disk_errors_typed(self._path):
                await _in_own_task(self._back_up(self._path, store, path, made))
        except asyncio.CancelledError:
            if made:  # too late to be stopped; its caller knows nothing of it, and would meet it in its way
                await outlast(to_thread.run_sync(shutil.rmtree, path))
            raise
        return made[0]

    async def _back_up(self, directory: Path, store: RocksStore, path: Path, made: list[BackupRecord]) -> None:
        loop = asyncio.get_running_loop()

        def link(target: Path) -> None:
            run_on(loop, store.link_copy(target))

        async with self._backing_up, self._flusher.retention.hold_cuts():
            target = await to_thread.run_sync(Target, path, directory)
            try:
                await flush(self._channel, self._flusher)
                made.append(await to_thread.run_sync(backup_running, directory, target, link))
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(target.discard)


async def _in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; when the caller is cancelled, so is it, and its threads are waited for."""
    scope, result = anyio.CancelScope(), list[T]()

    async def run() -> None:  # in a task of its own that only its scope can cancel
        with scope:
            result.append(await work)

    await outlast(run(), on_cancel=scope.cancel)
    return result[0]
