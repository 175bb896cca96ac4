"""What is going on, for a person who waits, on stderr: one line for each stage, rewritten on a terminal as it goes on."""

import time
from typing import Self, TextIO

REWRITE_INTERVAL_S = 0.1
_TO_LINE_START, _CLEAR_REST = "\r", "\x1b[K"


class Progress:
    """Told by a long piece of work, in its block, where it is. Prints a line when a stage ends, with how long it took."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = self._text = ""
        self._total: float | None = None
        self._began = self._written = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._close()
        elif self._name and self._stream.isatty():  # its line is left as it is; what is printed next begins another
            self._stream.write("\n")

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` steps, None when nobody knows how many; it ends the one before."""
        self._close()
        self._name = self._text = name
        self._total, self._began, self._written = total, time.monotonic(), 0.0
        self._rewrite()

    def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
        """Say that `done` steps of the stage are done, of `total` now that it is known, and something short about it."""
        self._total = self._total if total is None else total
        share = f", {min(1.0, done / self._total):.0%}" if self._total else ""
        self._text = f"{self._name}: {note}{share}"
        self._rewrite()

    def _close(self) -> None:
        if self._name:
            begin, end = (_TO_LINE_START, _CLEAR_REST) if self._stream.isatty() else ("", "")
            self._stream.write(f"{begin}{self._text} ({time.monotonic() - self._began:.1f} s){end}\n")
            self._stream.flush()
            self._name = ""

    def _rewrite(self) -> None:
        now = time.monotonic()
        if self._stream.isatty() and now - self._written > REWRITE_INTERVAL_S:
            self._written = now
            self._stream.write(f"{_TO_LINE_START}{self._text}{_CLEAR_REST}")
            self._stream.flush()
