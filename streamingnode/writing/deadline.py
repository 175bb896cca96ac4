"""Deadlines of calls: `timeout=` in seconds, and what is known about a call that ran into it."""

from collections.abc import Awaitable, Callable
from numbers import Real
from typing import TypeVar

import anyio

from streamingnode.errors import DeadlineExceeded
from wal.errors import InvalidArgument, Overloaded

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
    with anyio.move_on_after(_checked(timeout)):
        return await call()
    raise expired(timeout, what, begun=begun())


async def read_within(timeout: float | None, call: Callable[[], Awaitable[T]], what: str) -> T:
    """Return what `call`, which changes nothing, returns within `timeout` seconds. Raises `DeadlineExceeded`."""
    if timeout is None:
        return await call()
    with anyio.move_on_after(_checked(timeout)):
        return await call()
    raise DeadlineExceeded(f"{what} took longer than {timeout:g} s and changed nothing — give it more time")


def _checked(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not timeout > 0:
        raise InvalidArgument(f"timeout={timeout!r} — pass a number of seconds above 0, or None to wait for ever")
    return timeout


def expired(timeout: float, what: str, *, begun: bool) -> DeadlineExceeded | Overloaded:
    """Return the error of a call that took longer than `timeout` seconds."""
    if begun:
        return DeadlineExceeded(
            f"{what} was not acknowledged within {timeout:g} s and may still take effect — "
            "read back, or repeat it if doing it twice is harmless"
        )
    return Overloaded(f"{what} did not reach the log within {timeout:g} s and did nothing — try again later")
