"""What an ingest puts on disk around a table's commit: an attempt with its files, and the lease on
the node.

An attempt writes into a directory of its own inside the table, so that two jobs never share one and
no file is ever moved. Its intent, an empty file of the same name in `_attempts`, is on disk before
the directory and goes after the commit. Delta's own vacuum never sees `_attempts`, because it
starts with an underscore.

| killed | left behind | the next ingest |
|---|---|---|
| before the intent | nothing | takes the cuts |
| between the two | the intent, maybe files nobody reads | takes the cuts; removes both once old |
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
"""An attempt this old without a commit is taken for dead; one cut of a laptop takes seconds, of a
cluster minutes.
"""

FILE_BYTES_TARGET = 64 << 20
"""Size of a written file that readers split well and the log lists cheaply."""

GROWN_ROWS = 1 << 16
GROWN_BYTES = FILE_BYTES_TARGET // 4
"""A file of a table that has so many rows or bytes takes no others when it is rewritten. Else the
one whose keys change now would grow into the whole table, and every cut would rewrite all of it."""
APART_MAX = 16
"""So many grown files are rewritten each for itself; more of them, of keys of all ages, become
files of the target size.
"""

DELETES_LOOKED_UP_MAX = 4 << 20
"""Deleted keys whose rows are looked for by this process; of more, every file that may have one of
them is rewritten.
"""

FILE_THREADS = 4
"""Threads that read footers and sync files; more wait on the same disk."""

COPIED_FILES_MAX = 64
"""Files that one commit copies; more of them, those of many cuts, are small, and Spark makes few of
them.
"""

_NAME = re.compile(r"cut-\d{16}-[0-9a-f]{8}")


class Road(Enum):
    """How the rows of some cuts get into a table."""

    NONE = "none"
    """No row of theirs does."""
    COPY = "copy"
    """The node's own files become the table's."""
    SPARK = "spark"
    """Spark reads the node's files and the table's, and writes new ones."""


class Attempt:
    """The files one ingest writes for one commit. Use: `begin`, let Spark write to `directory`,
    `seal`, commit, `finish`.
    """

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
        """Return what Spark wrote, on disk and ready to commit; files without rows and Hadoop's
        side files are gone.

        Raises `StorageFailed` when it wrote somewhere else: the commit would say that these cuts
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
        """Forget the intent; only after the commit is on disk, or once nothing is left."""
        self._intent.unlink(missing_ok=True)

    @contextmanager
    def undone_on_error(self, table: OpenTable, *, by: Road | None = None) -> Iterator[None]:
        """Remove what was written when the block fails, so that a full disk has the room again; not
        what is committed.

        Of Spark the intent stays: its tasks may be at work for a while, and what they write goes
        once it is old.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt):
            with suppress(Exception):  # the log alone tells: where it cannot be read the files stay
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
    """Remove what earlier attempts left, as the table above says."""
    intents = sorted((table.path / INTENTS).glob("cut-*"))
    # on disk: the table's log was synced when it was opened
    committed = table.attempts() if intents else frozenset()
    for intent in intents:
        if intent.name not in committed:
            if time.time() - intent.stat().st_mtime < ABANDONED_AGE_S:
                continue
            shutil.rmtree(table.path / intent.name, ignore_errors=True)
        intent.unlink(missing_ok=True)


def holds_only_attempts(directory: Path) -> bool:
    """Whether a directory without a table holds nothing but what a killed first ingest leaves."""
    return all(
        entry.name in {INTENTS, "_delta_log"} or _NAME.fullmatch(entry.name)
        for entry in directory.iterdir()
    )


def sync_log(table: Path) -> None:
    """Return when the newest commit of a table is on disk: the Delta writer renames, but does not
    sync.

    Every commit is synced before the next one is made, whoever made it: a log with a hole cannot be
    read.
    """
    failpoint("ingest.log_syncing")
    log = table / "_delta_log"
    for pattern in ("*.json", "*.checkpoint*.parquet", "_last_checkpoint"):
        if (newest := max(log.glob(pattern), default=None)) is not None:
            sync_file(newest)
    sync_directory(log)


def _has_types_of(table: OpenTable, changes: Changes) -> bool:
    """Whether the files of a collection have the columns of its table; a time in milliseconds, for
    one, has not.
    """
    stored = [(field.name, field.type) for field in stored_schema(arrow_schema(changes.entry))]
    return stored == [(field.name, field.type) for field in table.schema if field.name != PARTITION]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of one commit and what they mean in rows; `attempt` is None when there was nothing
    to write.
    """

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
    """Write the files that bring a table to the last cut of `changes`; nothing refers to them
    before the commit.

    Rows move by one road. Raises `Corrupt` or `Truncated` naming a file of the node that is not
    what its cut says, or not there; the table has nothing of it then.
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
    # Java has the working directory that this process had when it started: relative paths are other
    # ones there.
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
    """Return the files of a table that have a deleted row, the node's that may have one, and the
    node's others.

    Where no row is deleted, all are others. Two columns tell, without Spark: many upserts are of
    keys that are new.
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
    """Make the node's segments files of an attempt, each checked against its cut while it is
    read.
    """
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
    """Write the rows of the node's files and of the touched ones that no delete removes; Spark
    alone moves them.
    """
    spark = sessions.get()
    root = node.resolve()
    schema = table.spark_schema

    def segment_paths(segments: Sequence[SegmentFile]) -> dict[str, list[Path]]:
        return {
            name: [root / each.path for each in found]
            for name, found in changes.of_partition(segments).items()
        }

    @cache  # some cuts have none
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
    """Return which grown files are rewritten together, most of them alone, and the others, with
    which new rows go.
    """
    grown = list[TableFile]()
    small = list[TableFile]()
    for file in files:
        (grown if file.bytes >= GROWN_BYTES or (file.rows or 0) >= GROWN_ROWS else small).append(
            file
        )
    return [[file] for file in grown] if len(grown) <= APART_MAX else [grown], small
