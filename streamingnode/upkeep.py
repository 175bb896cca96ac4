"""What a running node does for its own data: verify it, scrub it slowly, back it up. Put together by `composition`.

A node in memory has nothing on a disk: its calls are refused, and its scrubber does not run.
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
from streamingnode.verification.scrubber import NEVER, Scrubber, ScrubOptions, ScrubStatus
from wal.errors import Indeterminate, InvalidArgument
from wal.rocks.failures import disk_errors_typed


@dataclass(slots=True, kw_only=True)
class Upkeep:
    """The upkeep of one node; lives on its event loop. `parts` is None for a node in memory."""

    parts: RunningParts | None
    link_copy: Callable[[Path], Awaitable[None]] | None
    flush: Callable[[], Awaitable[object]]
    hold_cuts: Callable[[], AbstractAsyncContextManager[None]]
    now_ms: Callable[[], int]
    options: ScrubOptions
    scrubber: Scrubber | None = None
    _one_at_a_time: anyio.Lock = field(default_factory=anyio.Lock)

    def __post_init__(self) -> None:
        if (parts := self.parts) is not None:
            self.scrubber = Scrubber(
                lambda report: walk_running(parts, report), parts.directory, self.options, now_ms=self.now_ms
            )

    @property
    def scrub_status(self) -> ScrubStatus:
        """The result of the last round of the scrubber."""
        return NEVER if self.scrubber is None else self.scrubber.status

    async def run(self) -> None:
        """Scrub in the background until cancelled."""
        if self.scrubber is not None:
            await self.scrubber.run()

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
