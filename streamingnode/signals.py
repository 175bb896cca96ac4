"""What SIGINT, SIGTERM and SIGHUP do: the first ends a command in order, a second one at once.

By default the first one interrupts the program as Ctrl-C does. Work that ends in another way says
so for its block, with `reacting`. A signal that the program was started to ignore, as `nohup` and
shells in the background do, stays ignored.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_AT_ONCE = 1
EXIT_SIGNALLED = 128
"""Shells report the end by a signal as this and its number."""

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(KeyboardInterrupt):
    """A signal ends the program.

    Python notes a plain `KeyboardInterrupt` that comes while it runs text as code, as at the making
    of a dataclass, and kills the process with SIGINT at its exit, whatever the exit code is.
    """


def _interrupt() -> None:
    raise Interrupted


class Ending:
    """Which signal ends the program, and what it does first."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The first signal that came; None while there was none."""
        self._reactions: list[Callable[[], object]] = [_interrupt]

    @property
    def word(self) -> str:
        """How a program ends that is interrupted."""
        return _WORDS[self.number or signal.SIGINT]

    @property
    def exit_code(self) -> int:
        """The exit code of a program that is interrupted."""
        return EXIT_SIGNALLED + (self.number or signal.SIGINT)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Take the signals in the block, if this is the main thread; others get none."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            before = {each: signal.getsignal(each) for each in SIGNALS}
        taken = [each for each, handler in before.items() if handler is not signal.SIG_IGN]
        for each in taken:
            signal.signal(each, self._came)
        try:
            yield
        finally:
            for each in taken:
                signal.signal(each, before[each])
            self.number = None

    @contextmanager
    def reacting(self, reaction: Callable[[], object]) -> Iterator[None]:
        """Let the first signal do this in the block, in place of an interrupt.

        The reaction runs between any two steps of the main thread: it must take no lock.
        """
        self._reactions.append(reaction)
        try:
            yield
        finally:
            self._reactions.pop()

    def _came(self, number: int, _frame: object) -> None:
        if self.number is not None:
            os._exit(EXIT_AT_ONCE)
        self.number = signal.Signals(number)
        self._reactions[-1]()


ENDING = Ending()
"""That of this process."""
