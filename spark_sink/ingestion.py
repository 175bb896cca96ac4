"""Ingest: brings every cut of a node into its tables, each exactly once. This is the driver's side.

An ingest takes cuts in order, in runs. A run makes one commit per table, and all tables of a run
come before the next run, so that tables meet at cuts. For each table and run, under the table's
lock:

    check the table -> plan -> verify the files -> choose the road -> write -> sync -> commit ->
    sync -> lease -> retire

Exactly once rests on the commit: it swaps the files and moves the watermark, on the condition that
the table is still at the version from which the watermark was read. A job that loses this race
loads the table again and finds its cuts taken. `commit` lists what each crash point leaves. A crash
between commit and lease leaves an old lease, which only keeps files longer.
"""

import fcntl
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from pyspark.sql import SparkSession

from flusher.cuts import Lease, check_writable, release, write_lease
from flusher.directory import Cut, CutLog, lives, living
from flusher.manifest import CollectionEntry, arrow_schema
from spark_sink.changes import Changes, batches, changes_of, entries_of, first_with
from spark_sink.commit import Road, clean_up, holds_only_attempts, sync_log, write_files
from spark_sink.cut_request import AnsweredCut, CuttingNode, node_directory
from spark_sink.cut_request import request_cut as ask_for_cut
from spark_sink.errors import TableAhead, typed
from spark_sink.runtime import LazySession
from spark_sink.table import CommitConflict, OpenTable, TableIdentity, Watermark
from wal.errors import (
    AlreadyExists,
    InvalidArgument,
    Overloaded,
    StorageFailed,
    StreamingNodeError,
    Truncated,
)
from wal.failpoint import failpoint
from wal.files import check_path, make_parents, sync_directory
from wal.rocks.floor import BACKUP_RECORD_NAME
from wal.timetick import physical_ms

COMMIT_BYTES_MAX = 1 << 30
"""Bytes of the node's files in one commit: the work that a killed job repeats, and the step of
progress reports.
"""

COMMIT_CUTS_MAX = 1_000
"""Cuts in one commit: each manifest names every collection, so a day of small cuts would take
gigabytes.
"""

CONFLICTS_MAX = 16
"""Commits lost in a row before the ingest raises `Overloaded`; each loss means that another writer
made progress.
"""

