"""Files and directories of a node: regular files only, private whatever the umask, durable when the
caller syncs them.

Assumes what POSIX file systems give: rename is atomic, fsync of a file keeps its bytes, and fsync
of its directory its name. A directory is 0700 and a file 0600; with `for_group` the group may read
both. All of it blocks and raises `OSError`.
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
"""Gathers the many small writes of a Parquet file's headers between its pages."""
READ_BYTES_MAX = 256 << 20
"""More than anything has that is read as a whole, a manifest of 500,000 files included."""
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""What opening says of a link, a directory, a socket and a device without its driver."""

# Also with the one slash that a `Path` makes of two; and the socket of a node.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/", re.DOTALL)
_ADDRESS_OF_NODE = re.compile(r"unix:|(tcp|tls):/|(.*/)?node\.sock/*$", re.DOTALL)


def check_path(what: str, path: object) -> Path:
    """Return the path given as `what`. Raises `InvalidArgument` for what can name no file or
    directory.
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
    """Whether a path can be what a file system has: half of a surrogate pair mostly cannot."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file and return its descriptor, without waiting and without following a link in its
    place.

    Raises `Corrupt` for what is no regular file, at once: a pipe would make an opener wait for
    ever, a device may do anything, a link leads somewhere else.
    """
    try:
        # Non-blocking: a pipe that nobody writes to opens, and is refused below.
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
    """Return the content of a file that is at most so long.

    Raises `Corrupt` for a longer one before any of it is read, since one of holes costs nothing to
    make, and as `open_regular`.
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
    """Return where `path` is below `root`. Raises `Corrupt` when a directory on the way is a link:
    it leads elsewhere.
    """
    place = root
    *parents, name = path.split("/")
    for parent in parents:
        place /= parent
        if place.is_symlink():
            raise Corrupt(f"{place} is a link — put the directory that it leads to in its place")
    return place / name


def make_parents(directory: Path) -> None:
    """Make a directory of the user's, and those above it, as the umask says; their names are on
    disk on return.
    """
    if not directory.is_dir():
        make_parents(directory.parent)
        directory.mkdir(exist_ok=True)  # somebody else may make it in between
        sync_directory(directory.parent)


def make_directory(path: Path, *, for_group: bool = False) -> None:
    """Make a directory unless it is there, and make its name durable; what is missing above it as
    the umask says.
    """
    if not path.is_dir():
        make_parents(path.parent)
        path.mkdir(DIRECTORY_MODE, exist_ok=True)  # somebody else may make it in between
        if for_group:
            path.chmod(GROUP_DIRECTORY_MODE)  # mkdir leaves out what the umask forbids
        sync_directory(path.parent)


def create_file(path: Path, *, for_group: bool = False, exclusive: bool = False) -> BinaryIO:
    """Open a file for writing from its start; one of that name is emptied, or with `exclusive` a
    `FileExistsError`.
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
            os.fchmod(file.fileno(), GROUP_FILE_MODE)  # opening leaves out what the umask forbids
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
    """Return when the bytes of a file are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file
"""Return when the names in a directory are on disk."""


def set_group_access(top: Path, *, for_group: bool) -> None:
    """Give or take the group's access to a directory, if there is one, and everything below it.

    `top` comes last, so that a crash on the way is followed by another try, and nobody gets in
    before all of it is open.
    """
    directory_mode = GROUP_DIRECTORY_MODE if for_group else DIRECTORY_MODE
    if not top.is_dir() or top.stat().st_mode & 0o777 == directory_mode:
        return
    file_mode = GROUP_FILE_MODE if for_group else FILE_MODE
    for path in top.rglob("*"):
        if not path.is_symlink():  # it may lead anywhere
            path.chmod(directory_mode if path.is_dir() else file_mode)
    top.chmod(directory_mode)


def not_regular(path: Path) -> Corrupt:
    """Return the error for something else in the place of a file."""
    return Corrupt(
        f"{path} is no regular file — remove what is there, and restore the file from a backup"
    )


def open_files_max() -> int | None:
    """Return how many descriptors this process may have, sockets included; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def no_descriptor_left(path: Path, error: object) -> Overloaded:
    """Return the error for work on `path` that found no descriptor; `error` is what the system
    said.
    """
    return Overloaded(
        f"no file descriptor is left for {path}, this process may have "
        f"{open_files_max() or 'any number of'}: {error} — "
        "raise the limit (ulimit -n) or close files; an open node goes on by itself"
    )


@contextmanager
def disk_errors_typed(place: object) -> Iterator[None]:
    """Raise `StorageFailed` for an `OSError` of the block, which reads at `place`, `Overloaded` for
    want of memory.
    """
    try:
        yield
    except (StreamingNodeError, BrokenPipeError):
        # `DeadlineExceeded` is an `OSError` too, by way of `TimeoutError`; a pipe is on no disk
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
"""How long a service waits for a command to let go of its directory, and a command that did for the
service to take it.
"""

_held: dict[tuple[int, int], "DirectoryLock"] = {}
"""The locks of this process, by their files. Pids in the files do not tell: two containers that
share a directory may both be process 1."""


class DirectoryLock:
    """Ownership of a directory until `release` or the end of the process. Raises `AlreadyOwned`,
    `StorageFailed`.

    Who has it for a `brief` time says so to those it keeps out.
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
            # The lock file has the pid, where others can read it. The directory itself is locked,
            # too: it cannot be unlinked and made anew behind the owner's back, which would let two
            # writers both acknowledge.
            for descriptor in (lock, place):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    own = identity in _held
                    # Who has only the directory reads it, and the lock file still names an owner
                    # before that.
                    holder, is_brief = read_owner(lock) if descriptor == lock else (None, False)
                    raise AlreadyOwned(
                        str(directory), os.getpid() if own else holder, own=own, brief=is_brief
                    ) from error
            pid = f"{os.getpid()}{BRIEF * brief}\n".encode()
            # it goes over the old one: on a full disk an emptied file would get no block again
            os.pwrite(lock, pid, 0)
            os.ftruncate(lock, len(pid))
            opened.callback(self._unlock, lock, place, len(pid))
            opened.callback(_held.pop, identity, None)
            self._descriptors = (lock, place)
            self._held = opened.pop_all()
            _held[identity] = self

    @staticmethod
    def _unlock(lock: int, place: int, length: int) -> None:
        """Take the pid out, so that who is refused before the next owner's is in does not take it
        for that one's; unlock.

        Closing is not enough: a process that another thread is just starting has the descriptors
        until it runs its program.
        """
        with suppress(OSError):
            os.pwrite(lock, bytes(length), 0)
        for descriptor in (place, lock):
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def release(self) -> None:
        """Unlock; idempotent. In a forked child it does nothing."""
        self._held.close()

    def _leave(self) -> None:
        """Close the descriptors without unlocking: the lock is the parent's, and ends with it."""
        self._held.pop_all()
        for descriptor in self._descriptors:
            os.close(descriptor)


def _leave_in_child() -> None:
    for lock in list(_held.values()):
        lock._leave()  # noqa: SLF001 - of this class
    _held.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def read_owner(lock: int) -> tuple[int | None, bool]:
    """Return the pid in an open lock file and whether its process has the directory for a brief
    time.

    None, and true, of an owner that is about to write it: who that is shows soon.
    """
    pid, _, rest = os.pread(lock, 32, 0).decode("ascii", "replace").strip().partition(" ")
    return (int(pid), rest == BRIEF.strip()) if pid.isdecimal() else (None, True)
