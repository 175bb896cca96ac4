"""One ingest at a time for each table name in a directory, on one machine; waits, and ends with its process.

Correctness does not rest on it: the commit is conditional. It saves the work a losing job would throw away, and it keeps a
job from committing into a directory that another is renaming.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = ".locks"


@contextmanager
def table_lock(tables: Path, name: str) -> Iterator[None]:
    """Hold the lock of a table name; blocks until it is free."""
    folder = tables / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
