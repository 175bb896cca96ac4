"""Progress of long work on a terminal: one line for each stage, rewritten as it advances."""

import time
from shutil import get_terminal_size
from typing import Self, TextIO

REWRITE_INTERVAL_S = 0.1


class Progress:
    """Shows the stage of long work in a block, and ends the line of each stage with its duration.

    It writes only to a terminal: cron would mail any other output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_seen = stream.isatty()
        self._name = self._text = ""
        self._total: float | None = None
        self._began = self._written = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._close()
        elif self._name:  # the line stays, and later output begins on the next one
            self._write("\n")

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` steps (None if unknown), and end the previous one."""
        self._close()
        self._name = self._text = name
        self._total = total
        self._began = time.monotonic()
        self._written = 0.0
        self._rewrite()

    def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
        """Show that `done` steps of the stage are done, with a short note; `total` sets the number
        of steps.
        """
        self._total = self._total if total is None else total
        share = f", {min(1.0, done / self._total):.0%}" if self._total else ""
        self._text = f"{self._name}: {note}{share}"
        self._rewrite()

    def _close(self) -> None:
        if self._name:
            self._write(f"\r{self._text} ({time.monotonic() - self._began:.1f} s)\x1b[K\n")
            self._name = ""

    def _rewrite(self) -> None:
        now = time.monotonic()
        if now - self._written > REWRITE_INTERVAL_S:
            self._written = now
            # a line that wraps cannot be rewritten
            self._write(f"\r{self._text[: get_terminal_size().columns - 1]}\x1b[K")

    def _write(self, text: str) -> None:
        if self._is_seen:
            self._stream.write(text)
            self._stream.flush()
