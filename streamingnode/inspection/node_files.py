"""What a node directory says about itself to somebody who does not own it: files are read, nothing is opened or changed.

In: a directory. Out: who owns it, what the floor file, cuts and leases say, how much disk each part takes. A running node
goes on meanwhile, so two answers may be of two moments. Everything here blocks.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flusher.cut_log import CutLog
from flusher.retention import LEASE_BYTES_MAX
from spark_sink.commit import Lease
from wal.errors import AlreadyOwned, Corrupt, InvalidArgument, StorageFailed
from wal.files import LOCK_NAME, open_regular, read_regular
from wal.rocks.floor import FLOOR_NAME, read_floor
from wal.rocks.layout import DATABASE_NAME

PARTS = ("log", "segments", "deletes", "cuts", "leases")


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a node open; `pid` is None when it did not say."""

    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles:
    """A node directory as its files tell it.

    `term` and `tick` are the last that were made durable; `positions` are the last durable ones by log id.
    """

    directory: Path
    holder: Holder | None
    node_id: str
    term: int
    tick: int
    positions: dict[int, int]
    cuts: CutLog
    leases: tuple[Lease, ...]
    disk_bytes: dict[str, int]


def check_node(directory: Path) -> Path:
    """Return `directory` if it holds a node. Raises `InvalidArgument`; a name mistyped must not make a new node."""
    if not is_node(directory):
        raise InvalidArgument(f"{directory} {_what_it_is(directory)} — name the directory a node was opened with")
    return directory


def _what_it_is(path: Path) -> str:
    if path.is_dir():
        return "is no node directory"
    return "is a file" if path.exists() else "does not exist"


def is_node(directory: Path) -> bool:
    """Whether the directory holds a node."""
    return (directory / FLOOR_NAME).is_file() or (directory / DATABASE_NAME / "CURRENT").is_file()


def read_node_files(directory: Path) -> NodeFiles:
    """Return what the files in a node directory say.

    Raises `InvalidArgument` when it is none, `Corrupt` or `UnsupportedFormat` as its files are, `StorageFailed` when they
    cannot be read.
    """
    check_node(directory)
    try:
        floor = read_floor(directory)
        if floor is None:
            raise Corrupt(f"{directory} has a database and no floor file — restore it from a backup")
        return NodeFiles(
            directory=directory,
            holder=holder(directory),
            node_id=floor.node_id,
            term=floor.term,
            tick=floor.tick,
            positions=dict(floor.positions),
            cuts=CutLog(directory),
            leases=read_leases(directory),
            disk_bytes={part: _bytes_under(directory / part) for part in PARTS},
        )
    except OSError as error:
        raise StorageFailed(f"cannot read {directory}: {error.strerror} — make it readable for this user") from error


def holder(directory: Path) -> Holder | None:
    """Return the process that owns a node, None when nobody does.

    The question takes the lock for some microseconds, shared; an opener in just that moment is refused and may try again.
    """
    with suppress(FileNotFoundError):
        descriptor = open_regular(directory / LOCK_NAME)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Holder(_pid(os.pread(descriptor, 32, 0)))
        finally:
            os.close(descriptor)
    return None


def check_free(directory: Path) -> None:
    """Return if nobody owns the node. Raises `AlreadyOwned`."""
    if (owner := holder(directory)) is not None:
        raise AlreadyOwned(str(directory), owner.pid)


@contextmanager
def kept_closed(directory: Path) -> Iterator[None]:
    """Keep a node from being opened while the block reads it; changes nothing, not even the pid in its lock file.

    Raises `AlreadyOwned`.
    """
    check_free(directory)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an owner has the directory locked as well
        except BlockingIOError:
            raise AlreadyOwned(str(directory), None) from None
        yield
    finally:
        os.close(descriptor)


def read_leases(directory: Path) -> tuple[Lease, ...]:
    """Return the leases of the tables fed from a node, by table; a file that is none is left out."""
    leases = []
    for path in sorted((directory / "leases").glob("*.json")):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, FileNotFoundError, Corrupt):
            leases.append(msgspec.json.decode(read_regular(path, bytes_max=LEASE_BYTES_MAX), type=Lease))
    return tuple(leases)


def _pid(text: bytes) -> int | None:
    with suppress(ValueError):
        return int(text)
    return None


def _bytes_under(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # a running node removes files
                total += (Path(parent) / name).lstat().st_size
    return total
