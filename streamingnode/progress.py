"""What is going on, for a person who waits, on stderr: bars on a terminal, one line for each stage elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Told by a long piece of work where it is. Prints a line when a stage ends, with how long it took."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = self._note = ""
        self._began = 0.0

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` steps, None when nobody knows how many; it ends the one before."""
        self.close()
        self._name, self._note, self._began = name, "", time.monotonic()

    def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
        """Say that `done` steps of the stage are done, of `total` now that it is known, and something short about it."""
        self._note = note or self._note

    def close(self) -> None:
        """End the stage that is going on."""
        if self._name:
            note = f": {self._note}" if self._note else ""
            self._stream.write(f"{self._name}{note} ({time.monotonic() - self._began:.1f} s)\n")
            self._stream.flush()
            self._name = ""


class _Bars(Progress):
    def __init__(self, stream: TextIO, rich: "RichProgress") -> None:
        super().__init__(stream)
        self._rich = rich

    def stage(self, name: str, total: float | None = None) -> None:
        self.close()
        self._rich.add_task(name, total=total, note="")

    def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
        fields = {"note": note} if note else {}
        self._rich.update(self._rich.task_ids[-1], completed=done, total=total, **fields)  # type: ignore[arg-type]

    def close(self) -> None:
        for task in self._rich.task_ids[-1:]:
            self._rich.update(task, total=1, completed=1)


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Progress]:
    """Show progress on `stream` while the block runs."""
    if not stream.isatty():
        lines = Progress(stream)
        yield lines
        lines.close()
        return
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
        bars = _Bars(stream, rich)
        yield bars
        bars.close()
