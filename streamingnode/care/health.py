"""Whether a machine, an installation and a node directory are fit: facts, and what is wrong, in plain words. Blocks.

What is measured is measured here and now; one temporary file is written where the node would write.
"""

import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import google_crc32c

from flusher.directory import CutLog
from spark_sink.errors import PackageMissing, install
from streamingnode.care.findings import Report
from streamingnode.care.inspect import check_node, floor_of, is_node
from streamingnode.ownership import assert_sole_owner
from wal.errors import StreamingNodeError
from wal.files import disk_errors_typed, open_files_max
from wal.rocks.layout import RocksOptions
from wal.rocks.opening import check_place

REQUIRED = ("anyio", "google_crc32c", "msgspec", "numpy", "protobuf", "pyarrow", "rocksdict", "stamina", "structlog")
OPTIONAL = {"pyspark": "spark", "deltalake": "tables", "psutil": "demo", "matplotlib": "demo", "uvloop": "speed"}

FSYNCS = 50
FSYNC_SLOW_S = 0.010
"""Slower than this, a single client waits for little but the disk: network disks, cheap SSDs."""

FILES_MIN = 1_024
"""RocksDB keeps up to a few hundred files open, clients one each."""

FREE_BYTES_COMFORT = 4 << 30
"""Less leaves little between the first warning and the point at which appends are refused."""

_COMPILE = (
    "use a platform it has wheels for, or install the crc32c library with its headers and a C compiler, then run: "
    "pip install --force-reinstall --no-cache-dir google-crc32c"
)


def examine(directory: Path | None, report: Report) -> dict[str, str]:
    """Return what this machine and installation are, and `directory` when it is given; `report` gets what is wrong.

    Damage is what a node cannot be opened with; with a warning it can.
    """
    facts = {
        "python": f"{sys.version.split()[0]} at {sys.executable}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in REQUIRED),
        "extras": ", ".join(f"{name} {_version(name)}" for name in OPTIONAL if find_spec(name)) or "none",
        "checksums": f"google-crc32c in {google_crc32c.implementation}",
    }
    if google_crc32c.implementation != "c":
        report.warn("checksums", "google-crc32c runs without its C extension: about 2 MB/s", _COMPILE)
    for name, extra in OPTIONAL.items():
        if find_spec(name) is None and extra != "speed":
            report.warn(name, "not installed", f"for {extra}, {install(extra)}")
    try:
        assert_sole_owner()
    except StreamingNodeError as error:
        report.damage("root packages", error.happened, "use a virtual environment of its own")
    _look_for_java(facts, report)
    limit = open_files_max()
    facts["open files"] = "no limit" if limit is None else f"limit {limit}"
    if limit is not None and limit < FILES_MIN:
        report.warn("open files", f"the limit is {limit}", f"raise it: ulimit -n {4 * FILES_MIN}")
    path = (directory or Path.cwd()).absolute()
    place = next(each for each in (path, *path.parents) if each.is_dir())
    _look_at_space(place, facts, report)
    _time_fsync(place, facts, report)
    if directory is not None:
        _look_at_node(directory, facts, report)
    return facts


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(no version)"


def _look_for_java(facts: dict[str, str], report: Report) -> None:
    if find_spec("pyspark") is None:
        return
    from spark_sink.runtime import find_java

    try:
        java = find_java()
    except PackageMissing as error:
        report.warn("java", str(error), f"Spark will not start; {install('jre')}")
    else:
        facts["java"] = f"Java {java.major} from {java.found_in}, {java.home}"


def _look_at_space(place: Path, facts: dict[str, str], report: Report) -> None:
    disk = os.statvfs(place)
    free, needed = disk.f_bavail * disk.f_frsize, RocksOptions().free_bytes_min
    text = facts["disk space"] = f"{free >> 20} MiB free at {place}; appends are refused below {needed >> 20} MiB"
    if free < needed:
        report.damage("disk space", text, "free space, or use another disk")
    elif free < FREE_BYTES_COMFORT:
        report.warn("disk space", text, "free space soon")


def _time_fsync(place: Path, facts: dict[str, str], report: Report) -> None:
    times = []
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(FSYNCS):
                began = time.perf_counter()
                os.write(file.fileno(), bytes(4096))
                os.fsync(file.fileno())
                times.append(time.perf_counter() - began)
    except OSError as error:
        report.damage("fsync", f"cannot write at {place}: {error.strerror}", "make it writable for this user")
        return
    took_s = statistics.median(times)
    text = facts["fsync"] = f"{took_s * 1000:.2f} ms at {place} (median of {FSYNCS})"
    if took_s > FSYNC_SLOW_S:
        step = "a durable append waits for it: use a local disk, many appends at once, or durability=os"
        report.warn("fsync", text, step)


def _look_at_node(directory: Path, facts: dict[str, str], report: Report) -> None:
    try:
        with disk_errors_typed(directory):
            if directory.is_dir():
                check_place(directory)
            elif directory.exists():
                check_node(directory)
            if not is_node(directory):
                facts["node"] = f"{directory} holds none yet; opening one makes it"
                return
            floor, cuts = floor_of(directory), CutLog(directory)
            for number in cuts.numbers:
                cuts.read(number)
    except StreamingNodeError as error:
        report.error("node", error)
        return
    kept = f"cuts {cuts.first} to {cuts.newest}" if cuts.numbers else "no cut yet"
    facts["node"] = f"{floor.node_id}, term {floor.term}, {kept}, manifests are whole"
