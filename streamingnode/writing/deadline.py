"""Deadlines of calls: `timeout=` in seconds, and what is known about a call that ran into it."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from wal.errors import DeadlineExceeded, InvalidArgument, Overloaded

T = TypeVar("T")


async def within(
    timeout: float | None, call: Callable[[], Awaitable[T]], what: str, *, begun: Callable[[], bool] = lambda: True
) -> T:
    """Return what `call` returns, if it does within `timeout` seconds; None waits for ever.

    Raises:
        Overloaded: the time is up and `begun` says that nothing was done.
        DeadlineExceeded: the time is up and the call may or may not take effect; it is also a `TimeoutError`.
    """
    if timeout is None:
        return await call()
    if not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r} — pass a number of seconds above 0, or None to wait for ever")
    with anyio.move_on_after(timeout):
        return await call()
    raise expired(timeout, what, begun=begun())


def expired(timeout: float, what: str, *, begun: bool) -> DeadlineExceeded | Overloaded:
    """Return the error of a call that took longer than `timeout` seconds."""
    if begun:
        return DeadlineExceeded(
            f"{what} was not acknowledged within {timeout:g} s and may still take effect — "
            "read back, or repeat it if doing it twice is harmless"
        )
    return Overloaded(f"{what} did not reach the log within {timeout:g} s and did nothing — try again later")