LOCKS = ".locks"

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Receives (stage, done, total) as an ingest goes on; called from the thread that called
`ingest`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """What one table took.

    `first_cut` is 0 when this job took no cut, because another job had taken them or there were
    none. `road` is how the rows of the last commit got there: `copy`, `spark`, or `none` without
    rows.
    """

    table: str
    path: str
    first_cut: int
    last_cut: int
    tick: int
    version: int
    rows_added: int = 0
    rows_deleted: int = 0
    dropped: bool = False
    road: str = Road.NONE.value


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestReport:
    """What one `ingest` did. `cut` is the node's newest cut (0: none yet); every listed table is at
    it or was dropped.

    `stale` means that a cut was wanted but could not be requested, as a process owns the node and
    takes no clients. The tables then have the cuts that existed. `cut_age_s` is the age of the
    newest cut, by its tick and the clock of this machine; None without a cut.
    """

    node_id: str
    cut: int
    tick: int
    stale: bool = False
    cut_age_s: float | None = None
    seconds: float = 0.0
    tables: tuple[TableReport, ...] = ()

    @property
    def rows_added(self) -> int:
        """Rows taken from segments, over all tables, before deletes."""
        return sum(table.rows_added for table in self.tables)

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, over all tables, from the tables and
        from the new segments.
        """
        return sum(table.rows_deleted for table in self.tables)


def ingest(
    spark: SparkSession | None,
    node: str | Path | CuttingNode = "data",
    tables: str | Path = "tables",
    *,
    progress: Progress | None = None,
    request_cut: bool = True,
    every_cut: bool = False,
    link: bool = False,
    stop: threading.Event | None = None,
) -> IngestReport:
    """Bring every cut of a node exactly once into `tables/<collection>`, one open table for each
    collection.

    It first requests a cut, also from a node that another process has open; if that process takes
    no clients, it takes the existing cuts and the report is `stale`. `node` is a directory, or an
    open node of `sn.sync`, which then makes the cut itself. A commit takes as many cuts as it can,
    which hides the states between them; with `every_cut` each cut is a version of its own. The
    ingest can be killed at any moment and run again, and two can run at once. A dropped
    collection's table is renamed to `<name>@<collection id>`.

    Files of cuts that delete no row are copied if they have the table's column types; this needs no
    Spark. Without a session (None), one is started when a cut needs it and ends with the call. With
    `link` these files are hard links instead, on one file system. This saves the second copy on the
    disk, but the node and the table then share a damaged byte, and the mode of the file.

    Once `stop` is set, the commit under way ends and no other begins. The report then has the
    tables reached so far; another ingest takes the rest. Failures after that are logged and not
    raised.

    Raises `InvalidArgument` for an address in place of a path, for tables inside the node's
    directory, for a backup and for a node that lives on an event loop; `StorageFailed` when the
    node makes no cut, when this user cannot write a lease, and when Spark's Java process is killed
    meanwhile; `Corrupt` with the damaged file; `Truncated` when needed cuts are no longer kept;
    `AlreadyExists` when a table's directory belongs to another node or is no table; `TableAhead`
    when the node is older than its table.
    """
    started = time.monotonic()
    progress = progress or IngestJob.progress
    directory = node_directory(node, request_cut=request_cut)
    into = check_place(directory, tables)
    progress("cut", 0, 1)
    cut, is_stale = ask_for_cut(node) if request_cut else (None, False)
    progress("cut", 1, 1)
    stop = stop or threading.Event()
    sessions = LazySession(spark, pause=stop.wait, is_stopping=stop.is_set)
    try:
        job = IngestJob(
            sessions,
            directory,
            into,
            progress=progress,
            every_cut=every_cut,
            link=link,
            is_stopping=stop.is_set,
        )
        report = job.run(cut)
    finally:
        sessions.close()
    seconds = time.monotonic() - started
    return replace(report, stale=is_stale, cut_age_s=age_s(report.tick), seconds=seconds)


def age_s(tick: int) -> float | None:
    """Return the seconds since the time of a tick, 0 for a tick ahead of this clock; None for tick
    0.
    """
    return max(0.0, time.time() - physical_ms(tick) / 1000) if tick else None


def check_place(node: Path, given: str | Path) -> Path:
    """Return the directory given for the tables of a node.

    Raises `InvalidArgument` for an address, for a backup, for tables inside the node's directory,
    and for paths that Delta misreads.
    """
    tables = check_path("directory of tables", given)
    if tables.resolve().is_relative_to(node.resolve()):
        raise InvalidArgument(
            f"{tables} is inside the node {node} — name a directory of their own for the tables"
        )
    if found := re.search(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]", str(tables.resolve())):
        raise InvalidArgument(
            f"{tables}: Delta misreads {found[0]!r} in a path — name another directory"
        )
    if (node / BACKUP_RECORD_NAME).exists():  # an ingest would change its leases
        raise InvalidArgument(
            f"{node} is a backup, which stays as it was made — restore it, and ingest from that "
            "node"
        )
    return tables


@contextmanager
def table_lock(tables: Path, name: str) -> Iterator[None]:
    """Hold the lock of a table name among the ingests of one machine. Blocks until it is free; the
    process's end releases it.

    Correctness does not depend on it, as the commit is conditional. It saves the work that a losing
    job would discard, and keeps a job from committing into a directory that another is renaming.
    """
    folder = tables / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass
class IngestJob:
    """One pass over the cuts that a node has now; call `run` once.

    With `failures`, an error of one table is stored there under the table's name, and the other
    tables go on; tables already in it are skipped. Once `is_stopping` is true, no further table is
    begun.
    """

    spark: SparkSession | LazySession | None
    node: Path
    tables: Path
    _: KW_ONLY
    progress: Progress = lambda _stage, _done, _total: None
    commit_bytes_max: int = COMMIT_BYTES_MAX
    every_cut: bool = False
    link: bool = False
    failures: dict[str, StreamingNodeError] | None = None
    is_stopping: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._sessions = (
            self.spark if isinstance(self.spark, LazySession) else LazySession(self.spark)
        )
        self._cuts = CutLog(self.node)
        self._reports: dict[int, TableReport] = {}

    def run(self, newest: AnsweredCut | None = None) -> IngestReport:
        """Take all cuts, and return the report. `newest` is the cut from the node's reply, to which
        the cuts must lead. Raises as `ingest`.
        """
        if newest is not None:
            # the reply is seconds old: tables may have taken this cut and later ones since
            with suppress(Truncated):
                self._cuts.anchor(newest.number, crc32c=newest.crc32c, tick=newest.tick)
        if not self._cuts.numbers:
            return IngestReport(node_id="", cut=0, tick=0)
        check_writable(self.node)
        last = self._cuts.read(self._cuts.newest)
        held = self._held_tables(last.manifest.node_id)
        self._retire_gone(held)
        first = self._first_needed(last, held)
        total = last.number - first + 1
        done = 0
        cuts = map(self._cuts.read, range(first, last.number + 1))
        for run in batches(
            cuts,
            lambda cut: sum(file.bytes for file in cut.manifest.files),
            bytes_max=self.commit_bytes_max,
            count_max=1 if self.every_cut else COMMIT_CUTS_MAX,
        ):
            entries = {
                entry.collection_id: entry for cut in run for entry in cut.manifest.collections
            }
            # In order of creation: the older collection of a name goes first.
            for entry in sorted(
                entries.values(), key=lambda entry: (entry.created_tick, entry.collection_id)
            ):
                if self.is_stopping():
                    break
                if not self._has_failed(entry.name):
                    self.progress(entry.name, done, total)
                    with self._apart(entry.name):
                        self._bring(entry, run)
            done += len(run)
        self.progress("done", total, total)
        return IngestReport(
            node_id=last.manifest.node_id,
            cut=last.number,
            tick=last.tick,
            tables=tuple(sorted(self._reports.values(), key=lambda report: report.table)),
        )

    @contextmanager
    def _apart(self, name: str) -> Iterator[None]:
        """Turn errors in the block into typed ones, and raise them or, with `failures`, store them
        for this table.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is raised or stored as a typed error
            if self.is_stopping():
                # The caller that stops this may also have ended Spark's Java process. The next
                # ingest raises lasting errors.
                _log.info("table %s: %s", self.tables / name, error)
                return
            failure = typed(error, f"table {self.tables / name}")
            if self.failures is None:
                raise failure from failure.__cause__
            self.failures[name] = failure

    def _has_failed(self, name: str) -> bool:
        return name in (self.failures or ())

    # --- which tables, which cuts

    def _held_tables(self, node_id: str) -> dict[int, OpenTable]:
        """Return this node's tables by collection id, without retired ones. Checks that none is
        ahead of the node.
        """
        held: dict[int, OpenTable] = {}
        for path in sorted(self.tables.iterdir()) if self.tables.is_dir() else []:
            if "@" in path.name or path.name.startswith("."):
                continue
            if self._has_failed(path.name):
                continue
            with self._apart(path.name):
                table = OpenTable.load(path)
                found = table and table.identity
                # skips copies under other names
                if table and found and (found.node_id, found.collection) == (node_id, path.name):
                    self._check_descent(table)
                    held[found.collection_id] = table
        return held

    def _check_descent(self, table: OpenTable) -> None:
        """Raise `TableAhead` for a table with cuts that this node never made: another commit would
        mix two histories.
        """
        mark = table.watermark
        # another job may have taken a cut that is newer than this listing
        if mark.cut > self._cuts.newest:
            self._cuts.look()
        known = self._cuts.crc32c_of(mark.cut)
        if mark.cut > self._cuts.newest:
            problem = f"has taken cut {mark.cut}, the node's newest is {self._cuts.newest}"
        elif known is not None and known != mark.crc32c:
            problem = f"has taken another cut {mark.cut} than the node's"
        else:
            return
        raise TableAhead(
            f"table {table.path} {problem}: the node was restored from an older copy — move the "
            "table away"
        )

    def _first_needed(self, newest: Cut, held: dict[int, OpenTable]) -> int:
        """Return the earliest kept cut that a table still needs. It is the newest cut when all
        tables have it, as some may have to retire.
        """
        needed = [max(table.watermark.cut + 1, self._cuts.first) for table in held.values()]
        for entry in newest.manifest.collections:
            if (
                entry.collection_id not in held
                and lives(entry, newest.tick)
                and not self._has_failed(entry.name)
            ):
                with self._apart(entry.name):
                    needed.append(first_with(self._cuts, entry.created_tick))
        return min([*needed, newest.number])

    def _retire_gone(self, held: dict[int, OpenTable]) -> None:
        """Retire tables whose next cut does not have their collection: their job took the drop and
        was killed then.
        """
        # another job may have made a table for a collection that is newer than the listed cuts
        self._cuts.look()
        for collection_id, known in held.items():
            identity = known.owner()
            cuts = self._cuts
            following = cuts.read(min(max(known.watermark.cut + 1, cuts.first), cuts.newest))
            if entries_of(following, collection_id):
                continue
            with self._apart(identity.collection), table_lock(self.tables, identity.collection):
                table = OpenTable.load(self.tables / identity.collection)
                # otherwise another job has retired it
                if table is not None and table.identity == identity:
                    sync_log(table.path)
                    clean_up(table)
                    self._retire(table)

    # --- one table

    def _bring(self, entry: CollectionEntry, run: Sequence[Cut]) -> None:
        """Bring one collection's table to the last cut of a run."""
        path = self.tables / entry.name
        losses = 0
        make_parents(self.tables)
        with table_lock(self.tables, entry.name):
            for _ in range(CONFLICTS_MAX):
                try:
                    table = self._open(path, entry, run)
                    if table is not None:
                        self._advance(table, entry, run)
                except CommitConflict:
                    continue
                except StorageFailed as error:
                    losses += 1
                    if not self._sessions.outlasts(error, losses=losses):
                        raise
                    continue
                return
        raise Overloaded(
            f"{path}: {CONFLICTS_MAX} commits were lost to other writers — run one ingest at a time"
        )

    def _open(self, path: Path, entry: CollectionEntry, run: Sequence[Cut]) -> OpenTable | None:
        """Return the collection's table, created when missing; None for a dropped collection
        without a table.
        """
        table = OpenTable.load(path)
        wanted = TableIdentity(run[0].manifest.node_id, entry.collection_id, entry.name)
        if table is not None and table.owner() == wanted:
            self._check_descent(table)
            # its commit may be of a job that was killed, or that runs on another machine
            sync_log(path)
            return table
        # Files of a collection that was dropped later may be gone: create no table for it.
        if not (self._is_living(entry) and lives(entry, run[-1].tick)):
            return None
        retired = OpenTable.load(path.with_name(f"{path.name}@{entry.collection_id}"))
        if retired and retired.identity == wanted:
            # another job has taken the drop, unless this node was restored from before the drop
            self._check_descent(retired)
            return None
        if table is not None:
            raise AlreadyExists(
                f"{path} holds {table.identity} — move it, or ingest into another directory"
            )
        if path.exists() and not (path.is_dir() and holds_only_attempts(path)):
            raise AlreadyExists(
                f"{path} exists and is no table — move it, or ingest into another directory"
            )
        first = self._cuts.read(first_with(self._cuts, entry.created_tick)).manifest
        before = Watermark(first.number - 1, first.previous_tick, first.previous_crc32c)
        columns = arrow_schema(entry)
        created = entry.created_tick
        table = OpenTable.create(path, wanted, columns, before, created_tick=created)
        sync_log(path)
        sync_directory(path)
        sync_directory(path.parent)
        failpoint("ingest.created")
        return table

    def _advance(self, table: OpenTable, entry: CollectionEntry, run: Sequence[Cut]) -> None:
        clean_up(table)
        mark = table.watermark
        if any(entries_of(cut, entry.collection_id) for cut in run if cut.number > mark.cut):
            try:
                cuts = self._cuts.span(mark.cut + 1, run[-1].number)
                self._commit(table, changes_of(entry, cuts, after_tick=mark.tick))
            except Truncated:
                # A dropped collection may lose cuts before its table's first lease: the table then
                # ends with the rows it has.
                if self._is_living(entry):
                    raise
        table.refresh()  # another job may have committed
        if any(lives(found, run[-1].tick) for found in entries_of(run[-1], entry.collection_id)):
            self._reports[entry.collection_id] = self._report_of(table)
            self._lease(table)
            table.checkpoint()  # every earlier commit is durable
        else:
            self._retire(table)

    def _commit(self, table: OpenTable, changes: Changes) -> None:
        with self._sessions.telling_loss():
            written = write_files(self._sessions, self.node, table, changes, link=self.link)
        name = written.attempt.name if written.attempt else ""
        at = Watermark(changes.last.number, changes.last.tick, changes.last.crc32c)
        with written.attempt.undone_on_error(table) if written.attempt else nullcontext():
            table.commit(
                at,
                changed=changes.changed,
                adds=written.adds,
                removes=written.removes,
                attempt=name,
            )
        failpoint("ingest.committed")
        sync_log(table.path)
        if written.attempt is not None:
            written.attempt.finish()
        failpoint("ingest.finished")
        before = self._report_of(table)
        self._reports[changes.entry.collection_id] = replace(
            before,
            first_cut=before.first_cut or changes.cuts[0].number,
            rows_added=before.rows_added + written.rows_in,
            rows_deleted=before.rows_deleted + written.rows_deleted,
            road=written.road.value,
        )

    # --- after the commit

    def _lease(self, table: OpenTable) -> None:
        """Write the lease that names the newest cut the table has taken; syncs the table's log
        first.
        """
        mark = table.watermark
        identity = table.owner()
        sync_log(table.path)
        place = str(table.path.resolve())
        lease = Lease(
            table=place,
            node_id=identity.node_id,
            collection_id=identity.collection_id,
            cut=mark.cut,
            tick=mark.tick,
        )
        write_lease(self.node, lease)
        failpoint("ingest.leased")

    def _retire(self, table: OpenTable) -> None:
        """Rename a dropped collection's table, so that a new one can take its name; after a crash
        the next ingest does it.
        """
        collection_id = table.owner().collection_id
        report = self._report_of(table)
        retired = table.path.with_name(f"{table.path.name}@{collection_id}")
        if retired.exists():  # a table of another node that used this directory before
            retired = retired.with_name(f"{retired.name}@{table.owner().node_id}")
        # by the path in its lease; first, because no ingest finds the table after the rename
        release(self.node, table.path.resolve())
        failpoint("ingest.released")
        table.path.rename(retired)
        sync_directory(retired.parent)
        failpoint("ingest.retired")
        self._reports[collection_id] = replace(report, path=str(retired), dropped=True)

    def _report_of(self, table: OpenTable) -> TableReport:
        """Return what this job did to a table so far, at the table's present version."""
        identity = table.owner()
        mark = table.watermark
        new = TableReport(
            table=identity.collection,
            path=str(table.path),
            first_cut=0,
            last_cut=0,
            tick=0,
            version=0,
        )
        before = self._reports.get(identity.collection_id, new)
        return replace(before, last_cut=mark.cut, tick=mark.tick, version=table.version)

    def _is_living(self, entry: CollectionEntry) -> bool:
        return entry.collection_id in living(self._cuts.read(self._cuts.newest).manifest)
