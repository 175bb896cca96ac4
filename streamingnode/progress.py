"""Progress of long work on a terminal: one line for each stage, rewritten as it advances."""

from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Progress:
    """Shows the stage of long work in a block, and ends the line of each stage with its duration.

    It writes only to a terminal: cron would mail any other output.
    """

    def __init__(self, stream: TextIO) -> None:
        self._bars = _bars(stream) if stream.isatty() else None
        self._stage: TaskID | None = None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bars is not None:
            self._end()
            self._bars.stop()

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage of `total` steps (None if unknown), and end the previous one."""
        if self._bars is not None:
            self._end()
            self._stage = self._bars.add_task(name, total=total, note="")

    def advance(self, done: float, note: str = "", *, total: float | None = None) -> None:
        """Show that `done` steps of the stage are done, with a short note; `total` sets the number
        of steps.
        """
        if self._bars is not None and self._stage is not None:
            self._bars.update(self._stage, completed=done, total=total, note=note)

    def _end(self) -> None:
        if self._bars is not None and self._stage is not None:
            self._bars.stop_task(self._stage)


def _bars(stream: TextIO) -> "Bars":
    """Return the bars of rich, which takes 0.1 s to load."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    name = TextColumn("{task.description}", markup=False)
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (name, BarColumn(), TaskProgressColumn(), note, TimeElapsedColumn())
    return Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
