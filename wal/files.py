"""Files and directories of a node: only regular files, private under any umask, and durable once
the caller syncs them.

Assumes a POSIX file system: rename is atomic, fsync of a file makes its bytes durable, and fsync of
its directory makes its name durable. A directory has mode 0700 and a file 0600; with `for_group`
the group may read both. All functions block and raise `OSError`.
"""

import errno
import fcntl
import os
import re
import resource
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from wal.errors import (
    AlreadyOwned,
    Corrupt,
    InvalidArgument,
    Overloaded,
    StorageFailed,
    StreamingNodeError,
)

DIRECTORY_MODE = 0o700
GROUP_DIRECTORY_MODE = 0o750
FILE_MODE = 0o600
GROUP_FILE_MODE = 0o640

WRITE_BUFFER_BYTES = 1 << 20
"""Large enough to gather the small writes of Parquet page headers."""
READ_BYTES_MAX = 256 << 20
"""Larger than any file that is read as a whole, even a manifest of 500,000 files."""
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""The errors of opening a link, a directory, a socket and a device without a driver."""

# Matches URLs, also with the single slash that `Path` makes of two, and the socket of a node.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/", re.DOTALL)
_ADDRESS_OF_NODE = re.compile(r"unix:|(tcp|tls):/|(.*/)?node\.sock/*$", re.DOTALL)


def check_path(what: str, path: object) -> Path:
    """Return `path` as a `Path`; `what` names the argument in errors. Raises `InvalidArgument` for
    a value that cannot name a file or directory.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text or not _has_bytes(text):
        raise InvalidArgument(f"{path!r} names no {what} — give a path")
    if _ADDRESS_OF_NODE.match(text):
        raise InvalidArgument(
            f"{text!r} is an address — give a path on a disk of this machine, or connect to it"
        )
    if _ADDRESS.match(text):
        raise InvalidArgument(f"{text!r} is an address — give a path on a disk of this machine")
    return Path(text)


def _has_bytes(path: str) -> bool:
    """Whether the file system's encoding can represent a path; half of a surrogate pair usually
    cannot be.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; never waits and never follows a link.

    Raises `Corrupt` at once for anything else: a pipe would block for ever, a device may have side
    effects, and a link leads elsewhere.
    """
    try:
        # Non-blocking: a pipe without a writer opens at once and is refused below.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise not_regular(path) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise not_regular(path)


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading as `open_regular` does."""
    return open(path, "rb", opener=lambda name, flags: open_regular(Path(name), flags))


def read_regular(path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
    """Return the content of a file of at most `bytes_max` bytes.

    Raises `Corrupt` for a longer file before reading any of it, because a sparse file of any length
    is cheap to make. Also raises the errors of `open_regular`.
    """
    with open_binary(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > bytes_max:
            raise Corrupt(
                f"{path} has {size_bytes} bytes, at most {bytes_max} were written — restore it "
                "from a backup"
            )
        return file.read(bytes_max)


def place_beneath(root: Path, path: str) -> Path:
    """Return the place of `path` below `root`. Raises `Corrupt` when a directory on the way is a
    link, which leads elsewhere.
    """
    place = root
    *parents, name = path.split("/")
    for parent in parents:
        place /= parent
        if place.is_symlink():
            raise Corrupt(f"{place} is a link — put the directory that it leads to in its place")
    return place / name


def make_parents(directory: Path) -> None:
    """Make a directory and its parents with the modes of the umask; their names are durable on
    return.
    """
    if not directory.is_dir():
        make_parents(directory.parent)
        directory.mkdir(exist_ok=True)  # somebody else may make it in between
        sync_directory(directory.parent)


def make_directory(path: Path, *, for_group: bool = False) -> None:
    """Make a private directory unless it exists, with a durable name. Missing parents get the modes
    of the umask.
    """
    if not path.is_dir():
        make_parents(path.parent)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)  # somebody else may make it in between
        if for_group:
            path.chmod(GROUP_DIRECTORY_MODE)  # mkdir applies the umask
        sync_directory(path.parent)


def create_file(path: Path, *, for_group: bool = False, exclusive: bool = False) -> BinaryIO:
    """Open a file for writing from its start. An existing file is emptied; with `exclusive` it
    raises `FileExistsError`.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC)
    file = open(  # noqa: SIM115
        path,
        "wb",
        buffering=WRITE_BUFFER_BYTES,
        opener=lambda name, _: open_regular(Path(name), flags),
    )
    try:
        if for_group:
            os.fchmod(file.fileno(), GROUP_FILE_MODE)  # opening applies the umask
    except OSError:
        file.close()
        raise
    return file


def write_file(
    path: Path, content: bytes, *, for_group: bool = False, exclusive: bool = False
) -> None:
    """Write a file and sync its bytes; its name is durable after `sync_directory`."""
    with create_file(path, for_group=for_group, exclusive=exclusive) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Return when the bytes of a file are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file
"""Return when the names in a directory are durable."""


