"""What an ingest puts on disk around a table's commit: an attempt with its files, and the lease on the node.

An attempt writes into a directory of its own inside the table, so that two jobs never share one and no file is ever moved.
Its intent, an empty file of the same name in `_attempts`, is on disk before the directory and goes after the commit. Delta's
own vacuum never sees `_attempts`, because it starts with an underscore.

| killed | left behind | the next ingest |
|---|---|---|
| before the intent | nothing | takes the cuts |
| between the two | the intent, maybe files nobody reads | takes the cuts; removes both once old |
| after the commit | the intent of a committed attempt | finds the cuts taken; removes the intent |

An intent counts as abandoned only when it is old and its attempt is not in the table's log: a job on another machine may
still be writing.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from math import ceil
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from flusher.directory import check_file, measure_file
from flusher.manifest import SegmentFile, arrow_schema, stored_schema
from spark_sink.changes import Changes, split_by_delete, verify_file, verify_files
from spark_sink.columns import PARTITION, TableFile, stats_json
from spark_sink.runtime import LazySession
from spark_sink.table import NewFile, OpenTable
from spark_sink.tables import paths_with_deleted, read_deletes, read_rows, without_deleted, write_rows
from wal.errors import StorageFailed
from wal.failpoint import failpoint
from wal.files import make_parents, place_beneath, sync_directory, sync_file

INTENTS = "_attempts"

ABANDONED_AGE_S = 3_600
"""An attempt this old without a commit is taken for dead; one cut of a laptop takes seconds, of a cluster minutes."""

FILE_BYTES_TARGET = 64 << 20
"""Size of a written file that readers split well and the log lists cheaply."""

GROWN_ROWS, GROWN_BYTES = 1 << 16, FILE_BYTES_TARGET // 4
"""A file of a table that has so many rows or bytes takes no others when it is rewritten. Else the one whose keys change now
would grow into the whole table, and every cut would rewrite all of it."""
APART_MAX = 16
"""So many grown files are rewritten each for itself; more of them, of keys of all ages, become files of the target size."""

FILE_THREADS = 4
"""Threads that read footers and sync files; more wait on the same disk."""

COPIED_FILES_MAX = 64
"""Files that one commit copies; more of them, those of many cuts, are small, and Spark makes few of them."""

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
        """Return what Spark wrote, on disk and ready to commit; files without rows and Hadoop's side files are gone.

        Raises `StorageFailed` when it wrote somewhere else: the commit would say that these cuts have no rows.
        """
        if not self.directory.is_dir():
            raise StorageFailed(
                f"nothing was written to {self.directory} — let Spark write to the disk of this process"
            )
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

    @contextmanager
    def undone_on_error(self, table: OpenTable) -> Iterator[None]:
        """Remove what was written when the block fails, so that a full disk has the room again; not what is committed."""
        try:
            yield
        except Exception:
            with suppress(Exception):  # the log alone tells: where it cannot be read the files stay, and their intent
                if not table.at_version().has_attempt(self.name):
                    self.discard()
            raise

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


def clean_up(table: OpenTable) -> None:
    """Remove what earlier attempts left, as the table above says."""
    for intent in sorted((table.path / INTENTS).glob("cut-*")):
        attempt = Attempt(table.path, intent.name)
        if table.has_attempt(intent.name):  # and its commit on disk: the table's log was synced when it was opened
            attempt.finish()
        elif time.time() - intent.stat().st_mtime >= ABANDONED_AGE_S:
            attempt.discard()


def holds_only_attempts(directory: Path) -> bool:
    """Whether a directory without a table holds nothing but what a killed first ingest leaves."""
    return all(entry.name in {INTENTS, "_delta_log"} or _NAME.fullmatch(entry.name) for entry in directory.iterdir())


def sync_log(table: Path) -> None:
    """Return when the newest commit of a table is on disk: the Delta writer renames, but does not sync.

    Every commit is synced before the next one is made, whoever made it: a log with a hole cannot be read.
    """
    failpoint("ingest.log_syncing")
    log = table / "_delta_log"
    for pattern in ("*.json", "*.checkpoint*.parquet", "_last_checkpoint"):
        if (newest := max(log.glob(pattern), default=None)) is not None:
            sync_file(newest)
    sync_directory(log)


class Road(Enum):
    """How the rows of some cuts get into a table."""

    NONE = "none"
    """No row of theirs does."""
    COPY = "copy"
    """The node's own files become the table's."""
    SPARK = "spark"
    """Spark reads the node's files and the table's, and writes new ones."""


def road_of(table: OpenTable, changes: Changes, *, rewrites: bool) -> Road:
    """Return the road of some cuts into a table; `rewrites` says that a delete reaches a row of theirs, or one before."""
    if not rewrites and not changes.segments:
        return Road.NONE
    copies = not rewrites and len(changes.segments) <= COPIED_FILES_MAX and _has_types_of(table, changes)
    return Road.COPY if copies else Road.SPARK


def _has_types_of(table: OpenTable, changes: Changes) -> bool:
    """Whether the files of a collection have the columns of its table; a time in milliseconds, for one, has not."""
    stored = [(field.name, field.type) for field in stored_schema(arrow_schema(changes.entry))]
    return stored == [(field.name, field.type) for field in table.schema if field.name != PARTITION]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one commit and what they mean in rows; `attempt` is None when there was nothing to write."""

    adds: Sequence[NewFile]
    removes: Sequence[TableFile]
    rows_in: int
    attempt: Attempt | None
    road: Road

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, new ones and old ones."""
        before = self.rows_in + sum(file.rows or 0 for file in self.removes)
        return before - sum(file.rows for file in self.adds)


def write_files(
    sessions: LazySession, node: Path, table: OpenTable, changes: Changes, *, link: bool = False
) -> Written:
    """Write the files that bring a table to the last cut of `changes`; nothing refers to them before the commit.

    Rows move by the one road that `road_of` names. Raises `Corrupt` or `Truncated` naming a file of the node that is not
    what its cut says, or not there; the table has nothing of it then.
    """
    files = table.files(key=changes.entry.primary_key) if changes.deletes or changes.dropped_names else []
    dropped = [file for file in files if file.partition in changes.dropped_names]
    kept = [file for file in files if file.partition not in changes.dropped_names]
    rows_in = sum(segment.rows for segment in changes.segments)
    verify_files(node, changes.deletes)
    touched = _touched(sessions, node, table, changes, kept)
    reached, others = split_by_delete(changes.segments, changes.deletes)
    road = road_of(table, changes, rewrites=bool(reached or touched))
    if road is Road.NONE:
        return Written((), dropped, rows_in, None, road)
    if road is Road.SPARK:
        verify_files(node, changes.segments)
    # Java has the working directory that this process had when it started: relative paths are other ones there.
    attempt = Attempt.begin(table.path.resolve(), changes.last.number)
    failpoint("ingest.intended")
    if road is Road.SPARK:  # a job that fails removes its files itself, and its tasks may be at work for a while
        _write_by_spark(sessions, node, table, changes, attempt, reached=reached, others=others, touched=touched)
    with attempt.undone_on_error(table):
        if road is Road.COPY:
            _copy_files(node, attempt, changes, link=link)
        failpoint("ingest.written")
        adds = attempt.seal()
        failpoint("ingest.sealed")
        written, before = sum(file.rows for file in adds), sum(file.rows or 0 for file in touched)
        if not sum(file.rows for file in others) <= written <= rows_in + before:
            raise StorageFailed(f"{attempt.directory} has {written} rows of {rows_in} — run the ingest again")
    return Written(adds, [*dropped, *touched], rows_in, attempt, road)


# --- by copying


def _copy_files(node: Path, attempt: Attempt, changes: Changes, *, link: bool) -> None:
    """Make the node's segments files of an attempt, each checked against its cut while it is read."""
    places = [
        (file, attempt.directory / f"{PARTITION}={name}" / f"{file.segment_id}.parquet")
        for name, found in changes.of_partition(changes.segments).items()
        for file in found
    ]
    for folder in {place.parent for _, place in places}:
        folder.mkdir(parents=True)
    with ThreadPoolExecutor(FILE_THREADS) as threads:
        list(threads.map(lambda each: _copy_file(node, *each, link=link), places))


