"""The data files of one commit: rows that cuts add to a table, and what deletes leave of the files they touch.

In: a loaded table and the changes to make. Out: files on disk that nothing refers to yet, inside an attempt of their own;
the commit is `ingest_job`'s. Rows are read, joined and written by Spark alone.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from math import ceil
from pathlib import Path
from urllib.parse import unquote
from zlib import crc32

import msgspec
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from flusher.manifest import SegmentFile
from spark_sink.changes import Changes, reachable, split_by_delete, verify_files
from spark_sink.columns import PARTITION, stats_json
from spark_sink.frames import paths_with_deleted, read_deletes, read_rows, without_deleted, write_rows
from spark_sink.table import NewFile, OpenTable, TableFile
from wal.errors import StorageFailed
from wal.failpoint import failpoint
from wal.files import make_directory, make_parents, sync_directory, sync_file, write_durably

# --- attempt ---
#
# One attempt to bring cuts into a table: a directory of new files, an intent beside it, and what a crash leaves of both.
#
# An attempt writes into a directory of its own inside the table, so that two jobs never share one and no file is ever
# moved. Its intent, an empty file of the same name in `_attempts`, is on disk before the directory and goes after the
# commit.
#
# | killed | left behind | the next ingest |
# |-------------------------|--------------------------------------|----------------------------------------------| | before
# the intent | nothing | takes the cuts | | between the two | the intent, maybe files nobody reads | takes the cuts; removes
# both once old | | after the commit | the intent of a committed attempt | finds the cuts taken; removes the intent |
#
# An intent counts as abandoned only when it is old and its attempt is not in the table's log: a job on another machine may
# still be writing. Delta's own vacuum never sees `_attempts`, because it starts with an underscore.


INTENTS = "_attempts"

ABANDONED_AGE_S = 3_600.0
"""An attempt this old without a commit is taken for dead; one cut of a laptop takes seconds, of a cluster minutes."""

FILE_THREADS = 4
"""Threads that read footers and sync files; more wait on the same disk."""

_NAME = re.compile(r"cut-\d{16}-[0-9a-f]{8}")


class Attempt:
    """The files one ingest writes for one commit. Use: `begin`, let Spark write to `directory`, `seal`, commit, `finish`."""

    def __init__(self, table: Path, name: str) -> None:
        self.name = name
        self._table = table
        self.directory = table / name
        self._intent = table / INTENTS / name

    @classmethod
    def begin(cls, table: Path, cut: int) -> "Attempt":
        """Return a new attempt to bring the table to `cut`; its intent is on disk."""
        attempt = cls(table, f"cut-{cut:016d}-{secrets.token_hex(4)}")
        make_parents(attempt._intent.parent)
        attempt._intent.touch(exist_ok=False)
        sync_directory(attempt._intent.parent)
        return attempt

    def seal(self) -> list[NewFile]:
        """Return what Spark wrote, on disk and ready to commit; files without rows and Hadoop's side files are gone."""
        if not self.directory.is_dir():
            return []
        written = sorted(self.directory.rglob("*.parquet"))
        with ThreadPoolExecutor(FILE_THREADS) as threads:
            sealed = list(threads.map(self._seal_file, written))
        for folder in sorted({path.parent for path in written} | {self.directory, self._table}):
            for side_file in folder.glob(".*.crc"):
                side_file.unlink()
            sync_directory(folder)
        return [file for file in sealed if file is not None]

    def finish(self) -> None:
        """Forget the intent; only after the commit is on disk."""
        self._intent.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove what was written; only for an attempt that is known not to be committed."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._intent.unlink(missing_ok=True)

    def _seal_file(self, path: Path) -> NewFile | None:
        footer = pq.read_metadata(path)
        if footer.num_rows == 0:
            path.unlink()
            return None
        sync_file(path)
        failpoint("ingest.file_synced")
        partition = unquote(path.parent.name.removeprefix(f"{PARTITION}="))
        relative = path.relative_to(self._table).as_posix()
        return NewFile(relative, path.stat().st_size, footer.num_rows, partition, stats_json(footer))


def sync_log(table: Path) -> None:
    """Return when the newest commit of a table is on disk: the Delta writer renames, but does not sync.

    Every commit is synced before the next one is made, whoever made it: a log with a hole cannot be read.
    """
    failpoint("ingest.log_syncing")
    log = table / "_delta_log"
    newest = [
        max(log.glob(pattern), default=None) for pattern in ("*.json", "*.checkpoint*.parquet", "_last_checkpoint")
    ]
    for path in filter(None, newest):
        sync_file(path)
    sync_directory(log)


def clean_up(table: OpenTable, now_s: Callable[[], float], *, abandoned_age_s: float = ABANDONED_AGE_S) -> int:
    """Remove what earlier attempts left, as the table above says, and return how many attempts' files were removed."""
    removed = 0
    for intent in sorted((table.path / INTENTS).glob("cut-*")):
        attempt = Attempt(table.path, intent.name)
        if table.has_attempt(intent.name):  # and its commit on disk: the table's log was synced when it was opened
            attempt.finish()
        elif now_s() - intent.stat().st_mtime >= abandoned_age_s:
            attempt.discard()
            removed += 1
    return removed


def holds_only_attempts(directory: Path) -> bool:
    """Whether a directory without a table holds nothing but what a killed first ingest leaves."""
    return all(entry.name in {INTENTS, "_delta_log"} or _NAME.fullmatch(entry.name) for entry in directory.iterdir())


# --- step ---
#
# The named points of an ingest between two effects on disk, so that a test can kill it at each.


