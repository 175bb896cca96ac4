"""Bugs of ticks: given twice, told too early, forgotten, and outcomes that are guessed."""

import asyncio
from typing import Any

import msgspec

from interceptors.timetick import TimeTickInterceptor, TimeTickSyncOperator
from interceptors.txn import TxnInterceptor
from tests.chaos.seeded.bug import Right, SeededBug
from tests.chaos.simulation.store import SimulatedStore
from wal.timetick import TickAllocator, compose_tick


def _tick_goes_back(_right: Right) -> Right:
    def allocate(ticks: TickAllocator, count: int = 1) -> int:
        first: int = compose_tick(ticks._now_ms()) + (ticks.last & 0xFF) + 1
        ticks.last = first + count - 1
        return first

    return allocate


def _stale_tick(_right: Right) -> Right:
    async def sync(operator: TimeTickSyncOperator) -> int:
        return operator._acks.confirmed_tick

    return sync


def _confirmed_when_queued(right: Right) -> Right:
    def decide(interceptor: TimeTickInterceptor, pack: Any, acker: Any) -> None:
        ticket = pack.ticket
        durable = asyncio.get_running_loop().create_future()
        durable.set_result(None)
        pack.ticket = None if ticket is None else msgspec.structs.replace(ticket, durable=durable)
        right(interceptor, pack, acker)
        pack.ticket = ticket

    return decide


def _own_position_confirmed(_right: Right) -> Right:
    return lambda _manager: None


def _last_confirmed_one_too_far(right: Right) -> Right:
    def oldest_open_begin(manager: TxnInterceptor) -> int | None:
        begin = right(manager)
        return None if begin is None else begin + 1

    return oldest_open_begin


def _promise_nothing(_right: Right) -> Right:
    async def promise_tick(_store: SimulatedStore, _tick: int) -> None:
        """Forget it."""

    return promise_tick


TICK_GOES_BACK = SeededBug("tick goes back", TickAllocator, "allocate", _tick_goes_back)
CONFIRMED_WHEN_QUEUED = SeededBug(
    "readers see what is not durable", TimeTickInterceptor, "_decide", _confirmed_when_queued
)
STALE_TICK = SeededBug("stale consistent tick", TimeTickSyncOperator, "sync", _stale_tick)
OTHERS = (
    SeededBug(
        "the floor does not know what readers know",
        SimulatedStore,
        "promise_tick",
        _promise_nothing,
    ),
    SeededBug(
        "readers resume at their own position",
        TxnInterceptor,
        "oldest_open_begin",
        _own_position_confirmed,
    ),
    SeededBug(
        "last-confirmed one too far",
        TxnInterceptor,
        "oldest_open_begin",
        _last_confirmed_one_too_far,
    ),
)
