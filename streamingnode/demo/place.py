"""The directory a demo works in: its own from an earlier run is replaced, anything else is left alone.

A marker file says that a demo made the directory. Only what a demo makes is removed, so that a note somebody left beside it
stays; a node that a process has open is never touched.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from streamingnode.care.inspect import check_free
from wal.errors import InvalidArgument, StorageFailed

MARKER = ".streamingnode-demo"
_MARKER_TEXT = "`streamingnode demo` made this directory and replaces node, tables and report.png at its next run.\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a demo keeps what it makes."""

    directory: Path

    @property
    def node(self) -> Path:
        """The node."""
        return self.directory / "node"

    @property
    def tables(self) -> Path:
        """The tables, one directory for each collection."""
        return self.directory / "tables"

    @property
    def picture(self) -> Path:
        """The picture."""
        return self.directory / "report.png"


def claim(directory: Path) -> Place:
    """Return an empty place at `directory`, made if it is missing, cleared if a demo made it.

    Raises `InvalidArgument` when it holds anything else, `AlreadyOwned` while a process has the old node open,
    `StorageFailed` when it cannot be written.
    """
    place = Place(directory)
    try:
        if (directory / MARKER).is_file():
            check_free(place.node)
            _clear(place)
        elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise InvalidArgument(f"{directory} is there and no demo made it — move it, or choose another with --dir")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MARKER).write_text(_MARKER_TEXT, "utf-8")
    except OSError as error:
        raise StorageFailed(f"cannot write {directory}: {error.strerror} — choose another with --dir") from error
    return place


def _clear(place: Place) -> None:
    for part in (place.node, place.tables):
        if part.is_dir():
            shutil.rmtree(part)
    place.picture.unlink(missing_ok=True)
