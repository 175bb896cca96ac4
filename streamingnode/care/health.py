"""Whether a machine, an installation and a node directory are fit: each check is one `Finding`, in plain words. Blocks.

What is measured is measured here and now; one temporary file is written where the node would write.
"""

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import google_crc32c

from spark_sink.errors import JavaNotFound, install
from streamingnode.care.inspect import holder, is_node, read_node_files
from streamingnode.ownership import assert_sole_owner
from wal.errors import StreamingNodeError
from wal.rocks.layout import DATABASE_NAME, RocksOptions
from wal.rocks.opening import BACKUP_RECORD_NAME
from wal.timetick import AHEAD_MS_MAX, physical_ms

PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 14)

REQUIRED = ("anyio", "google_crc32c", "msgspec", "numpy", "pyarrow", "rich", "rocksdict", "structlog")
OPTIONAL = {"pyspark": "spark", "deltalake": "tables", "psutil": "demo", "matplotlib": "demo", "uvloop": "speed"}

FSYNCS = 50
FSYNC_SLOW_S = 0.010
"""Slower than this, a single client waits for little but the disk: network disks, cheap SSDs."""

FILES_MIN = 1_024
"""RocksDB keeps up to a few hundred files open, clients one each."""

FREE_BYTES_COMFORT = 4 << 30
"""Less leaves little between the first warning and the point at which appends are refused."""

_PARTS_WITHOUT_LOG = frozenset({"cuts", "segments", "deletes"})
"""What only a node makes; beside no log, the log is lost."""

_COMPILE = (
    "use a platform it has wheels for, or install the crc32c library with its headers and a C compiler, then run: "
    "pip install --force-reinstall --no-cache-dir google-crc32c"
)


