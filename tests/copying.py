"""Copies of a directory that is in use: what a kill at that moment would leave."""

import contextlib
import shutil
from pathlib import Path

without_socket = shutil.ignore_patterns("node.sock")
"""What `shutil.copytree` is to leave out: a socket cannot be copied, and whoever opens the copy
makes its own.
"""


def copy_at_rest(source: Path, target: Path) -> None:
    """Copy a directory as of one moment: again, when RocksDB's background work changed it
    meanwhile.
    """
    while True:
        before = _files(source)
        try:
            shutil.copytree(source, target, ignore=without_socket)
        except shutil.Error:
            if _files(source) == before:
                raise
        else:
            if _files(source) == before:
                return
        shutil.rmtree(target)


def _files(directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in sorted(directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found
