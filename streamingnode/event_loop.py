"""One asynchronous program from start to end, on uvloop when it is installed."""

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import TypeVar

import anyio

T = TypeVar("T")


def run_async(program: Callable[[], Awaitable[T]]) -> T:
    """Run `program` on an event loop of its own and return its result; an interrupt cancels it and is raised here."""
    return anyio.run(program, backend="asyncio", backend_options={"use_uvloop": find_spec("uvloop") is not None})
