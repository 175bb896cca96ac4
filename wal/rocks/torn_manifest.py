"""A manifest whose end a power cut tore: RocksDB was adding to it when power went, and had not gone by it yet.

RocksDB passes over a manifest that ends in the middle of a record, but refuses one whose last record has its full length and
not all of its pages. It syncs a manifest before it removes what that makes needless, so without the torn record the database
is the one before it. Were the record rot instead, files of that database would be gone or the floor would know more; so the
database is read without it first, beside the original, and nothing is cut off before that was found sound. Blocks.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wal.errors import Corrupt
from wal.files import DIRECTORY_MODE, read_regular, sync_directory
from wal.rocks.framing import torn_end

LOOK_ALIKE_SUFFIX = ".look.tmp"
_COPIED = ("CURRENT", "rocksdict-config.json")
"""Written in place by whoever opens a database, so never shared with the original."""
_LEFT_OUT = ("LOCK", "LOG")
_CURRENT_BYTES_MAX = 4096


def manifest_of(database: Path) -> Path:
    """Return the manifest that a database goes by. Raises `OSError`, `Corrupt`."""
    return database / read_regular(database / "CURRENT", bytes_max=_CURRENT_BYTES_MAX).decode().strip()


def has_torn_end(database: Path) -> bool:
    """Whether the manifest ends with something torn, and nothing whole behind it."""
    try:
        return torn_end(manifest_of(database)) is not None
    except (OSError, ValueError, Corrupt):  # CURRENT is gone, or names no file
        return False


@contextmanager
def without_torn_end(database: Path) -> Iterator[Path]:
    """Yield a database of the same files with a manifest that ends before what is torn; for reading, and gone afterwards.

    Its tables and logs are hard links. Raises `OSError`, as where there are no links. A kill leaves it to the next time.
    """
    look_alike, manifest = database.with_name(database.name + LOOK_ALIKE_SUFFIX), manifest_of(database)
    shutil.rmtree(look_alike, ignore_errors=True)
    look_alike.mkdir(DIRECTORY_MODE)
    try:
        for file in database.iterdir():
            if file.name in _COPIED:
                shutil.copyfile(file, look_alike / file.name)
            elif file != manifest and not file.name.startswith(_LEFT_OUT):
                (look_alike / file.name).hardlink_to(file)
        (look_alike / manifest.name).write_bytes(manifest.read_bytes()[: torn_end(manifest)])
        yield look_alike
    finally:
        shutil.rmtree(look_alike, ignore_errors=True)


def drop_torn_end(database: Path) -> None:
    """Cut a torn end off the manifest of a database that was found sound without it; durable. Raises `OSError`."""
    manifest = manifest_of(database)
    whole_bytes = torn_end(manifest)
    if whole_bytes is None:
        return
    with manifest.open("r+b") as file:
        file.truncate(whole_bytes)
        os.fsync(file.fileno())
    sync_directory(database)