class Step(Enum):
    """The points at which a killed job leaves a different disk behind."""

    CREATED = "created"
    """The empty table is in place."""
    INTENDED = "intended"
    """The intent is on disk, no data file yet."""
    WRITTEN = "written"
    """Spark has written the files; they may not be on disk."""
    SEALED = "sealed"
    """The files are on disk, nobody refers to them."""
    COMMITTED = "committed"
    """The commit is in the log."""
    FINISHED = "finished"
    """The commit is on disk and the intent is gone, the lease lags."""
    LEASED = "leased"
    """The lease is written."""
    RELEASED = "released"
    """A dropped collection's table has no lease any more."""
    RETIRED = "retired"
    """A dropped collection's table is renamed."""


OnStep = Callable[[Step], None]
"""Called at each step as it is reached; does nothing outside tests."""


FILE_BYTES_TARGET = 64 << 20
"""Size of a written file that readers split well and the log lists cheaply."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one commit and what they mean in rows; `attempt` is None when there was nothing to write."""

    adds: Sequence[NewFile]
    removes: Sequence[TableFile]
    rows_in: int
    attempt: Attempt | None

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, new ones and old ones."""
        before = self.rows_in + sum(file.rows or 0 for file in self.removes)
        return before - sum(file.rows for file in self.adds)


class CommitWriter:
    """Writes the files of one commit after another, for the tables of one node."""

    def __init__(self, spark: SparkSession, node: Path, on_step: OnStep) -> None:
        self._spark = spark
        self._node = node
        self._step = on_step

    def write(self, table: OpenTable, changes: Changes) -> Written:
        """Write the files that bring a table to the last cut of `changes`.

        Raises `Corrupt` or `Truncated` naming a file of the node that is not what its cut says, or not there; nothing is
        written then.
        """
        files = table.files(key=changes.entry.primary_key)
        dropped = [file for file in files if file.partition in changes.dropped_names]
        kept = [file for file in files if file.partition not in changes.dropped_names]
        rows_in = sum(segment.rows for segment in changes.segments)
        verify_files(self._node, changes.files)
        touched = self._touched(table, changes, reachable(kept, changes.deletes))
        if not changes.segments and not touched:
            return Written((), dropped, rows_in, None)
        attempt = Attempt.begin(table.path, changes.last.number)
        self._step(Step.INTENDED)
        size = sum(file.bytes for file in changes.segments) + sum(file.bytes for file in touched)
        write_rows(
            self._rows(table, changes, touched), attempt.directory, files_max=max(1, ceil(size / FILE_BYTES_TARGET))
        )
        self._step(Step.WRITTEN)
        adds = attempt.seal()
        self._step(Step.SEALED)
        return Written(adds, [*dropped, *touched], rows_in, attempt)

    def _touched(self, table: OpenTable, changes: Changes, candidates: Sequence[TableFile]) -> list[TableFile]:
        """Return the files of the table that hold a row to remove."""
        if not candidates:
            return []
        paths = {str(table.path.resolve() / file.path): file for file in candidates}
        schema, key = table.spark_schema, changes.entry.primary_key
        hit = paths_with_deleted(self._spark, schema, key, list(paths), self._deletes(table, changes))
        return [file for path, file in paths.items() if path in hit]

    def _rows(self, table: OpenTable, changes: Changes, touched: Sequence[TableFile]) -> DataFrame:
        schema = table.spark_schema
        reached, others = split_by_delete(changes.segments, changes.deletes)
        untouched_rows = read_rows(self._spark, schema, self._segment_paths(changes, others))
        if not reached and not touched:
            return untouched_rows
        paths = self._segment_paths(changes, reached)
        for file in touched:
            paths.setdefault(file.partition, []).append(str(table.path.resolve() / file.path))
        left = without_deleted(
            read_rows(self._spark, schema, paths), self._deletes(table, changes), changes.entry.primary_key
        )
        return left.unionAll(untouched_rows) if others else left

    def _deletes(self, table: OpenTable, changes: Changes) -> DataFrame:
        paths = [str(self._node.resolve() / file.path) for file in changes.deletes]
        rows = sum(file.rows for file in changes.deletes)
        return read_deletes(self._spark, table.spark_schema, changes.entry.primary_key, paths, rows=rows)

    def _segment_paths(self, changes: Changes, segments: Sequence[SegmentFile]) -> dict[str, list[str]]:
        root = self._node.resolve()
        return {
            name: [str(root / segment.path) for segment in found]
            for name, found in changes.of_partition(segments).items()
        }


# --- lease ---
#
# The lease of a table on its node: which cut it has taken, so that the node may delete what lies before.
#
# One file per table in `<node>/leases`, written only after the commit it speaks of is on disk, replaced whole. A lease may
# lag behind its table, which only keeps files longer; it never runs ahead.


LEASES = "leases"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one table has taken of one node."""

    table: str
    node_id: str
    collection_id: int
    cut: int
    tick: int


def lease_path(node: Path, table: Path) -> Path:
    """Return where the lease of a table lies; tables of one name in two places have a lease each."""
    return node / LEASES / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"


def write_lease(node: Path, lease: Lease) -> None:
    """Replace the table's lease; durable on return."""
    path = lease_path(node, Path(lease.table))
    make_directory(path.parent)
    write_durably(path, msgspec.json.encode(lease) + b"\n")


def check_writable(node: Path) -> None:
    """Raise `StorageFailed` where no lease could be written: a table would be ahead of a node that keeps files for ever."""
    place = node / LEASES if (node / LEASES).is_dir() else node
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageFailed(
            f"an ingest writes its lease into {place}, which this user may not — run it as the node's user, "
            f"or let a group of both write to {node / LEASES}"
        )


def release(node: Path, table: Path) -> None:
    """Give up a table's lease: it takes no more cuts of this node."""
    path = lease_path(node, table)
    if path.exists():
        path.unlink()
        sync_directory(path.parent)
