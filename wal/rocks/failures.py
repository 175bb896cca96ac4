"""What exceptions of RocksDB, of the disk and of a full memory mean for a caller.

Those of RocksDB are bare `Exception`s with a text, and this is the only place that reads it. Tests hold the exact texts, so
that a release which words them differently is noticed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wal.errors import AlreadyOwned, Corrupt, OnShutdown, Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.files import no_descriptor_left
from wal.rocks.space import REPLAY_BYTES
from wal.rocks.space_watch import free_bytes_of, log_bytes

_LOCK_HELD = ("While lock file", "lock hold by current process")
_CORRUPT = ("Corruption:", "No such file or directory", "create_if_missing is false")
_READ_ONLY = ("Read-only file system", "Permission denied")
_FULL = ("No space left on device",)
_NO_DESCRIPTOR = ("Too many open files",)
_CLOSED = ("DB instance already closed", "DB already closed")


def classify_failure(error: Exception, path: Path) -> StreamingNodeError:
    """Return what a failed call on the database at `path` means for the caller, except a write: its outcome is open."""
    text = str(error)
    if _has(text, _LOCK_HELD):
        return AlreadyOwned(str(path), None)
    if _has(text, _CLOSED) or type(error).__name__ == "DbClosedError":
        return OnShutdown(f"the database at {path} is closed")
    if _has(text, _FULL):
        return disk_full(path)
    if _has(text, _NO_DESCRIPTOR):
        return no_descriptor_left(path, error)
    if _has(text, _READ_ONLY):
        return StorageFailed(f"{path} cannot be written — make it writable for this user: {text}")
    if _has(text, _CORRUPT):
        return Corrupt(
            f"the database at {path} is damaged: {text} — restore the node from a backup, "
            "or take out what can be read: streamingnode export DIR OUT --salvage"
        )
    return StorageFailed(f"the database at {path} failed — check the disk and the system log: {text}")


@contextmanager
def disk_errors_typed(place: object) -> Iterator[None]:
    """Raise `StorageFailed` for an `OSError` of the block, which reads at `place`, `Overloaded` for want of memory."""
    try:
        yield
    except StreamingNodeError:
        raise  # `DeadlineExceeded` is an `OSError` too, by way of `TimeoutError`
    except MemoryError as error:
        raise Overloaded(
            f"{place}: it does not fit into memory — read less at a time, or give the process more"
        ) from error
    except OSError as error:
        raise StorageFailed(
            f"{error.filename or place}: {error.strerror or error} — check the path, its permissions and the disk"
        ) from error


def disk_full(path: Path) -> StorageFull:
    """Return the error for a database that found no room: with what is free, and the least that a start has to write."""
    try:
        free_bytes = free_bytes_of(path)
    except OSError:  # not made yet
        free_bytes = 0
    return StorageFull(str(path), free_bytes, max(log_bytes(path) + REPLAY_BYTES, free_bytes + REPLAY_BYTES))


def _has(text: str, patterns: tuple[str, ...]) -> bool:
    return any(pattern in text for pattern in patterns)
