"""Health of a machine, an installation, a node directory and a running node: facts, and findings in
plain words.

Measurements are taken now, with one temporary file where the node would write. Everything but
`judge` blocks.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import google_crc32c

from flusher.directory import CutLog
from flusher.flusher import FlusherState
from spark_sink.errors import PackageMissing, install
from streamingnode.care.findings import Report
from streamingnode.care.inspect import check_node, floor_of, is_node
from streamingnode.config import NodeConfig, load_config
from streamingnode.holders import ReaderInfo, TransactionInfo
from streamingnode.ownership import assert_sole_owner
from streamingnode.statistics import NodeStatistics
from wal.files import disk_errors_typed, open_files_max
from wal.lifecycle import LogState
from wal.rocks.layout import RocksOptions
from wal.rocks.opening import check_place
from wal.rocks.space import free_bytes_of
from wal.timetick import physical_ms

REQUIRED = (
    "anyio",
    "click",
    "google_crc32c",
    "msgspec",
    "numpy",
    "protobuf",
    "pyarrow",
    "rich",
    "rocksdict",
    "stamina",
    "structlog",
)
OPTIONAL = {
    "pyspark": "spark",
    "deltalake": "tables",
    "psutil": "demo",
    "matplotlib": "demo",
    "uvloop": "speed",
}

FSYNCS = 50
FSYNC_SLOW_S = 0.010
"""Above this a single client mostly waits for the disk, as with network disks and cheap SSDs."""

FILES_MIN = 1_024
"""RocksDB keeps up to a few hundred files open, and each client one."""

Limits = tuple[float, float]
"""The values from which on a measure is a warning, and critical."""

FREE_BYTES_COMFORT = 4 << 30
"""With less free space there is little between the first warning and the refusal of appends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The limits of `judge`: seconds, and free bytes.

    Cuts come every 10 s by default; a transaction ends by itself after 10 minutes; retention always
    keeps a day.
    """

    flusher_lag_s: Limits = (120.0, 900.0)
    free_bytes: Limits = (FREE_BYTES_COMFORT, RocksOptions().free_bytes_min)
    transaction_age_s: Limits = (60.0, 300.0)
    reader_behind_s: Limits = (86_400.0, 7 * 86_400.0)


_COMPILE = (
    "use a platform it has wheels for, or install the crc32c library with its headers and a C "
    "compiler, then run: "
    "pip install --force-reinstall --no-cache-dir google-crc32c"
)


def examine(directory: Path | None, report: Report) -> dict[str, str]:
    """Return facts about this machine, the installation, and `directory` if given; problems go into
    `report`.

    With damage a node cannot be opened; with warnings it can.
    """
    facts = {
        "python": f"{sys.version.split()[0]} at {sys.executable}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in REQUIRED),
        "extras": ", ".join(f"{name} {_version(name)}" for name in OPTIONAL if find_spec(name))
        or "none",
        "checksums": f"google-crc32c in {google_crc32c.implementation}",
    }
    if google_crc32c.implementation != "c":
        report.warn(
            "checksums", "google-crc32c runs without its C extension: about 2 MB/s", _COMPILE
        )
    for name, extra in OPTIONAL.items():
        if find_spec(name) is None and extra != "speed":
            report.warn(name, "not installed", f"for {extra}, {install(extra)}")
    with report.errors_at("root packages", "use a virtual environment of its own"):
        assert_sole_owner()
    _look_for_java(facts, report)
    limit = open_files_max()
    facts["open files"] = "no limit" if limit is None else f"limit {limit}"
    if limit is not None and limit < FILES_MIN:
        report.warn("open files", f"the limit is {limit}", f"raise it: ulimit -n {4 * FILES_MIN}")
    path = (directory or Path.cwd()).absolute()
    place = next(each for each in (path, *path.parents) if each.is_dir())
    config = NodeConfig()
    with report.errors_at("settings"):
        config = load_config(environment=os.environ)
    where = f" at {place}"
    limits = (FREE_BYTES_COMFORT, 0)
    _judge_space(free_bytes_of(place), config.log.free_bytes_min, where, limits, facts, report)
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
        facts["java"] = f"Java {java.major} from {java.found_in}, {java.home}"
    except PackageMissing as error:
        report.warn("java", str(error), f"Spark will not start; {install('jre')}")


def _judge_space(
    free: int, needed: int, where: str, limits: Limits, facts: dict[str, str], report: Report
) -> None:
    text = facts["disk space"] = (
        f"{free >> 20} MiB free{where}; appends are refused below {needed >> 20} MiB"
    )
    # less is worse here, so the value and both limits are negated
    limits = 1 - limits[0], 1 - max(limits[1], needed)
    _judge_level(-free, limits, "disk space", text, "free space, or use another disk", report)


def _judge_level(
    value: float, limits: Limits, place: str, text: str, step: str, report: Report
) -> None:
    warning, critical = limits
    if value >= critical:
        report.damage(place, text, step)
    elif value >= warning:
        report.warn(place, text, step)


def judge(
    node: NodeStatistics,
    readers: Sequence[ReaderInfo],
    transactions: Sequence[TransactionInfo],
    thresholds: Thresholds,
    report: Report,
) -> dict[str, str]:
    """Return short facts about a running node; problems go into `report`, critical ones as
    damage.
    """
    log = node.log
    flusher = node.flusher
    space = node.space
    facts = {"log": f"{log.state}, term {log.term}"}
    if log.state != LogState.OPEN.value:
        report.damage(
            "log",
            f"it takes no appends: {log.state}, {log.last_error or log.store}",
            "look at its disk",
        )
    lag_s = flusher_lag_s(node)
    facts["flusher"] = (
        f"{flusher.state.value}, {flusher.unflushed_rows} rows wait, the oldest for {lag_s:.0f} s"
    )
    why = f"{facts['flusher']}; {flusher.short_of or flusher.last_error or 'no error'}"
    _judge_level(
        lag_s, thresholds.flusher_lag_s, "flusher", why, "look at the disk of its files", report
    )
    if flusher.state is FlusherState.FAILED:
        report.damage("flusher", f"it has stopped: {flusher.last_error}", "verify the node")
    if space is not None:
        _judge_space(space.free_bytes, space.needed_bytes, "", thresholds.free_bytes, facts, report)
    oldest = max(transactions, key=lambda each: each.age_s, default=None)
    facts["transactions"] = f"{len(transactions)} open"
    if oldest is not None:
        text = f"{oldest.txn_id} is open for {oldest.age_s:.0f} s and holds the log"
        step = f"end it: streamingnode txn abort DIR {oldest.txn_id}"
        _judge_level(oldest.age_s, thresholds.transaction_age_s, "transactions", text, step, report)
    facts["readers"] = f"{len(readers)} named"
    for each in readers:
        of = ", ".join(each.collections)
        text = (
            f"{each.name} of {of} holds the log for {each.behind_s:.0f} s, {each.backlog} messages"
        )
        step = (
            f"run it, or remove it: streamingnode reader rm DIR {each.collections[0]} {each.name}"
        )
        behind_s = each.behind_s if each.backlog else 0.0
        _judge_level(behind_s, thresholds.reader_behind_s, "readers", text, step, report)
    return facts


def flusher_lag_s(node: NodeStatistics) -> float:
    """Return how many seconds the oldest row has waited for a cut, at most since the node was
    opened; 0 without such a row.
    """
    since_tick = node.flusher.unflushed_since_tick
    return (
        min(node.uptime_s, max(0, node.at_ms - physical_ms(since_tick)) / 1000)
        if since_tick
        else 0.0
    )


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
        report.damage(
            "fsync", f"cannot write at {place}: {error.strerror}", "make it writable for this user"
        )
        return
    took_s = statistics.median(times)
    text = facts["fsync"] = f"{took_s * 1000:.2f} ms at {place} (median of {FSYNCS})"
    if took_s > FSYNC_SLOW_S:
        step = (
            "a durable append waits for it: use a local disk, many appends at once, or "
            "durability=os"
        )
        report.warn("fsync", text, step)


def _look_at_node(directory: Path, facts: dict[str, str], report: Report) -> None:
    with report.errors_at("node"), disk_errors_typed(directory):
        if directory.is_dir():
            check_place(directory)
        elif directory.exists():
            check_node(directory)
        if not is_node(directory):
            facts["node"] = f"{directory} holds no node yet; opening it creates one"
            return
        floor = floor_of(directory)
        cuts = CutLog(directory)
        for number in cuts.numbers:
            cuts.read(number)
        kept = f"cuts {cuts.first} to {cuts.newest}" if cuts.numbers else "no cut yet"
        facts["node"] = f"{floor.node_id}, term {floor.term}, {kept}, manifests are whole"
