"""Handlers of SIGINT, SIGTERM and SIGHUP: the first signal ends a command in order, a second one at
once.

By default the first one interrupts the program as Ctrl-C does. Work that ends in another way
declares that for its block, with `reacting`. A signal that was ignored at the start of the program,
as by `nohup` and for background jobs of shells, stays ignored.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_AT_ONCE = 1
EXIT_SIGNALLED = 128
"""Shells report an end by a signal as this plus the signal's number."""

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class Interrupted(KeyboardInterrupt):
    """A signal ends the program.

    Python remembers a plain `KeyboardInterrupt` that comes while it executes source text, as when
    it builds a dataclass. It then kills the process with SIGINT at its exit, whatever the exit code
    is.
    """


def _interrupt() -> None:
    raise Interrupted


class Ending:
    """The signal that ends the program, and the reaction to it."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        """The first signal that came; None before that."""
        self._reactions: list[Callable[[], object]] = [_interrupt]

    @property
    def word(self) -> str:
        """The word for the end of an interrupted program."""
        return _WORDS[self.number or signal.SIGINT]

    @property
    def exit_code(self) -> int:
        """The exit code of an interrupted program."""
        return EXIT_SIGNALLED + (self.number or signal.SIGINT)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle the signals in the block, if this is the main thread; other threads get none."""
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
        """Make the first signal call `reaction` in the block, instead of an interrupt.

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
"""The ending of this process."""
