"""What a scanner takes from the machine: clocks and pauses, so that tests bring their own."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`now_s` is the Unix time, `monotonic` a clock that never goes back; seconds."""

    sleep: Sleep = asyncio.sleep
    now_s: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.perf_counter


REAL = Surroundings()
