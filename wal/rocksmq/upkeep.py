"""What a queue does and tells beside its work: what one write has, retention from time to time, and what took long."""

import asyncio
from time import monotonic
from typing import Protocol

import msgspec

from wal.errors import StreamingNodeError
from wal.rocksmq.contract import GroupInfo, TopicInfo
from wal.rocksmq.group import Topic
from wal.rocksmq.messages import Body
from wal.runtime import event_log

_log = event_log(__name__)

SLOW_S = 0.2
"""A produce or consume that takes longer is logged."""
CHECK_S_MAX = 600.0
"""How often retention is looked at, unless its time is short, and statistics are logged."""
_CHECKS_PER_RETENTION = 10


class Kept(Protocol):
    """The queue."""

    async def retain(self) -> None:
        """Give up what retention allows."""

    async def info(self) -> dict[str, TopicInfo]:
        """Return what there is."""


async def keep(queue: Kept, retention_s: float | None) -> None:
    """Give up pages when they may go, and log statistics, until cancelled."""
    pause_s = CHECK_S_MAX
    if retention_s is not None:
        pause_s = min(max(retention_s / _CHECKS_PER_RETENTION, 1.0), CHECK_S_MAX)
    logged_s = monotonic()
    while True:
        await asyncio.sleep(pause_s)
        try:
            await queue.retain()
            if monotonic() - logged_s >= CHECK_S_MAX:
                logged_s = monotonic()
                for name, topic in (await queue.info()).items():
                    _log.info("topic_statistics", topic=name, **msgspec.structs.asdict(topic))
        except StreamingNodeError as error:  # of the disk, or a log that does not come back: it is tried again
            _log.warning("retention_failed", error=str(error))


def info_of(topic: Topic) -> TopicInfo:
    """Return what is told of a topic."""
    groups = {
        name: GroupInfo(group.floor, group.lag(topic.end_id), len(group.held)) for name, group in topic.groups.items()
    }
    pages = len(topic.pages), topic.acked_pages
    counts = topic.produced, topic.delivered, topic.acked
    return TopicInfo(topic.begin_id, topic.end_id, topic.kept_bytes, *pages, groups, *counts)


class Watch:
    """Logs a call that took over `SLOW_S`, with the time up to each step it was told of."""

    __slots__ = ("_began", "_steps", "_topic", "_what")

    def __init__(self, what: str, topic: str) -> None:
        self._what, self._topic, self._steps, self._began = what, topic, dict[str, float](), monotonic()

    def passed(self, step: str) -> None:
        """Take the time up to here; of a step that comes again, the last one."""
        self._steps[step] = monotonic() - self._began

    def ended(self, step: str) -> None:
        """Take the time of the last step, and say it all if it was long."""
        self.passed(step)
        if self._steps[step] > SLOW_S:
            steps = {f"{name}_ms": int(passed_s * 1000) for name, passed_s in self._steps.items()}
            _log.warning(f"slow_{self._what}", topic=self._topic, **steps)


class WriteInTurn:
    """All that is changed in one turn of the event loop: it goes into one write."""

    def __init__(self) -> None:
        self.changes: dict[str, bytes | None] = {}
        self.dropped: list[tuple[bytes, bytes]] = []
        self.bodies: dict[str, list[Body]] = {}
        self.groups: set[tuple[str, str]] = set()
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[None]] = []
        self._ended = False
        self._error: BaseException | None = None

    def written(self) -> "asyncio.Future[None]":
        """Return what is done with the write; each who waits has one, and may cancel it."""
        told: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(told)
        if self._ended:
            self.end(self._error)
        return told

    def end(self, error: BaseException | None = None) -> None:
        """Tell who waits what became of it."""
        self._ended, self._error = True, error
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            if not told.done():
                told.set_result(None) if error is None else told.set_exception(error)
