"""Scanners of one log have names of their own, are bounded in number, and end with it."""

import asyncio
from contextlib import suppress

import pytest

from scanner import scanner
from scanner.deliver_policy import DeliverPolicy
from scanner.scanner import ScannerRegistry
from tests.scanner.journal import Journal, read_until, seen
from wal.errors import InvalidArgument, OnShutdown, Overloaded
from wal.live_tail import LiveTail
from wal.position import MemoryMessageId

pytestmark = pytest.mark.anyio


async def test_scanners_get_different_names() -> None:
    journal = await Journal.create()
    registry = ScannerRegistry(journal.log, None)
    first = registry.open(DeliverPolicy.all())
    second = registry.open(DeliverPolicy.all())
    assert first.name != second.name
    assert [each.name for each in registry.statistics()] == [first.name, second.name]


async def test_more_scanners_than_the_bound_are_refused_until_one_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = await Journal.create()
    monkeypatch.setattr(scanner, "SCANNERS_MAX", 1)
    registry = ScannerRegistry(journal.log, None)
    first = registry.open(DeliverPolicy.all())
    with pytest.raises(Overloaded):
        registry.open(DeliverPolicy.all())
    await first.close()
    registry.open(DeliverPolicy.all())


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["refused", "cancelled"])
async def test_a_scanner_whose_block_was_not_entered_takes_no_place(*, is_cancelled: bool) -> None:
    journal = await Journal.create(tail=LiveTail())
    registry = ScannerRegistry(journal.log, journal.tail)
    policy = DeliverPolicy.all() if is_cancelled else DeliverPolicy.start_after(MemoryMessageId(99))

    async def enter() -> None:
        async with registry.open(policy):
            pytest.fail("it was to be kept out")

    entering = asyncio.create_task(enter())
    await asyncio.sleep(0)
    assert registry.statistics()
    if is_cancelled:
        entering.cancel()
    with suppress(asyncio.CancelledError, InvalidArgument):
        await entering
    assert not registry.statistics()


async def test_closing_the_registry_closes_every_scanner_and_opens_no_more() -> None:
    journal = await Journal.create(tail=LiveTail())
    journal.insert(b"row")
    registry = ScannerRegistry(journal.log, journal.tail)
    reader = registry.open(DeliverPolicy.all())
    assert seen(await read_until(reader, 1)) == journal.visible
    waiting = asyncio.create_task(reader.next_batch())
    await asyncio.sleep(0)
    await registry.close()
    with pytest.raises(OnShutdown):
        await waiting
    with pytest.raises(OnShutdown):
        registry.open(DeliverPolicy.all())
    assert reader.closed