def _copy_file(node: Path, file: SegmentFile, target: Path, *, link: bool) -> None:
    source = place_beneath(node, file.path)
    if link:
        verify_file(node, file)
        with suppress(OSError):  # on another file system, or one without links: it is copied
            os.link(source, target)
            return
    try:
        with target.open("xb") as copy:
            length, checksum = measure_file(source, expected_bytes=file.bytes, take=copy.write)
    except FileNotFoundError:
        verify_file(node, file)  # says whether retention took it
        raise
    check_file(source, file, length, checksum)


# --- by Spark


def _touched(
    sessions: LazySession, node: Path, table: OpenTable, changes: Changes, kept: Sequence[TableFile]
) -> list[TableFile]:
    """Return the files of a table that hold a row which a delete removes; Spark looks into those that may."""
    reachable, _ = split_by_delete(kept, changes.deletes)
    candidates = {str(table.path.resolve() / each.path): each for each in reachable}
    if not candidates:
        return []
    spark, schema, key = sessions.get(), table.spark_schema, changes.entry.primary_key
    hit = paths_with_deleted(spark, schema, key, list(candidates), _deletes(sessions, node, table, changes))
    return [file for path, file in candidates.items() if path in hit]


def _deletes(sessions: LazySession, node: Path, table: OpenTable, changes: Changes) -> DataFrame:
    paths = [str(node.resolve() / file.path) for file in changes.deletes]
    rows = sum(file.rows for file in changes.deletes)
    return read_deletes(sessions.get(), table.spark_schema, changes.entry.primary_key, paths, rows=rows)


