"""From an insert to its delivery at a reader that waits, and how long the event loop is ever held
meanwhile.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from bench.baseline import Load, measure_appends, measure_bare_appends, scratch
from bench.loop_hold import heartbeat
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import create, inserts_of, record_batch, rows_of
from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

DELIVERIES = 1_000
DELIVERY_AIM_MS = 0.5
"""Over the fsync that every durable append waits for."""

HOLD_AIM_MS = 50.0
LARGE_ROWS = 20_000
"""A single insert of 20 MiB: the largest piece of work a caller is likely to hand over at once."""


def run(settings: Settings) -> list[Measurement]:
    """Return both, in ms."""
    return [
        run_async(partial(_measure_delivery, settings)),
        run_async(partial(_measure_loop_hold, settings)),
    ]


async def _measure_delivery(settings: Settings) -> Measurement:
    """Return how much later than a bare durable write a row is delivered, in ms."""
    note("delivery")
    bare = await measure_bare_appends(
        Load(outstanding=1, batch=1, seconds=settings.seconds), settings.directory
    )
    with scratch(settings.directory) as path:
        async with open_node(path) as node:
            delays = await _deliver(node)
    p50_ms = median(delays) * 1000
    over_ms = p50_ms - bare.p50_s * 1000
    return Measurement(
        name="delivery",
        case="p50 over the fsync",
        value=over_ms,
        unit="ms",
        aim=DELIVERY_AIM_MS,
        note=f"append to delivery {p50_ms:.2f} ms, bare write and fsync {bare.p50_s * 1000:.2f} ms",
    )


async def _measure_loop_hold(settings: Settings) -> Measurement:
    """Return the longest time the event loop was held while rows of all sizes are inserted, read
    and cut, in ms.
    """
    note("event loop")
    with scratch(settings.directory) as path:
        async with open_node(path) as node:
            load = await _prepare(node, settings.seconds)
            async with heartbeat() as holds:
                await load()
    return Measurement(
        name="event loop",
        case="longest hold",
        value=max(hold.wall_s for hold in holds) * 1000,
        unit="ms",
        aim=HOLD_AIM_MS,
        note=f"of {len(holds)} turns; most processor time in one "
        f"{max(hold.busy_s for hold in holds) * 1000:.0f} ms",
    )


async def _deliver(node: Node) -> list[float]:
    collection = await create(node, "rows")
    next_row = rows_of(1)
    delays = []
    async with node.read(collection, DeliverPolicy.latest()) as messages:
        stream = aiter(messages)
        await node.insert(collection, next_row())
        await anext(stream)
        for _ in range(DELIVERIES):
            delivered = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            began = time.perf_counter()
            inserted = asyncio.ensure_future(node.insert(collection, next_row()))
            await delivered
            delays.append(time.perf_counter() - began)
            await inserted
    return delays


async def _prepare(node: Node, seconds: float) -> Callable[[], Awaitable[None]]:
    """Return the load to run; its rows are made here, so that making them does not hold the
    loop.
    """
    collection = await create(node, "rows")
    loads = (
        Load(outstanding=64, batch=1, seconds=seconds),
        Load(outstanding=8, batch=100, seconds=seconds),
    )
    inserts = [(load, inserts_of(node, collection, load.batch)) for load in loads]
    large = record_batch(1 << 40, LARGE_ROWS)

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for load, insert in inserts:
                tasks.create_task(measure_appends(load, insert))
            await node.insert(collection, large)
            await node.flush()
            async with node.read(
                collection, DeliverPolicy.all(), until=await node.consistent_tick()
            ) as messages:
                async for _ in messages:
                    pass
        await node.flush()

    return run


if __name__ == "__main__":
    sys.exit(main("append to delivery, and the event loop's longest hold", run))
