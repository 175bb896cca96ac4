"""Files and directories of a node: private whatever the umask, and durable when the caller syncs them.

Assumes what POSIX file systems give: rename is atomic, fsync of a file keeps its bytes, and fsync of its directory its name.
A directory is 0700 and a file 0600; with `for_group` the group may read both. All of it blocks, and raises `OSError`.
"""

import os
from pathlib import Path
from typing import BinaryIO

from wal.failpoint import failpoint

DIRECTORY_MODE, GROUP_DIRECTORY_MODE = 0o700, 0o750
FILE_MODE, GROUP_FILE_MODE = 0o600, 0o640

WRITE_BUFFER_BYTES = 1 << 20
"""Gathers the many small writes of a Parquet file's headers between its pages."""


def make_directory(path: Path, *, for_group: bool = False) -> bool:
    """Make a directory unless it is there, and make its name durable; return whether it was made.

    What is missing above it is made as the umask says. One that is there stays as it is.
    """
    if path.is_dir():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise
        return False  # somebody else has made it in between
    if for_group:
        path.chmod(GROUP_DIRECTORY_MODE)  # mkdir leaves out what the umask forbids
    sync_directory(path.parent)
    return True


def create_file(path: Path, *, for_group: bool = False, exclusive: bool = False) -> BinaryIO:
    """Open a file for writing from its start; one of that name is emptied, or with `exclusive` a `FileExistsError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if exclusive else os.O_TRUNC)
    file = open(path, "wb", buffering=WRITE_BUFFER_BYTES, opener=lambda name, _: os.open(name, flags, FILE_MODE))  # noqa: SIM115
    try:
        if for_group:
            os.fchmod(file.fileno(), GROUP_FILE_MODE)  # opening leaves out what the umask forbids
    except OSError:
        file.close()
        raise
    return file


def write_file(path: Path, content: bytes, *, for_group: bool = False, exclusive: bool = False) -> None:
    """Write a file and sync its bytes; its name is durable after `sync_directory`."""
    with create_file(path, for_group=for_group, exclusive=exclusive) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, content: bytes) -> None:
    """Replace `path` by `content`: after a crash it holds either the old or the new content, whole.

    The group may read it where it may read the directory: whoever opened that to another user means what is in it.
    """
    building = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_file(building, content, for_group=bool(path.parent.stat().st_mode & 0o040))
    failpoint("ingest.lease_written")
    building.replace(path)
    failpoint("ingest.lease_renamed")
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_group_access(top: Path, *, for_group: bool) -> bool:
    """Give or take the group's access to a directory and everything below it; return whether something had to change.

    `top` comes last, so that a crash on the way is followed by another try, and nobody gets in before all of it is open.
    """
    directory_mode = GROUP_DIRECTORY_MODE if for_group else DIRECTORY_MODE
    if not top.is_dir() or top.stat().st_mode & 0o777 == directory_mode:
        return False
    file_mode = GROUP_FILE_MODE if for_group else FILE_MODE
    for parent, directories, names in os.walk(top):
        for name, mode in (*((name, file_mode) for name in names), *((name, directory_mode) for name in directories)):
            path = Path(parent, name)
            if not path.is_symlink():  # it may lead anywhere
                path.chmod(mode)
    top.chmod(directory_mode)
    return True
