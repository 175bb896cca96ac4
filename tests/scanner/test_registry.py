"""Scanners of one log have names of their own and end with it."""

import asyncio

import pytest

from scanner.deliver_policy import DeliverPolicy
from scanner.errors import ReaderBusy
from scanner.scanner import ScannerRegistry
from tests.scanner.journal import Journal, read_until, seen
from wal.errors import OnShutdown, Overloaded
from wal.live_tail import LiveTail

pytestmark = pytest.mark.anyio


async def test_a_name_is_free_again_once_its_scanner_is_closed() -> None:
    journal = await Journal.create(tail=LiveTail())
    registry = ScannerRegistry(journal.log, journal.tail)
    first = registry.open(DeliverPolicy.all(), name="billing")
    with pytest.raises(ReaderBusy):
        registry.open(DeliverPolicy.all(), name="billing")
    await first.close()
    registry.open(DeliverPolicy.all(), name="billing")
    assert registry.names == ("billing",)


async def test_scanners_without_a_name_get_different_ones() -> None:
    journal = await Journal.create()
    registry = ScannerRegistry(journal.log, None)
    first, second = registry.open(DeliverPolicy.all()), registry.open(DeliverPolicy.all())
    assert first.name != second.name
    assert len(registry) == 2


async def test_more_scanners_than_the_bound_are_refused_until_one_closes() -> None:
    journal = await Journal.create()
    registry = ScannerRegistry(journal.log, None, scanners_max=1)
    first = registry.open(DeliverPolicy.all())
    with pytest.raises(Overloaded):
        registry.open(DeliverPolicy.all())
    await first.close()
    registry.open(DeliverPolicy.all())


async def test_closing_the_registry_closes_every_scanner_and_opens_no_more() -> None:
    journal = await Journal.create(tail=LiveTail())
    journal.insert(b"row")
    registry = ScannerRegistry(journal.log, journal.tail)
    scanner = registry.open(DeliverPolicy.all())
    assert seen(await read_until(scanner, 1)) == journal.visible
    waiting = asyncio.create_task(scanner.next_batch())
    await asyncio.sleep(0)
    await registry.close()
    with pytest.raises(OnShutdown):
        await waiting
    with pytest.raises(OnShutdown):
        registry.open(DeliverPolicy.all())
    assert scanner.closed
