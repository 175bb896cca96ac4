"""An event loop in a thread of its own, for programs that have none, and objects on it that any thread may call.

In: calls of any thread. Out: their results, blocking. The thread is a daemon and what was entered is left at exit at the
latest, so that a notebook which never closes its node still ends, and ends cleanly. The thread is not there in a forked
child, where a call would wait for it for ever: calls are refused, and there is nothing to close.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial, wraps
from operator import attrgetter
from types import TracebackType
from typing import Any, ClassVar, TypeVar, TypeVarTuple, Unpack, overload

from anyio.from_thread import start_blocking_portal

from wal.errors import InvalidArgument, OnShutdown, StorageFailed

T = TypeVar("T")
A = TypeVarTuple("A")


class BlockingLoop:
    """One running event loop; `close` ends it. After that every call raises `OnShutdown`."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._portal = self._entered.enter_context(start_blocking_portal("asyncio"))
        self._thread = self._portal.call(threading.get_ident)
        self._process = os.getpid()
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

    def enter(self, context: AbstractAsyncContextManager[T, bool | None]) -> T:
        """Enter a context manager, to be left when the loop is closed; a failure closes the loop.

        Only for what lasts as long as the loop: a task waits on it for the end, and the loop for its tasks.
        """
        self.check_open()
        try:
            return self._entered.enter_context(self._portal.wrap_async_context_manager(context))
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
        if os.getpid() != self._process:
            # Whoever collects what was entered would leave it, and wait for the thread.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._entered))
        elif not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._entered.__exit__(kind, error, traceback)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or could not be: this process is a fork of the one with the loop."""
        return self._closed or os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `OnShutdown` when the loop is closed, and what else keeps a call from being made here."""
        if self._closed:
            raise OnShutdown("the node is closed — open it again")
        if os.getpid() != self._process:
            raise StorageFailed(
                "the node was opened before this process was forked — open it in one process only, "
                "and start others with the spawn method"
            )
        if threading.get_ident() == self._thread:
            raise InvalidArgument("a blocking call on the node's own event loop never ends — call it in another thread")


class Blocking:
    """The blocking side of an asynchronous object: a subclass gets each public method and property of the class `of`.

    A method runs on the loop, asynchronous or not, because an object belongs to its loop; what it returns comes out
    blocking, too, if its class has such a side. A property is read as it is, so that it answers after the end as well.
    """

    _sides: ClassVar[dict[type, type["Blocking"]]] = {}

    def __init_subclass__(cls, *, of: type | None = None, without: Collection[str] = ()) -> None:
        if of is None:  # a caller's own subclass of a side
            return
        cls._sides[of] = cls
        for name, member in vars(of).items():
            if not name.startswith("_") and name not in without and name not in vars(cls):
                setattr(cls, name, _blocking(name, member))

    def __init__(self, original: Any, loop: BlockingLoop) -> None:
        self._original = original
        self._loop = loop

    def _call(self, method: str, /, *arguments: object, **options: object) -> Any:
        result = self._loop.call(partial(getattr(self._original, method), *arguments, **options))
        side = self._sides.get(type(result))
        return result if side is None else side(result, self._loop)


def _blocking(name: str, member: Any) -> object:
    if isinstance(member, property):
        return property(attrgetter(f"_original.{name}"), doc=member.__doc__)

    @wraps(member)
    def call(self: Blocking, /, *arguments: object, **options: object) -> Any:
        return self._call(name, *arguments, **options)

    return call