def set_group_access(top: Path, *, for_group: bool) -> None:
    """Give or take the group's access to a directory, if it exists, and everything below it.

    `top` changes last: after a crash midway the next call repeats the work, and the group gets in
    only when everything is open.
    """
    directory_mode = GROUP_DIRECTORY_MODE if for_group else DIRECTORY_MODE
    if not top.is_dir() or top.stat().st_mode & 0o777 == directory_mode:
        return
    file_mode = GROUP_FILE_MODE if for_group else FILE_MODE
    for path in top.rglob("*"):
        if not path.is_symlink():  # a link may lead anywhere
            path.chmod(directory_mode if path.is_dir() else file_mode)
    top.chmod(directory_mode)


def not_regular(path: Path) -> Corrupt:
    """Return the error for anything but a regular file in the place of a file."""
    return Corrupt(
        f"{path} is no regular file — remove what is there, and restore the file from a backup"
    )


def open_files_max() -> int | None:
    """Return the limit of open descriptors of this process, sockets included; None without a
    limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def no_descriptor_left(path: Path, error: object) -> Overloaded:
    """Return the error for work on `path` that got no descriptor; `error` is the error of the
    system.
    """
    return Overloaded(
        f"no file descriptor is left for {path}, this process may have "
        f"{open_files_max() or 'any number of'}: {error} — "
        "raise the limit (ulimit -n) or close files; an open node goes on by itself"
    )


@contextmanager
def disk_errors_typed(place: object) -> Iterator[None]:
    """Convert errors of the block, which reads at `place`: raise `StorageFailed` for an `OSError`,
    `Overloaded` for a `MemoryError`.
    """
    try:
        yield
    except (StreamingNodeError, BrokenPipeError):
        # `DeadlineExceeded` is a `TimeoutError` and so an `OSError`; a broken pipe is no disk error
        raise
    except MemoryError as error:
        raise Overloaded(
            f"{place}: it does not fit into memory — read less at a time, or give the process more"
        ) from error
    except OSError as error:
        raise StorageFailed(
            f"{error.filename or place}: {error.strerror or error} — check the path, its "
            "permissions and the disk"
        ) from error


LOCK_NAME = "node.lock"
BRIEF = " brief"
OWNER_S_MAX = 5.0
"""How long a service waits for a command to release its directory, and how long a command that has
released it waits for the service to take it.
"""

_held: dict[tuple[int, int], "DirectoryLock"] = {}
"""The locks of this process, by device and inode of the lock file. The pid in a file does not
identify the process: two containers that share a directory may both be process 1.
"""


class DirectoryLock:
    """Ownership of a directory until `release` or the end of the process. Raises `AlreadyOwned`,
    `StorageFailed`.

    An owner for a `brief` time writes that into the lock file, for processes that are kept out.
    """

    def __init__(self, directory: Path, *, brief: bool = False) -> None:
        with ExitStack() as opened:
            try:
                lock = open_regular(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
                opened.callback(os.close, lock)
                place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                opened.callback(os.close, place)
            except OSError as error:
                raise StorageFailed(
                    f"cannot open {error.filename}: {error.strerror} — make it writable for this "
                    "user"
                ) from error
            status = os.fstat(lock)
            identity = status.st_dev, status.st_ino
            # The lock file has the owner's pid, which others can read. Lock the directory itself,
            # too: a lock file can be unlinked and created again, and then two writers could both
            # acknowledge writes.
            for descriptor in (lock, place):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    own = identity in _held
                    # A process that holds only the directory's lock is a reader; the lock file then
                    # still names an earlier owner.
                    holder, is_brief = read_owner(lock) if descriptor == lock else (None, False)
                    raise AlreadyOwned(
                        str(directory), os.getpid() if own else holder, own=own, brief=is_brief
                    ) from error
            pid = f"{os.getpid()}{BRIEF * brief}\n".encode()
            # Overwrite the old pid: on a full disk an emptied file may not get a block again.
            os.pwrite(lock, pid, 0)
            os.ftruncate(lock, len(pid))
            opened.callback(self._unlock, lock, place, len(pid))
            opened.callback(_held.pop, identity, None)
            self._descriptors = (lock, place)
            self._held = opened.pop_all()
            _held[identity] = self

    @staticmethod
    def _unlock(lock: int, place: int, length: int) -> None:
        """Erase the pid, then unlock. A process that is refused before the next owner has written
        its pid then reads no stale pid.

        Closing the descriptors is not enough: a child process that another thread is starting holds
        copies until it executes its program.
        """
        with suppress(OSError):
            os.pwrite(lock, bytes(length), 0)
        for descriptor in (place, lock):
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def release(self) -> None:
        """Unlock; idempotent. In a forked child it does nothing."""
        self._held.close()

    def _leave(self) -> None:
        """Close the descriptors without unlocking: the lock belongs to the parent process."""
        self._held.pop_all()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _leave_in_child() -> None:
    for lock in list(_held.values()):
        lock._leave()  # noqa: SLF001 - the class is of this module
    _held.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def read_owner(lock: int) -> tuple[int | None, bool]:
    """Return the pid in an open lock file and whether its process owns the directory for a brief
    time.

    Returns (None, True) when the owner has not written its pid yet; it will do so soon.
    """
    pid, _, rest = os.pread(lock, 32, 0).decode("ascii", "replace").strip().partition(" ")
    return (int(pid), rest == BRIEF.strip()) if pid.isdecimal() else (None, True)