def _write_by_spark(
    sessions: LazySession,
    node: Path,
    table: OpenTable,
    changes: Changes,
    attempt: Attempt,
    *,
    reached: Sequence[SegmentFile],
    others: Sequence[SegmentFile],
    touched: Sequence[TableFile],
) -> None:
    """Write the rows of the node's files and of the touched ones that no delete removes; Spark alone moves them."""
    spark, root, schema = sessions.get(), node.resolve(), table.spark_schema

    def segment_paths(segments: Sequence[SegmentFile]) -> dict[str, list[str]]:
        return {
            name: [str(root / each.path) for each in found] for name, found in changes.of_partition(segments).items()
        }

    deletes = cache(partial(_deletes, sessions, node, table, changes))  # some cuts have none

    def left_of(files: Sequence[TableFile], segments: Sequence[SegmentFile] = ()) -> DataFrame:
        paths = segment_paths(segments)
        for file in files:
            paths.setdefault(file.partition, []).append(str(table.path.resolve() / file.path))
        return without_deleted(read_rows(spark, schema, paths), deletes(), changes.entry.primary_key)

    grown, small = split_by_size(touched)
    rows = read_rows(spark, schema, segment_paths(others))
    if reached or small:
        left = left_of(small, reached)
        rows = left.unionAll(rows) if others else left
    parts: list[tuple[DataFrame, Sequence[TableFile | SegmentFile]]] = [(rows, [*changes.segments, *small])]
    parts += [(left_of(files), files) for files in grown]
    write_rows([(rows, _files_max(files)) for rows, files in parts if files], attempt.directory)


def split_by_size(files: Sequence[TableFile]) -> tuple[list[list[TableFile]], list[TableFile]]:
    """Return which grown files are rewritten together, most of them alone, and the others, with which new rows go."""
    grown, small = list[TableFile](), list[TableFile]()
    for file in files:
        (grown if file.bytes >= GROWN_BYTES or (file.rows or 0) >= GROWN_ROWS else small).append(file)
    return [[file] for file in grown] if len(grown) <= APART_MAX else [grown], small


def _files_max(files: Sequence[TableFile | SegmentFile]) -> int:
    return ceil(sum(file.bytes for file in files) / FILE_BYTES_TARGET)