class Status(Enum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `next_step` is empty when all is well."""

    status: Status
    subject: str
    detail: str
    next_step: str = ""


def examine(directory: Path | None) -> Iterator[Finding]:
    """Yield what there is to say about this machine and installation, and about `directory` when it is given."""
    yield _python()
    yield _packages()
    yield _checksums()
    yield from _extras()
    yield _roots()
    yield _java()
    yield _files()
    path = (directory or Path.cwd()).absolute()
    place = next(each for each in (path, *path.parents) if each.is_dir())
    yield _space(place)
    yield _fsync(place)
    if directory is not None:
        yield from _node(directory)


def _python() -> Finding:
    running = sys.version_info[:2]
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if not PYTHON_MIN <= running <= PYTHON_MAX:
        return Finding(Status.FAIL, "python", text, "use Python 3.11 to 3.14")
    return Finding(Status.OK, "python", text)


def _packages() -> Finding:
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        return Finding(Status.FAIL, "packages", f"missing: {', '.join(missing)}", "in a checkout run: pip install .")
    return Finding(Status.OK, "packages", ", ".join(f"{name} {_version(name)}" for name in REQUIRED))


def _checksums() -> Finding:
    if (kind := google_crc32c.implementation) == "c":
        return Finding(Status.OK, "checksums", "google-crc32c with its C extension")
    text = f"google-crc32c runs in {kind} alone, without its C extension: about 2 MB/s"
    return Finding(Status.WARN, "checksums", text, _COMPILE)


def _extras() -> Iterator[Finding]:
    for name, extra in OPTIONAL.items():
        if find_spec(name) is not None:
            yield Finding(Status.OK, name, _version(name))
        elif extra == "speed":
            yield Finding(Status.OK, name, f"not installed; optional: {install(extra)}")
        else:
            yield Finding(Status.WARN, name, "not installed", f"for {extra}, {install(extra)}")


def _roots() -> Finding:
    try:
        assert_sole_owner()
    except StreamingNodeError as error:
        return Finding(Status.FAIL, "root packages", str(error), "use a virtual environment of its own")
    return Finding(Status.OK, "root packages", "ours alone")


def _java() -> Finding:
    if find_spec("pyspark") is None:
        return Finding(Status.OK, "java", "not looked for: Spark is not installed")
    from spark_sink.runtime import find_java

    try:
        java = find_java()
    except JavaNotFound as error:
        return Finding(Status.WARN, "java", str(error), f"Spark will not start; {install('jre')}")
    return Finding(Status.OK, "java", f"Java {java.major} from {java.found_in}, {java.home}")


def _files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < FILES_MIN:
        return Finding(Status.WARN, "open files", f"limit {limit}", f"raise it: ulimit -n {4 * FILES_MIN}")
    return Finding(Status.OK, "open files", "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}")


def _space(place: Path) -> Finding:
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    needed = RocksOptions().free_bytes_min
    text = f"{free >> 20} MiB free at {place}; appends are refused below {needed >> 20} MiB"
    if free < needed:
        return Finding(Status.FAIL, "disk space", text, "free space, or use another disk")
    if free < FREE_BYTES_COMFORT:
        return Finding(Status.WARN, "disk space", text, "free space soon")
    return Finding(Status.OK, "disk space", text)


def _fsync(place: Path) -> Finding:
    try:
        seconds = measure_fsync(place)
    except OSError as error:
        return Finding(
            Status.FAIL, "fsync", f"cannot write at {place}: {error.strerror}", "make it writable for this user"
        )
    text = f"{seconds * 1000:.2f} ms at {place} (median of {FSYNCS})"
    if seconds > FSYNC_SLOW_S:
        step = "a durable append waits for it: use a local disk, many appends at once, or durability=os"
        return Finding(Status.WARN, "fsync", text, step)
    return Finding(Status.OK, "fsync", text)


def measure_fsync(place: Path) -> float:
    """Return how many seconds one append of 4 KiB takes to be on the disk of `place`, as the median of several."""
    with tempfile.TemporaryFile(dir=place) as file:
        times = []
        for _ in range(FSYNCS):
            began = time.perf_counter()
            os.write(file.fileno(), bytes(4096))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _node(directory: Path) -> Iterator[Finding]:
    if not is_node(directory):
        yield _no_node(directory)
        return
    owner = holder(directory)
    yield Finding(Status.OK, "owner", "nobody" if owner is None else f"process {owner or '?'}")
    try:
        files = read_node_files(directory)
        for number in files.cuts.numbers:
            files.cuts.read(number)
    except StreamingNodeError as error:
        yield Finding(Status.FAIL, "node", f"{error.code}: {error}")
        return
    cuts = f"cuts {files.cuts.first} to {files.cuts.newest}" if files.cuts.numbers else "no cut yet"
    yield Finding(Status.OK, "node", f"{files.floor.node_id}, term {files.floor.term}, {cuts}, manifests are whole")
    ahead_ms = physical_ms(files.floor.tick) - int(time.time() * 1000)
    if ahead_ms > AHEAD_MS_MAX:
        text = f"the node's last tick is {ahead_ms / 1000:.1f} s ahead of this machine's clock"
        yield Finding(Status.WARN, "clock", text, "ticks still ascend, but their times mislead: set the clock")
    else:
        yield Finding(Status.OK, "clock", "not behind the node's last tick")


def _no_node(directory: Path) -> Finding:
    if not directory.exists():
        return Finding(Status.OK, "node", f"{directory} does not exist yet; opening a node makes it")
    if not directory.is_dir():
        return Finding(Status.FAIL, "node", f"{directory} is a file", "name a directory")
    if not any(directory.iterdir()):
        return Finding(Status.OK, "node", f"{directory} is empty; opening a node fills it")
    names = sorted(path.name for path in directory.iterdir())
    if BACKUP_RECORD_NAME in names:
        step = f"make a node of it: streamingnode restore {directory} <new directory>"
        return Finding(Status.WARN, "node", f"{directory} is a backup, no node", step)
    if rest := [name for name in names if name in _PARTS_WITHOUT_LOG]:
        text = f"{directory} has {', '.join(rest)} of a node, but neither its log nor its floor file"
        return Finding(Status.FAIL, "node", text, "restore the node from a backup, or name another directory")
    if DATABASE_NAME in names:
        text = f"{directory} has a {DATABASE_NAME} that is no node's; a node cannot be opened here"
        return Finding(Status.FAIL, "node", text, "name another directory")
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    text = f"{directory} holds no node but other things ({shown}); opening one would put its files among them"
    return Finding(Status.WARN, "node", text, "name the node's directory, or an empty or new one")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(no version)"
