"""What is going on, for a person who waits: bars on a terminal, one line for each stage elsewhere.

In: stages, and how far each is. Out: stderr, never stdout, which is for results.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told by a long piece of work where it is; a new stage ends the one before. One thread at a time."""

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` steps, None when nobody knows how many."""

    def advance(self, done: float, note: str = "") -> None:
        """Say that `done` steps of the stage are done, and something short about it."""

    def grow(self, total: float) -> None:
        """Say how many steps the stage has, now that it is known."""


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Progress]:
    """Show progress on `stream` while the block runs."""
    if stream.isatty():
        with _bars(stream) as bars:
            yield bars
    else:
        lines = StageLines(stream)
        yield lines
        lines.close()


class StageLines:
    """Progress where nothing can be redrawn: one line when a stage ends, with how long it took."""

    def __init__(self, stream: TextIO, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._name = ""
        self._note = ""
        self._began = 0.0

    def stage(self, name: str, total: float | None = None) -> None:
        """See `Progress`."""
        self.close()
        self._name, self._note, self._began = name, "", self._monotonic()

    def advance(self, done: float, note: str = "") -> None:
        """See `Progress`."""
        self._note = note or self._note

    def grow(self, total: float) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """End the stage that is going on."""
        if self._name:
            note = f": {self._note}" if self._note else ""
            self._stream.write(f"{self._name}{note} ({self._monotonic() - self._began:.1f} s)\n")
            self._stream.flush()
            self._name = ""


@contextmanager
def _bars(stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    with RichProgress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=Console(file=stream),
    ) as rich:
        bars = _StageBars(rich.add_task, rich.update)
        yield bars
        bars.close()


class _StageBars:
    """Progress on a terminal: one bar for each stage."""

    def __init__(self, add: Callable[..., int], update: Callable[..., None]) -> None:
        self._add, self._update = add, update
        self._task: int | None = None

    def stage(self, name: str, total: float | None = None) -> None:
        self.close()
        self._task = self._add(name, total=total, note="")

    def advance(self, done: float, note: str = "") -> None:
        assert self._task is not None, "a stage has begun"
        self._update(self._task, completed=done, **({"note": note} if note else {}))

    def grow(self, total: float) -> None:
        assert self._task is not None, "a stage has begun"
        self._update(self._task, total=total)

    def close(self) -> None:
        if self._task is not None:
            self._update(self._task, total=1, completed=1)
            self._task = None
