"""Copies of a directory that is in use: what a kill at that moment would leave."""

import contextlib
import shutil
from pathlib import Path


def copy_at_rest(source: Path, target: Path) -> None:
    """Copy a directory as of one moment: again, when RocksDB's background work changed it meanwhile."""
    while True:
        before = _files(source)
        try:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("node.sock"))
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
