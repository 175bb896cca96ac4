"""What a running node does for its own data: verify it, back it up. Put together by `composition`.

A node in memory has nothing on a disk: its calls are refused.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from streamingnode.backup.making import BackupResult
from streamingnode.backup.running_node import RunningNode, backup_running
from streamingnode.errors import LogReopening
from streamingnode.verification.finding import Report
from streamingnode.verification.running import RunningParts, walk_running
from wal.errors import Indeterminate, InvalidArgument
from wal.files import disk_errors_typed


@dataclass(slots=True, kw_only=True)
class Upkeep:
    """The upkeep of one node; lives on its event loop. `parts` is None for a node in memory."""

    parts: RunningParts | None
    link_copy: Callable[[Path], Awaitable[None]] | None
    flush: Callable[[], Awaitable[object]]
    hold_cuts: Callable[[], AbstractAsyncContextManager[None]]
    now_ms: Callable[[], int]
    _one_at_a_time: anyio.Lock = field(default_factory=anyio.Lock)

    async def verify(self) -> Report:
        """Check everything the node has, as fast as the disk goes; see `Node.verify`."""
        if self.parts is None:
            raise InvalidArgument("a node in memory has nothing on a disk to verify — open one in a directory")
        report = Report()
        try:
            with disk_errors_typed(self.parts.directory):
                async for read_bytes in walk_running(self.parts, report):
                    report.bytes += read_bytes
        except Indeterminate as error:  # of a write of others; nothing was written here
            raise LogReopening("the log is being reopened after a failed write — verify again") from error
        return report

    async def back_up(self, path: Path) -> BackupResult:
        """Make a verified backup; see `Node.backup`."""
        node = RunningNode(
            directory=None if self.parts is None else self.parts.directory,
            link_copy=self.link_copy,
            flush=self.flush,
            hold_cuts=self.hold_cuts,
            now_ms=self.now_ms,
        )
        return await backup_running(node, path, self._one_at_a_time)
