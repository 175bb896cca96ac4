"""A whole database on its way to the place of a damaged one: what a crash in between leaves, and how it is finished.

In: a directory whose lock the caller holds. A repair builds the new database under a temporary name, checks it, gives it
the name of a replacement, moves the damaged one away, and lets the replacement take its place. So a replacement beside a
database is of a repair that did not come that far, and counts for nothing; one without is whole, checked and accepted, and
whoever comes next, the node or another repair, puts it in place: one rename. Blocks.
"""

from pathlib import Path

from wal.files import sync_directory
from wal.rocks.layout import DATABASE_NAME

REPLACEMENT_NAME = f"{DATABASE_NAME}.repaired"


def database_path(directory: Path) -> Path:
    """Return where the database of a node directory is now: in its place, or about to be put there."""
    database, replacement = directory / DATABASE_NAME, directory / REPLACEMENT_NAME
    return replacement if replacement.is_dir() and not database.exists() else database


def finish_replacement(directory: Path) -> bool:
    """Put a replacement whose predecessor was moved away in its place, durably; return whether there was one."""
    found = database_path(directory)
    if found.name != REPLACEMENT_NAME:
        return False
    found.rename(directory / DATABASE_NAME)
    sync_directory(directory)
    return True
