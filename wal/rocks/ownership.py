"""One owner of a node directory: a lock held by this process, with its pid where others can read it.

Two locks are taken. The one on `node.lock` comes with the pid; the one on the directory itself cannot be unlinked and
made anew behind the owner's back, which would let two writers both acknowledge.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from wal.errors import AlreadyOwned, StorageFailed
from wal.files import open_regular

LOCK_NAME = "node.lock"
_PID_BYTES_MAX = 32


class DirectoryLock:
    """Ownership of a directory until `release` or the end of the process. Raises `AlreadyOwned`, `StorageFailed`."""

    __slots__ = ("_descriptors", "_identity")

    def __init__(self, directory: Path) -> None:
        self._descriptors: list[int] = []
        self._identity = (0, 0)
        try:
            self._take(directory)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go; idempotent. In a forked child this takes nothing from the parent but keeps its lock from outliving it."""
        if _held.get(self._identity) == os.getpid():
            del _held[self._identity]
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _take(self, directory: Path) -> None:
        lock = self._open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        self._lock(lock, directory, holder=lock)
        self._lock(self._open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), directory, holder=lock)
        self._identity = _identity_of(lock)
        _held[self._identity] = os.getpid()
        pid = f"{os.getpid()}\n".encode()
        os.pwrite(lock, pid, 0)  # over the old one: on a full disk an emptied file would get no block again
        os.ftruncate(lock, len(pid))

    def _open(self, path: Path, flags: int) -> int:
        try:
            descriptor = os.open(path, flags) if flags & os.O_DIRECTORY else open_regular(path, flags, mode=0o600)
        except OSError as error:
            raise StorageFailed(f"cannot open {path}: {error.strerror} — make it writable for this user") from error
        self._descriptors.append(descriptor)
        return descriptor

    @staticmethod
    def _lock(descriptor: int, directory: Path, *, holder: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            own = _held.get(_identity_of(holder)) == os.getpid()
            raise AlreadyOwned(str(directory), os.getpid() if own else _read_pid(holder), own=own) from error


_held: dict[tuple[int, int], int] = {}
"""The lock files held by this process, with its pid, which a forked child does not have. Pids in the files do not tell: two
containers that share a directory may both be process 1."""


def _identity_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _read_pid(descriptor: int) -> int | None:
    with contextlib.suppress(ValueError):
        return int(os.pread(descriptor, _PID_BYTES_MAX, 0))
    return None
