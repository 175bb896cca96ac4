"""How long an event loop is held: what is late, and by how much, because something did not let it
run.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

HEARTBEAT_S = 0.002


@dataclass(frozen=True, slots=True)
class Hold:
    """How much later than asked the loop came back, and the processor time its thread used in
    between, in seconds.

    On a busy machine the first is longer than the second, because other programs ran.
    """

    wall_s: float
    busy_s: float


@asynccontextmanager
async def heartbeat() -> AsyncIterator[list[Hold]]:
    """Yield a list that fills with one `Hold` for each turn of the loop."""
    holds = [Hold(0.0, 0.0)]

    async def beat() -> None:
        while True:
            asked = time.perf_counter()
            busy = time.thread_time()
            await asyncio.sleep(HEARTBEAT_S)
            holds.append(Hold(time.perf_counter() - asked - HEARTBEAT_S, time.thread_time() - busy))

    task = asyncio.create_task(beat())
    try:
        yield holds
    finally:
        task.cancel()
