"""What an ingest writes around a table's commit: attempts with their files, copied or written by
Spark.

An attempt writes into its own directory inside the table, so two jobs never share one and no file
is moved. Its intent, an empty file of the same name in `_attempts`, is durable before the directory
exists and is removed after the commit. Delta's vacuum ignores `_attempts`, because the name starts
with an underscore.

| killed | left behind | the next ingest |
|---|---|---|
| before the intent | nothing | takes the cuts |
| before the commit | the intent, maybe unused files | takes the cuts; removes both once old |
| after the commit | the intent of a committed attempt | finds the cuts taken; removes the intent |

An intent counts as abandoned only when it is old and its attempt is not in the table's log: a job
on another machine may still be writing.
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
from functools import cache
from math import ceil
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from flusher.directory import check_file, measure_file
from flusher.manifest import OFFSET, DataFile, SegmentFile, arrow_schema, stored_schema
from flusher.selection import deleted_in, without
from spark_sink.changes import Changes, split_by_delete, verify_file, verify_files
from spark_sink.columns import PARTITION, TableFile, shaped, stats_json
from spark_sink.runtime import LazySession
from spark_sink.table import NewFile, OpenTable
from spark_sink.tables import read_deletes, read_rows, without_deleted, write_rows
from wal.errors import StorageFailed
from wal.failpoint import failpoint
from wal.files import make_parents, place_beneath, sync_directory, sync_file

INTENTS = "_attempts"

ABANDONED_AGE_S = 3_600
"""An attempt of this age without a commit counts as dead: a cut takes seconds on a laptop, minutes
on a cluster.
"""

FILE_BYTES_TARGET = 64 << 20
"""Size of a written file: readers split it well, and few files keep the log short."""

GROWN_ROWS = 1 << 16
GROWN_BYTES = FILE_BYTES_TARGET // 4
"""A table file with this many rows or bytes is rewritten without others. Otherwise a file whose
keys change now would grow into the whole table, and every cut would rewrite all of it.
"""
APART_MAX = 16
"""Up to this many grown files are rewritten one by one. More of them, with keys of all ages, are
rewritten together into files of the target size.
"""

DELETES_LOOKED_UP_MAX = 4 << 20
"""This process searches the rows of at most this many deleted keys. With more, every file that may
have one of them is rewritten.
"""

FILE_THREADS = 4
"""Threads that read footers and sync files; more would wait for the same disk."""

COPIED_FILES_MAX = 64
"""Files that one commit copies. More files, which come from many cuts, are small, and Spark merges
them into few.
"""

_NAME = re.compile(r"cut-\d{16}-[0-9a-f]{8}")


class Road(Enum):
    """How the rows of some cuts get into a table."""

    NONE = "none"
    """No rows are added."""
    COPY = "copy"
    """The node's own files become the table's."""
    SPARK = "spark"
    """Spark reads the node's files and the table's, and writes new ones."""


class Attempt:
    """The files that one ingest writes for one commit.

    Use: `begin`, let Spark write to `directory`, `seal`, commit, `finish`.
    """

    def __init__(self, table: Path, name: str) -> None:
        self.name = name
        self._table = table
        self.directory = table / name
        self._intent = table / INTENTS / name

    @classmethod
    def begin(cls, table: Path, cut: int) -> "Attempt":
        """Return a new attempt to bring the table to `cut`; its intent is durable."""
        attempt = cls(table, f"cut-{cut:016d}-{secrets.token_hex(4)}")
        make_parents(attempt._intent.parent)
        attempt._intent.touch(exist_ok=False)
        sync_directory(attempt._intent.parent)
        return attempt

    def seal(self) -> list[NewFile]:
        """Make the files that Spark wrote durable and return them, ready to commit. Removes empty
        files and Hadoop's side files.

        Raises `StorageFailed` when Spark wrote elsewhere: the commit would claim that these cuts
        have no rows.
        """
        if not self.directory.is_dir():
            raise StorageFailed(
                f"nothing was written to {self.directory} — let Spark write to the disk of this "
                "process"
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
        """Remove the intent; only after the commit is durable, or once no file is left."""
        self._intent.unlink(missing_ok=True)

    @contextmanager
    def undone_on_error(self, table: OpenTable, *, by: Road | None = None) -> Iterator[None]:
        """Remove the attempt's files when the block fails, which frees their space on a full disk;
        committed files stay.

        The intent stays when Spark wrote: its tasks may go on for a while, and a later ingest
        removes what they write once it is old.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt):
            # only the log shows whether they are committed: if it is unreadable, the files stay
            with suppress(Exception):
                if self.name not in table.at_version().attempts():
                    shutil.rmtree(self.directory, ignore_errors=True)
                    if by is not Road.SPARK:
                        self.finish()
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
        return NewFile(
            relative, path.stat().st_size, footer.num_rows, partition, stats_json(footer)
        )


