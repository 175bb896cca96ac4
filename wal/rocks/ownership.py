"""One owner of a node directory: a lock held by this process, and a fencing token where locks fail.

Two locks are taken. The one on `node.lock` comes with the pid, where others can read it; the one on the directory itself
cannot be unlinked and made anew behind the owner's back, which would let two writers both acknowledge.

Where locks do not work, or the directory is replaced under its owner, the token tells: its latest owner's term and a random
number, in a sector of the floor file. Each opening writes its own before it opens the database for good, and the writer
compares before each batch and again before it acknowledges. An owner that finds another one is fenced. What it
acknowledged before was synced before the other token, so the other owner, who reads after writing it, has it.
"""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from wal.errors import AlreadyOwned, ChannelFenced, StorageFailed
from wal.files import open_regular
from wal.rocks.floor import FLOOR_NAME, TOKEN_BYTES, TOKEN_OFFSET, decode_token_term, encode_token

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


NONCE_BYTES = 16


class FencingToken:
    """The token of one opening of a node directory; `take` comes first. One thread at a time; `check` costs microseconds."""

    __slots__ = ("_descriptor", "_identity", "_mine", "_nonce", "_path", "term")

    def __init__(self, directory: Path) -> None:
        self.term = 0
        """The latest term taken; 0 before the first."""
        self._path = str(directory / FLOOR_NAME)
        self._descriptor = open_regular(directory / FLOOR_NAME, os.O_RDWR)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._identity = _identity(os.fstat(self._descriptor))
        self._mine = b""

    def take(self, term: int) -> None:
        """Write the token for `term`, durably. Raises `OSError`."""
        token = encode_token(term, self._nonce)
        os.pwrite(self._descriptor, token, TOKEN_OFFSET)
        self._mine = token  # not before: after a write that failed, the token on the disk is still the last one of ours
        self.term = term
        os.fsync(self._descriptor)

    def check(self) -> None:
        """Raise `ChannelFenced` when the token is another owner's, or another floor file is in the place of this one."""
        found = os.pread(self._descriptor, TOKEN_BYTES, TOKEN_OFFSET)
        if found != self._mine:
            raise ChannelFenced(
                f"{Path(self._path).parent} was taken over by another owner, of term {decode_token_term(found)} — "
                "stop one of the two: this one writes no more"
            )
        try:
            in_place = _identity(os.stat(self._path)) == self._identity  # noqa: PTH116 - twice for each batch of writes
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise ChannelFenced(
                f"{self._path} was replaced or removed under its owner — put the directory back, or open the new one again"
            )

    def close(self) -> None:
        """Close the file; idempotent. The token stays, so that a later owner's term is above it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
