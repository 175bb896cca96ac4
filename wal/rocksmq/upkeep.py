"""What a queue does and tells beside its work: retention from time to time, statistics, and what took long."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import msgspec

from wal.errors import StreamingNodeError
from wal.rocksmq.contract import GroupInfo, TopicInfo
from wal.rocksmq.group import Topic
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


@contextmanager
def watched(what: str, topic: str) -> Iterator[Callable[[str], None]]:
    """Log a call that takes over `SLOW_S`, with the time up to each step it tells of."""
    began, steps = monotonic(), dict[str, int]()

    def passed(step: str) -> None:
        steps[f"{step}_ms"] = int((monotonic() - began) * 1000)

    yield passed
    if monotonic() - began > SLOW_S:
        passed("took")
        _log.warning(f"slow_{what}", topic=topic, **steps)


def fail(outcome: asyncio.Future[None], error: BaseException) -> None:
    """Tell who waits for a write that it failed."""
    outcome.set_exception(error)
    outcome.exception()  # counts as heard, when nobody is left who waits