def clean_up(table: OpenTable) -> None:
    """Remove what earlier attempts left, as in the module's table."""
    intents = sorted((table.path / INTENTS).glob("cut-*"))
    # durable, as the table's log was synced when it was opened
    committed = table.attempts() if intents else frozenset()
    for intent in intents:
        if intent.name not in committed:
            if time.time() - intent.stat().st_mtime < ABANDONED_AGE_S:
                continue
            shutil.rmtree(table.path / intent.name, ignore_errors=True)
        intent.unlink(missing_ok=True)


def holds_only_attempts(directory: Path) -> bool:
    """Return whether a directory without a table has only what a killed first ingest leaves."""
    return all(
        entry.name in {INTENTS, "_delta_log"} or _NAME.fullmatch(entry.name)
        for entry in directory.iterdir()
    )


def sync_log(table: Path) -> None:
    """Make the newest commit of a table durable: the Delta writer renames, but does not sync.

    Every commit is synced before the next one, including commits by others: a log with a hole is
    unreadable.
    """
    failpoint("ingest.log_syncing")
    log = table / "_delta_log"
    for pattern in ("*.json", "*.checkpoint*.parquet", "_last_checkpoint"):
        if (newest := max(log.glob(pattern), default=None)) is not None:
            sync_file(newest)
    sync_directory(log)


def _has_types_of(table: OpenTable, changes: Changes) -> bool:
    """Return whether the node's files have the column types of the table; for example, times in
    milliseconds do not.
    """
    stored = [(field.name, field.type) for field in stored_schema(arrow_schema(changes.entry))]
    return stored == [(field.name, field.type) for field in table.schema if field.name != PARTITION]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one commit and their row counts; `attempt` is None when no file was written."""

    adds: Sequence[NewFile]
    removes: Sequence[TableFile]
    rows_in: int
    attempt: Attempt | None
    road: Road

    @property
    def rows_deleted(self) -> int:
        """Rows that deletes and dropped partitions removed, from the table and from the new
        segments.
        """
        before = self.rows_in + sum(file.rows or 0 for file in self.removes)
        return before - sum(file.rows for file in self.adds)


def write_files(
    sessions: LazySession, node: Path, table: OpenTable, changes: Changes, *, link: bool = False
) -> Written:
    """Write the files that bring a table to the last cut of `changes`; nothing refers to them
    before the commit.

    All rows go one road. Raises `Corrupt` or `Truncated` for a file of the node that is damaged or
    missing; the table is then unchanged.
    """
    files = (
        table.files(key=changes.entry.primary_key)
        if changes.deletes or changes.dropped_names
        else []
    )
    dropped = [file for file in files if file.partition in changes.dropped_names]
    kept = [file for file in files if file.partition not in changes.dropped_names]
    rows_in = sum(segment.rows for segment in changes.segments)
    verify_files(node, changes.deletes)
    touched, reached, others = _reached(node, table, changes, kept)
    rewrites = bool(touched or reached)
    if not rewrites and not changes.segments:
        return Written((), dropped, rows_in, None, Road.NONE)
    copies = (
        not rewrites and len(changes.segments) <= COPIED_FILES_MAX and _has_types_of(table, changes)
    )
    road = Road.COPY if copies else Road.SPARK
    if road is Road.SPARK:
        verify_files(node, others)
    # Resolve the path: Java keeps the working directory that this process had when Java started, so
    # relative paths would differ.
    attempt = Attempt.begin(table.path.resolve(), changes.last.number)
    failpoint("ingest.intended")
    with attempt.undone_on_error(table, by=road):
        if road is Road.SPARK:
            _write_by_spark(
                sessions,
                node,
                table,
                changes,
                attempt,
                reached=reached,
                others=others,
                touched=touched,
            )
        else:
            _copy_files(node, attempt, changes, link=link)
        failpoint("ingest.written")
        adds = attempt.seal()
        failpoint("ingest.sealed")
        written = sum(file.rows for file in adds)
        before = sum(file.rows or 0 for file in touched)
        if not sum(file.rows for file in others) <= written <= rows_in + before:
            raise StorageFailed(
                f"{attempt.directory} has {written} rows of {rows_in} — run the ingest again"
            )
    return Written(adds, [*dropped, *touched], rows_in, attempt, road)


def _reached(
    node: Path, table: OpenTable, changes: Changes, kept: Sequence[TableFile]
) -> tuple[Sequence[TableFile], Sequence[SegmentFile], Sequence[SegmentFile]]:
    """Return the table's files with a deleted row, the node's files that may have one, and the
    node's other files.

    Without a deleted row all of the node's files are in the last group. This reads two columns
    without Spark: many upserts have only new keys.
    """
    near, _ = split_by_delete(kept, changes.deletes)
    new, others = split_by_delete(changes.segments, changes.deletes)
    verify_files(node, new)
    if not near and not new:
        return (), (), others
    if sum(file.rows for file in changes.deletes) > DELETES_LOOKED_UP_MAX:
        return near, new, others
    key = changes.entry.primary_key
    columns = pa.schema([table.schema.field(key), pa.field(OFFSET, pa.int64())])

    def of_node(file: DataFile) -> pa.Table:
        path = place_beneath(node, file.path)
        with pq.ParquetFile(path, page_checksum_verification=True) as content:
            return shaped(content.read(columns.names), columns)

    deleted = deleted_in([of_node(file) for file in changes.deletes], key=key)

    def is_hit(rows: pa.Table) -> bool:
        return without(rows, deleted, key=key).num_rows < rows.num_rows

    touched = [
        file for file in near if is_hit(shaped(table.read_file(file, columns=columns), columns))
    ]
    if touched or any(is_hit(of_node(file)) for file in new):
        return touched, new, others
    return (), (), changes.segments


# --- by copying


def _copy_files(node: Path, attempt: Attempt, changes: Changes, *, link: bool) -> None:
    """Copy or link the node's segments into an attempt, each checked against its cut."""
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
        with suppress(OSError):  # another file system, or one without links: copy
            os.link(source, target)
            return
    try:
        with target.open("xb") as copy:
            length, checksum = measure_file(source, expected_bytes=file.bytes, take=copy.write)
    except FileNotFoundError:
        verify_file(node, file)  # raises whether retention removed it
        raise
    check_file(source, file, length, checksum)


