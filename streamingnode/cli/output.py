"""The output of a command: text for people, JSON for machines, errors and progress on stderr."""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import IOBase, StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from wal.errors import InvalidArgument, StreamingNodeError, escaped
from wal.files import disk_errors_typed
from wal.timetick import physical_ms

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from streamingnode.care.findings import Report

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it for `cat`

_WIDTH_OF_A_FILE = 1_000_000
"""Width of output that does not go to a terminal: lines are not wrapped."""

_TERMINAL = re.compile("[\x7f-\x9f\u2028\u2029]")
"""Characters that JSON does not escape, but that a terminal or a line splitter may interpret."""


class Output:
    """Where a command prints.

    `as_json` makes `document` the only thing on stdout; `debug` shows the traceback of an error.
    """

    debug = False

    def __init__(
        self, *, as_json: bool = False, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.as_json = as_json
        # If the program was started with its output closed, the stream is None and the output is
        # discarded.
        self.stdout = stdout or sys.stdout or _nowhere()
        self.stderr = stderr or sys.stderr or _nowhere()
        # independent of the locale: JSON is UTF-8, and a dash must not end the program with an
        # error
        if isinstance(self.stdout, TextIOWrapper):
            encoding, errors = (
                (None, "backslashreplace") if self.stdout.isatty() else ("utf-8", None)
            )
            self.stdout.reconfigure(encoding=encoding, errors=errors)

    def line(self, text: str = "") -> None:
        """Print a line for people; nothing with `--json`. Bytes of a name or path that are not text
        are escaped.
        """
        if not self.as_json:
            self.write(f"{escaped(text)}\n")

    def _console(self, file: TextIO) -> "Console":
        """Return a console for layout: as wide as the terminal, for a file as wide as needed."""
        from rich.console import Console

        is_terminal = self.stdout.isatty()
        return Console(
            file=file,
            force_terminal=is_terminal,
            width=None if is_terminal else _WIDTH_OF_A_FILE,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def _lay_out(self, *parts: "RenderableType") -> None:
        # a console that prints would end the program when the reader of a pipe is gone
        text = StringIO()
        self._console(text).print(*parts, sep="\n")
        for line in text.getvalue().rstrip("\n").split("\n"):
            self.write(f"{line.rstrip()}\n")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print aligned columns for people."""
        if not self.as_json:
            self._lay_out(_table(columns, rows))

    def records(self, records: Sequence[Mapping[str, object]]) -> None:
        """Print a table of records with the same names for people: text unchanged, other values as
        JSON.
        """
        if records and not self.as_json:
            self._lay_out(_table_of(records))

    def listing(self, name: str, records: Sequence[Any], **more: object) -> None:
        """Print records; with `--json` a document with the list `name` and the fields `more`."""
        self.records(list(map(fields_of, records)))
        if not records:
            self.line(f"no {name}")
        self.document({**more, name: records})

    def result(self, text: str, document: object) -> None:
        """Print a line for people, or a document for machines."""
        self.line(text)
        self.document(document)

    def change(self, done: str, what: str, document: object, *, dry_run: bool = False) -> None:
        """Print a change that was made, or with `dry_run` would be made."""
        would = "would be " if dry_run else ""
        self.result(f"{would}{done}: {what}", {done: not dry_run, **fields_of(document)})

    def fields(self, fields: Mapping[str, object]) -> None:
        """Print one line for each field for people, values aligned."""
        if fields and not self.as_json:
            self._lay_out(_grid(fields))

    def findings(self, report: "Report") -> None:
        """Print findings for people, the worst last, where it is seen first."""
        for finding in sorted(
            report.findings, key=lambda finding: finding.severity.value, reverse=True
        ):
            self.line(f"{finding.severity.value}: {finding.place}: {finding.detail}")
            self.line(f"        {finding.next_step}")

    def show(self, document: Mapping[str, object], only: Container[str] | None = None) -> None:
        """Print a document: for people one line for each value, under its name in JSON, and lists
        as tables.

        With `only`, people get just these names, and of them those with a value.
        """
        if not self.as_json:
            self._lay_out(*_parts(document, only))
        self.document(document)

    @contextmanager
    def live(self) -> Iterator[Callable[[Mapping[str, object]], None]]:
        """Yield a function that shows a document: on a terminal it replaces the previous one,
        elsewhere it follows.
        """
        if self.as_json or not self.stdout.isatty():
            yield self._show_now
            return
        from rich.console import Group
        from rich.live import Live

        with Live(console=self._console(self.stdout), auto_refresh=False) as screen:
            yield lambda document: screen.update(Group(*_parts(document, None)), refresh=True)

    def _show_now(self, document: Mapping[str, object]) -> None:
        self.show(document)
        self.flush()

    def document(self, value: object) -> None:
        """Print one JSON document when `--json` was given; nothing otherwise."""
        if self.as_json:
            self.write(f"{to_json(value)}\n")

    def write(self, text: str) -> None:
        """Print text unchanged. Raises `BrokenPipeError` when the reader is gone, `StorageFailed`
        when the output cannot be written.
        """
        with disk_errors_typed("the output"):
            self.stdout.write(text)

    def binary(self) -> IOBase:
        """Return the binary output stream. Raises `InvalidArgument` for a terminal."""
        if self.stdout.isatty():
            raise InvalidArgument("a terminal cannot show Arrow — redirect it to a file or a pipe")
        return cast(IOBase, self.stdout.buffer)

    def note(self, text: str) -> None:
        """Print a note for people, which is not part of the result, on stderr."""
        with suppress(OSError):  # without stderr the exit code still shows the outcome
            self.stderr.write(f"{escaped(text)}\n")
            self.stderr.flush()

    def error(self, error: StreamingNodeError) -> None:
        """Print `code: message — next step` on stderr, and the same as a document with `--json`."""
        self.flush()
        if self.debug:
            for each in "".join(traceback.format_exception(error)).splitlines():
                self.note(each)
        self.note(f"{error.code}: {error}")
        # The error's typed fields never replace the other three.
        document = {
            **error.fields(),
            "code": error.code,
            "message": str(error),
            "retryable": error.retryable,
        }
        self.document({"error": document})
        self.flush()

    def flush(self) -> None:
        """Flush the output. Raises as `write` does."""
        with disk_errors_typed("the output"):
            self.stdout.flush()

    def hang_up(self) -> None:
        """Discard the buffered output after the reader is gone, so that the interpreter's exit
        raises no error.
        """
        with _nowhere() as nowhere:
            os.dup2(nowhere.fileno(), self.stdout.fileno())


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def fields_of(record: Any) -> Mapping[str, object]:
    """Return the fields of a mapping or struct by name."""
    from msgspec.structs import asdict

    return record if isinstance(record, Mapping) else asdict(record)


def _flat(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of a document and its nested documents, under names such as
    `cuts.newest`.
    """
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parts(
    document: Mapping[str, object], only: Container[str] | None
) -> "Iterator[RenderableType]":
    """Yield the values of a document, then its lists as tables, under their names in JSON."""
    import msgspec

    lines = dict[str, object]()
    tables = dict[str, Sequence[Mapping[str, object]]]()
    for name, value in _flat(msgspec.to_builtins(document, enc_hook=str)):
        is_nothing = value == "-" or not (value or value is False)
        if only is not None and (name not in only or is_nothing):
            continue
        if value and isinstance(value, list | tuple) and isinstance(value[0], dict):
            tables[name] = value
        else:
            lines[name] = value
    yield _grid(lines)
    for name, records in tables.items():
        yield f"\n{name}:"
        yield _table_of(records)


def _grid(fields: Mapping[str, object]) -> "Table":
    """Return a grid with one line for each field."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, value in fields.items():
        grid.add_row(name, escaped(_cell(value)))
    return grid


def _table_of(records: Sequence[Mapping[str, object]]) -> "Table":
    """Return a table of records with the same names."""
    return _table(list(records[0]), [list(map(_cell, each.values())) for each in records])


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escaped(str(cell)) for cell in row))
    return table


def _cell(value: object) -> str:
    return value if isinstance(value, str) else to_json(value)


def to_json(value: object) -> str:
    """Return one line of JSON; times in ISO 8601, bytes in base64, paths and other values as
    text.
    """
    import msgspec

    try:
        text = msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:  # a path whose bytes are not text
        return json.dumps(msgspec.to_builtins(value, enc_hook=str))
    return _TERMINAL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def format_bytes(count: float) -> str:
    """Return a size such as `12.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_tick(tick: int) -> str:
    """Return the UTC time a tick carries, as in `2026-11-21T00:33:21.582Z`; `-` for no tick."""
    if not tick:
        return "-"
    at = datetime.fromtimestamp(physical_ms(tick) / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def format_count(count: int, thing: str) -> str:
    """Return `1 row` or `2 rows`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
