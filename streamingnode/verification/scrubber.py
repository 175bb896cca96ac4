"""The slow verification of a running node: once in a while everything is read, at a bounded pace.

In: a walk and a pace. Out: log events, a file `scrub.json` in the node directory with the last result, `status`. Damage
found does not stop the node: reads of what is damaged fail with `Corrupt` by themselves, all others go on. Rot is found
while the log, a backup or a table still has the rows; that is what the scrubber is for.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from anyio import sleep as anyio_sleep
from anyio import to_thread

from streamingnode.verification.finding import Report, Severity
from wal.errors import Corrupt, OnShutdown, StreamingNodeError
from wal.event_log import event_log
from wal.files import read_regular, write_durably

SCRUB_FILE = "scrub.json"
SETTLE_S = 60.0
"""After a start that is overdue: the node has better to do first."""
EVENTS_MAX = 20
"""Findings of one round that get an event of their own."""

_log = event_log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubOptions:
    """How often everything is read, in seconds from the end of one round to the next; and how fast, 0 for never."""

    interval_s: float = 86_400.0
    bytes_per_s: int = 8 << 20


class ScrubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The last finished round; `finished_ms` (Unix) is 0 before the first. `findings` are texts: place, kind, detail."""

    finished_ms: int = 0
    verdict: str = "never scrubbed"
    bytes: int = 0
    seconds: float = 0.0
    findings: tuple[str, ...] = ()


NEVER = ScrubStatus()


def read_status(directory: Path) -> ScrubStatus:
    """Return the last round's result as the node directory has it; `NEVER` without one. Blocks."""
    try:
        return msgspec.json.decode(read_regular(directory / SCRUB_FILE), type=ScrubStatus)
    except (FileNotFoundError, Corrupt, msgspec.DecodeError, UnicodeDecodeError):
        return NEVER


class Scrubber:
    """Runs rounds until cancelled; `walk` adds to a report and yields the bytes it read. Lives on the event loop."""

    def __init__(
        self,
        walk: Callable[[Report], AsyncIterator[int]],
        directory: Path,
        options: ScrubOptions,
        *,
        now_ms: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = anyio_sleep,
    ) -> None:
        self._walk = walk
        self._directory = directory
        self._options = options
        self._now_ms = now_ms
        self._sleep = sleep
        self.status = NEVER

    async def run(self) -> None:
        """Scrub whenever it is due, until cancelled or until the node closes."""
        if not self._options.bytes_per_s:
            return
        self.status = await to_thread.run_sync(read_status, self._directory)
        while True:
            await self._sleep(self._pause_s())
            try:
                await self.scrub()
            except OnShutdown:
                return
            except (StreamingNodeError, OSError) as error:
                _log.warning("scrub_interrupted", error=str(error))
                await self._sleep(SETTLE_S)

    async def scrub(self) -> ScrubStatus:
        """Do one round at the set pace and return its result. Raises what the walk raises; nothing is said then."""
        report, began_ms = Report(), self._now_ms()
        async for read_bytes in self._walk(report):
            report.bytes += read_bytes
            await self._sleep(read_bytes / self._options.bytes_per_s)
        self.status = _status_of(report, began_ms, self._now_ms())
        _tell(report, self.status)
        await to_thread.run_sync(write_durably, self._directory / SCRUB_FILE, msgspec.json.encode(self.status))
        return self.status

    def _pause_s(self) -> float:
        """Return how long nothing is due."""
        since_s = (self._now_ms() - self.status.finished_ms) / 1000
        return max(SETTLE_S, self._options.interval_s - since_s) if self.status.finished_ms else SETTLE_S


def _status_of(report: Report, began_ms: int, ended_ms: int) -> ScrubStatus:
    worst = report.worst
    return ScrubStatus(
        finished_ms=ended_ms,
        verdict="sound" if worst is None else worst.value,
        bytes=report.bytes,
        seconds=(ended_ms - began_ms) / 1000,
        findings=tuple(f"{found.place}: {found.kind.value}: {found.detail}" for found in report.findings[:EVENTS_MAX]),
    )


def _tell(report: Report, status: ScrubStatus) -> None:
    for finding in report.findings[:EVENTS_MAX]:
        say = _log.error if finding.severity is Severity.DAMAGE else _log.warning
        say("scrub_found", place=finding.place, kind=finding.kind.value, detail=finding.detail)
    _log.info(
        "scrub_finished",
        verdict=status.verdict,
        bytes=status.bytes,
        seconds=status.seconds,
        findings=len(report.findings),
    )
