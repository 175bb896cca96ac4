"""A backup of the node while it runs: appends, readers and cuts go on. On the event loop; the disk is used in threads.

The database is linked beside the node's own, in one step that costs no copying; then its bytes are copied at leisure. The
links are gone afterwards, also when the backup fails or is cancelled; what a crash leaves of them the next backup removes.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import from_thread, to_thread

from flusher.retention import LEASE_BYTES_MAX, LEASES
from streamingnode.backup.making import BackupResult, BackupSource, make_backup
from streamingnode.backup.target import Target
from wal.errors import Corrupt, InvalidArgument
from wal.files import disk_errors_typed, make_directory, read_regular, write_file
from wal.rocks.floor import Floor, read_floor
from wal.rocks.layout import DATABASE_NAME
from wal.tasks import outlast

LINKS = "backup.tmp"
"""In the node directory while a backup is made: hard links need the same disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """What a backup needs of the node: its directory, a way to link its database, and a cut to begin with.

    Inside the block of `hold_cuts` no cut goes.
    """

    directory: Path | None
    link_copy: Callable[[Path], Awaitable[None]] | None
    flush: Callable[[], Awaitable[object]]
    hold_cuts: Callable[[], AbstractAsyncContextManager[None]]
    now_ms: Callable[[], int]


async def backup_running(node: RunningNode, target: Path, limit: anyio.Lock) -> BackupResult:
    """Make a backup of everything acknowledged before the call; `limit` lets one be made at a time.

    Raises `InvalidArgument` for a node in memory or a target inside the node, `AlreadyExists` for a target in use, `Corrupt`
    when the copy is not sound, `StorageFailed`. Nothing is at `target` then, nor when it is cancelled.
    """
    directory, link_copy = node.directory, node.link_copy
    if directory is None or link_copy is None:
        raise InvalidArgument("a node in memory has nothing to back up — open one in a directory")
    # In a task of its own that only its scope can cancel, so cleaning up waits for the thread that copies.
    scope = anyio.CancelScope()
    made: list[BackupResult] = []

    async def back_up() -> None:
        with scope:
            async with limit, node.hold_cuts():
                with disk_errors_typed(directory):
                    made.append(await _back_up(node, directory, link_copy, target))

    try:
        await outlast(back_up(), on_cancel=scope.cancel)
    except asyncio.CancelledError:
        if made:  # too late to be stopped; its caller knows nothing of it, and would meet it in its way
            await outlast(to_thread.run_sync(shutil.rmtree, made[0].path))
        raise
    return made[0]


async def _back_up(
    node: RunningNode, directory: Path, link_copy: Callable[[Path], Awaitable[None]], target: Path
) -> BackupResult:
    place = await to_thread.run_sync(Target, target, directory)
    try:
        await node.flush()
        floor = await to_thread.run_sync(_begin, directory)
        await link_copy(directory / LINKS / DATABASE_NAME)
        source = BackupSource(
            directory=directory, database=directory / LINKS, floor=floor, cuts_ahead=0, now_ms=node.now_ms()
        )
        return await to_thread.run_sync(make_backup, source, place, _check_cancelled)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(_end, directory, place)


def _check_cancelled(_part: str, _done: int) -> None:
    """End the work in the thread when its task was cancelled; asked after about each MiB."""
    from_thread.check_cancelled()


def _begin(directory: Path) -> Floor:
    """Return the floor as it is before the database is linked: what it says is in the copy for certain.

    The leases are copied now for the same reason: a later one may speak of a cut that the copy does not know.
    """
    shutil.rmtree(directory / LINKS, ignore_errors=True)
    make_directory(directory / LINKS)
    make_directory(directory / LINKS / LEASES)
    for lease in sorted((directory / LEASES).glob("*.json")):
        with suppress(FileNotFoundError):  # its table was given up meanwhile
            write_file(directory / LINKS / LEASES / lease.name, read_regular(lease, bytes_max=LEASE_BYTES_MAX))
    floor = read_floor(directory)
    if floor is None:
        raise Corrupt(f"{directory} has no floor file any more — close the node and run: streamingnode verify")
    return floor


def _end(directory: Path, target: Target) -> None:
    shutil.rmtree(directory / LINKS, ignore_errors=True)
    target.discard()
