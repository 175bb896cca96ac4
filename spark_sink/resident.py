"""The resident ingest: each round requests a cut, brings every table to it, and keeps the tables
small.

Failures are reported and retried per table; the other tables go on. A round is an ingest, and
exactly once rests on its commits. So all state between two rounds may be lost, and there is no
recovery.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path

from pyspark.sql import SparkSession

from flusher.directory import CutLog
from spark_sink.cut_request import AnsweredCut, CuttingNode, node_directory, request_cut
from spark_sink.errors import typed
from spark_sink.ingestion import IngestJob, IngestReport, TableReport, age_s, check_place
from spark_sink.runtime import LazySession
from spark_sink.table import OpenTable
from spark_sink.upkeep import compact, keep_versions, remove_unused
from wal.errors import InvalidArgument, StreamingNodeError

RETRY_PAUSE_MAX_S = 60.0
"""Longest pause before a failed table is retried; the pause doubles, starting at the pause between
two rounds.
"""
UNUSED_EVERY_S = 600.0
"""Pause between two checks of a table for files that no version needs."""
KEEP_S_MIN = 60
"""Least age of removed versions: a reader that has opened a version needs time to read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error by table; `table` is empty for an error of the node or of the request for a cut."""

    table: str
    code: str
    message: str
    retryable: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestRound:
    """What one round did, and how far the tables lag behind the log at its end.

    `lag_cuts` and `lag_ticks` are those of the last table, relative to the newest cut. `lag_s` is
    the age of the state that all tables have reached. It counts from this round's request if they
    have the cut that the node returned, else from the tick of their oldest cut, an upper bound;
    None without a cut. `compacted` is the decrease in the number of files. `stale` and `cut_age_s`
    are as in `IngestReport`; a round is also stale when the request for a cut failed.
    """

    number: int
    cut: int
    tick: int
    lag_cuts: int
    lag_ticks: int
    lag_s: float | None
    seconds: float
    rows_added: int = 0
    rows_deleted: int = 0
    compacted: int = 0
    stale: bool = False
    cut_age_s: float | None = None
    tables: tuple[TableReport, ...] = ()
    failures: tuple[Failure, ...] = ()


def ingest_every(
    node: str | Path | CuttingNode = "data",
    tables: str | Path = "tables",
    *,
    every_s: float = 2.0,
    spark: SparkSession | None = None,
    stop: threading.Event | None = None,
    request_cut: bool = True,
    every_cut: bool = False,
    link: bool = False,
    keep_s: int = 3600,
) -> Iterator[IngestRound]:
    """Ingest every `every_s` seconds until `stop` is set, and yield what each round did; all work
    runs in the caller's thread.

    A round is an `ingest`, which describes `node`, `request_cut`, `every_cut` and `link`. For a
    closed node given by its directory, each request runs a process that takes half a second of
    processor time; an open node is called directly. A table's error is in the round's `failures`,
    and a later round takes its cuts. Small files are merged, and versions older than `keep_s`
    seconds are removed: a table can be read as of a tick for that long. Several of these can run at
    once. Once `stop` is set, the commit under way ends and no other begins. The node may stop and
    come back meanwhile.

    Raises `InvalidArgument` at once, as `ingest`, and for numbers out of range. A round raises no
    `Exception`: each one is in its `failures`.
    """
    if not (every_s > 0 and isfinite(every_s)):
        raise InvalidArgument(f"every_s={every_s!r} is out of range — give more than 0")
    if not KEEP_S_MIN <= keep_s < 1 << 31:
        raise InvalidArgument(f"keep_s={keep_s!r} is out of range — give {KEEP_S_MIN} or more")
    directory = node_directory(node, request_cut=request_cut)
    into = check_place(directory, tables)
    stop = stop or threading.Event()
    sessions = LazySession(spark, pause=stop.wait, is_stopping=stop.is_set)
    asked = node if request_cut else None
    job = partial(
        IngestJob,
        sessions,
        directory,
        into,
        every_cut=every_cut,
        link=link,
        is_stopping=stop.is_set,
    )
    return _Resident(asked, directory, into, sessions, stop, every_s, keep_s, job).rounds()


@dataclass(frozen=True, slots=True)
class _Pause:
    """A table that is skipped until a time, and why."""

    error: StreamingNodeError
    seconds: float
    until: float


@dataclass
class _Resident:
    """The state between two rounds."""

    asked: str | Path | CuttingNode | None
    directory: Path
    tables: Path
    sessions: LazySession
    stop: threading.Event
    every_s: float
    keep_s: int
    job: Callable[..., IngestJob]
    report: IngestReport = field(default_factory=lambda: IngestReport(node_id="", cut=0, tick=0))
    paused: dict[str, _Pause] = field(default_factory=dict)
    # the cut and tick of each table
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)
    tended: dict[str, float] = field(default_factory=dict)  # when each table was last compacted
    # when to check each table for unused files again
    swept: dict[str, float] = field(default_factory=dict)

    def rounds(self) -> Iterator[IngestRound]:
        number = 0
        try:
            while not self.stop.is_set():
                number = number + 1
                began = time.monotonic()
                yield self._round(number)
                self.stop.wait(max(0.0, began + self.every_s - time.monotonic()))
        finally:
            self.sessions.close()

    def _round(self, number: int) -> IngestRound:
        began = time.monotonic()
        failures: dict[str, StreamingNodeError] = {}
        answered: AnsweredCut | None = None
        is_stale = False
        report = None
        try:
            if self.asked is not None:
                answered, is_stale = request_cut(self.asked)
        except Exception as error:  # noqa: BLE001
            # the request runs a program or a caller's node; the existing cuts are taken
            failures[""] = typed(error, "asking for a cut")
            is_stale = True
        try:
            report = self._take(answered, failures)
        except Exception as error:  # noqa: BLE001
            # a resident ingest survives every error of a disk or a library
            failures[""] = typed(error, f"node {self.directory}")
        compacted = 0 if report is None else self._tend(failures)
        newest = self.report = report or self.report
        behind = min(self.reached.values(), default=(newest.cut, newest.tick))
        is_all = answered is not None and answered.number <= behind[0]
        lag_s = time.monotonic() - began if is_all else age_s(behind[1])
        taken = report.tables if report else ()
        return IngestRound(
            number=number,
            cut=newest.cut,
            tick=newest.tick,
            lag_cuts=max(0, newest.cut - behind[0]),
            lag_ticks=max(0, newest.tick - behind[1]),
            lag_s=lag_s,
            seconds=time.monotonic() - began,
            rows_added=sum(table.rows_added for table in taken),
            rows_deleted=sum(table.rows_deleted for table in taken),
            compacted=compacted,
            stale=is_stale,
            cut_age_s=age_s(newest.tick),
            tables=tuple(table for table in taken if table.first_cut or table.dropped),
            failures=tuple(
                Failure(table=name, code=error.code, message=str(error), retryable=error.retryable)
                for name, error in sorted(failures.items())
            ),
        )

    def _take(
        self, answered: AnsweredCut | None, failures: dict[str, StreamingNodeError]
    ) -> IngestReport | None:
        """Bring the tables to the newest cut; None when they have it already. Raises errors that
        concern all tables.
        """
        now = time.monotonic()
        left_alone = {name: each.error for name, each in self.paused.items() if now < each.until}
        failed = dict(left_alone)
        try:
            if CutLog(self.directory).newest == self.report.cut and len(left_alone) == len(
                self.paused
            ):
                return None
            report = self.job(failures=failed).run(answered)
        finally:
            failures |= failed
        # A table without a report has failed, or was dropped and another ingest has retired it.
        kept = self.reached if self.stop.is_set() else failed.keys() & self.reached.keys()
        self.reached = {name: self.reached[name] for name in kept} | {
            table.table: (table.last_cut, table.tick)
            for table in report.tables
            if not table.dropped
        }
        self.paused = {
            name: self.paused[name] if name in left_alone else self._pause(name, error, now)
            for name, error in failed.items()
        }
        return report

    def _pause(self, name: str, error: StreamingNodeError, now: float) -> _Pause:
        seconds = min(
            RETRY_PAUSE_MAX_S,
            2 * self.paused[name].seconds if name in self.paused else self.every_s,
        )
        return _Pause(error, seconds, now + seconds)

    def _tend(self, failures: dict[str, StreamingNodeError]) -> int:
        """Compact one table, a different one in each round; return the decrease in its number of
        files.
        """
        now = time.monotonic()
        names = [
            name
            for name in self.reached
            if name not in failures and self.tended.get(name, 0.0) <= now
        ]
        if not names or self.stop.is_set():
            return 0
        name = min(names, key=lambda each: self.tended.get(each, 0.0))
        self.tended[name] = now
        try:
            table = OpenTable.load(self.tables / name)
            if table is None:
                return 0
            if now >= self.swept.get(name, 0.0):
                keep_versions(table, self.keep_s)
                remove_unused(table)
                self.swept[name] = now + UNUSED_EVERY_S
            return compact(table.at_version(), is_stopping=self.stop.is_set)
        except Exception as error:  # noqa: BLE001 - as above
            failures[name] = typed(error, f"keeping table {self.tables / name} small")
            # meanwhile ingests can use the space of a full disk
            self.tended[name] = now + RETRY_PAUSE_MAX_S
            return 0
