"""An event loop in a thread of its own, for programs that have none: the ground of `sync`.

In: calls of any thread. Out: their results, blocking. The thread is a daemon and what was entered is left at exit at the
latest, so that a notebook which never closes its node still ends, and ends cleanly.
"""

import atexit
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from types import TracebackType
from typing import TypeVar, TypeVarTuple, Unpack, overload

from anyio.from_thread import start_blocking_portal

from wal.errors import OnShutdown

T = TypeVar("T")
A = TypeVarTuple("A")


class BlockingLoop:
    """One running event loop; `close` ends it. After that every call raises `OnShutdown`."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._portal = self._entered.enter_context(start_blocking_portal("asyncio"))
        self._closed = False
        atexit.register(self.close)

    @overload
    def call(self, function: Callable[[Unpack[A]], Awaitable[T]], *arguments: *A) -> T: ...

    @overload
    def call(self, function: Callable[[Unpack[A]], T], *arguments: *A) -> T: ...

    def call(self, function: Callable[[Unpack[A]], Awaitable[T] | T], *arguments: *A) -> T:
        """Run a function or coroutine function on the loop and return its result; errors come out as they are."""
        self.check_open()
        return self._portal.call(function, *arguments)  # type: ignore[return-value]  # the overloads say which it is

    def wrap(self, context: AbstractAsyncContextManager[T, bool | None]) -> AbstractContextManager[T, bool | None]:
        """Return an asynchronous context manager as a blocking one."""
        self.check_open()
        return self._portal.wrap_async_context_manager(context)

    def enter(self, context: AbstractAsyncContextManager[T, bool | None]) -> T:
        """Enter a context manager, to be left when the loop is closed; a failure closes the loop."""
        try:
            return self._entered.enter_context(self.wrap(context))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave what was entered and end the loop; idempotent."""
        self.exit(None, None, None)

    def exit(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do what `close` does, and say why."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._entered.__exit__(kind, error, traceback)

    def check_open(self) -> None:
        """Raise `OnShutdown` when the loop is closed."""
        if self._closed:
            raise OnShutdown("the node is closed — open it again")