# --- by Spark


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
    """Write the rows of the node's files and of the touched table files without those that deletes
    remove, by Spark only.
    """
    spark = sessions.get()
    root = node.resolve()
    schema = table.spark_schema

    def segment_paths(segments: Sequence[SegmentFile]) -> dict[str, list[Path]]:
        return {
            name: [root / each.path for each in found]
            for name, found in changes.of_partition(segments).items()
        }

    @cache  # cached, and never called when no row is deleted
    def deletes() -> DataFrame:
        paths = [root / file.path for file in changes.deletes]
        count = sum(file.rows for file in changes.deletes)
        return read_deletes(spark, schema, changes.entry.primary_key, paths, rows=count)

    def left_of(files: Sequence[TableFile], segments: Sequence[SegmentFile] = ()) -> DataFrame:
        paths = segment_paths(segments)
        for file in files:
            paths.setdefault(file.partition, []).append(table.place_of(file))
        return without_deleted(
            read_rows(spark, schema, paths), deletes(), changes.entry.primary_key
        )

    grown, small = split_by_size(touched)
    rows = read_rows(spark, schema, segment_paths(others))
    if reached or small:
        left = left_of(small, reached)
        rows = left.unionAll(rows) if others else left
    parts: list[tuple[DataFrame, Sequence[TableFile | SegmentFile]]] = [
        (rows, [*changes.segments, *small])
    ]
    parts += [(left_of(files), files) for files in grown]
    sized = [
        (rows, ceil(sum(file.bytes for file in files) / FILE_BYTES_TARGET))
        for rows, files in parts
        if files
    ]
    write_rows(sized, attempt.directory)


def split_by_size(files: Sequence[TableFile]) -> tuple[list[list[TableFile]], list[TableFile]]:
    """Return the groups of grown files to rewrite together, usually one file each, and the small
    files, which take the new rows.
    """
    grown = list[TableFile]()
    small = list[TableFile]()
    for file in files:
        (grown if file.bytes >= GROWN_BYTES or (file.rows or 0) >= GROWN_ROWS else small).append(
            file
        )
    return [[file] for file in grown] if len(grown) <= APART_MAX else [grown], small
