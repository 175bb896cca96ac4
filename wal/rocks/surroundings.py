"""What a store needs of the world beside its directory; tests bring their own."""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _new_node_id() -> str:
    return uuid.uuid4().hex


def free_bytes_of(path: Path) -> int:
    """Return how much this user may still write on the disk of `path`. Raises `OSError`."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`monotonic` is a clock in seconds, `free_bytes` the space left on the disk of a path; both are called in threads."""

    make_node_id: Callable[[], str] = _new_node_id
    monotonic: Callable[[], float] = time.monotonic
    free_bytes: Callable[[Path], int] = free_bytes_of
