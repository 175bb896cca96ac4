"""Readers that catch up near each other read the log once, and each hears of what is wrong with it."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from scanner import source
from scanner.source import SHARED_READ_BYTES_MIN, LogReads
from tests.scanner.journal import frozen, insert
from wal.entry import LogEntry
from wal.errors import Corrupt
from wal.log import Log

pytestmark = pytest.mark.anyio

BATCH = 100 << 10
ENTRY = 50 << 10


class CountedLog:
    """A log of entries of one size whose reads are counted, and end when they are let go."""

    def __init__(self, entries: int) -> None:
        self.first_position, self.durable_position = 1, entries
        self.reads: list[int] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.fail: Callable[[], Exception] | None = None

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        self.reads.append(position)
        await self.go_on.wait()
        if self.fail is not None:
            raise self.fail()
        last = min(self.durable_position, position + max(1, bytes_max // ENTRY) - 1)
        return [frozen([insert()], 100 * each, each, size_bytes=ENTRY) for each in range(position, last + 1)]


def reads_of(log: CountedLog) -> LogReads:
    return LogReads(cast("Log", log))


async def all_of(reads: LogReads, log: CountedLog, *, first: int = 1) -> list[int]:
    """Read from a position to the end, and return the positions of what came."""
    seen: list[int] = []
    while first <= log.durable_position:
        entries = await reads.read(first, bytes_max=BATCH)
        seen += [each.first_position for each in entries]
        first = seen[-1] + 1
    return seen


async def test_many_readers_that_catch_up_read_the_log_as_often_as_one() -> None:
    log = CountedLog(7)
    readers = [reads_of(log) for _ in range(20)]
    seen = await asyncio.gather(*[all_of(reader, log) for reader in readers])
    assert seen == [list(range(1, 8))] * 20
    assert log.reads == [1, 3, 5, 7]
    assert sum(reader.seconds.distribution().count for reader in readers) == 4


async def test_a_reader_that_is_given_up_does_not_take_the_read_of_others_with_it() -> None:
    log = CountedLog(2)
    log.go_on.clear()
    first, second = [asyncio.ensure_future(reads_of(log).read(1, bytes_max=BATCH)) for _ in range(2)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    log.go_on.set()
    assert [each.first_position for each in await second] == [1, 2]
    assert log.reads == [1, 1]


async def test_each_reader_hears_of_damage() -> None:
    log = CountedLog(2)
    log.fail = lambda: Corrupt("a flipped bit")
    found = await asyncio.gather(*[reads_of(log).read(1, bytes_max=BATCH) for _ in range(3)], return_exceptions=True)
    assert [type(each) for each in found] == [Corrupt] * 3


async def test_the_end_of_a_log_that_has_grown_is_read_again() -> None:
    log = CountedLog(1)
    assert await all_of(reads_of(log), log) == [1]
    log.durable_position = 2
    assert await all_of(reads_of(log), log) == [1, 2]


async def test_what_was_truncated_is_asked_of_the_log_which_refuses_it() -> None:
    log = CountedLog(4)
    await all_of(reads_of(log), log)
    log.first_position = 3
    log.fail = lambda: Corrupt("asked")
    with pytest.raises(Corrupt, match="asked"):
        await reads_of(log).read(1, bytes_max=BATCH)
    assert [each.first_position for each in await reads_of(log).read(3, bytes_max=BATCH)] == [3, 4]


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "SHARED_BYTES_MAX", 3 * BATCH)
    log = CountedLog(20)
    await all_of(reads_of(log), log)
    before = len(log.reads)
    await all_of(reads_of(log), log, first=15)
    assert len(log.reads) == before
    await reads_of(log).read(1, bytes_max=BATCH)
    assert len(log.reads) == before + 1


async def test_a_look_at_one_entry_is_not_kept() -> None:
    log = CountedLog(2)
    for _ in range(2):
        await reads_of(log).read(1, bytes_max=SHARED_READ_BYTES_MIN - 1)
    assert log.reads == [1, 1]
