"""Keeps a table that takes a cut every few seconds small: few files, a short log, no file that no
version needs.

Small files are merged by copying their rows, in a separate commit that is marked as changing no
data. A merge is an attempt like an ingest's, with the same crash points. It writes without the
table's lock, so that ingests go on; only the commit takes the lock, and it is abandoned when one of
the files has been replaced meanwhile. Spark is not used, as it takes a JVM to copy. Delta's
`OPTIMIZE` is not used, as it syncs nothing: a power cut would lose rows that were durable before.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import groupby, takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spark_sink.changes import batches
from spark_sink.columns import PARTITION, TableFile, shaped
from spark_sink.commit import ABANDONED_AGE_S, FILE_BYTES_TARGET, INTENTS, Attempt, sync_log
from spark_sink.ingestion import table_lock
from spark_sink.table import CommitConflict, OpenTable
from wal.errors import StorageFailed
from wal.failpoint import failpoint

SMALL_FILE_BYTES = FILE_BYTES_TARGET // 4
"""Files of at least this size are not merged: parallel reads are worth more than fewer files."""
SMALL_FILES_MAX = 64
"""Small files of one partition before they are merged; with a cut every 2 s, every 2 minutes."""
NEWEST_FILES = 4
"""The newest files of a partition are not merged: keys that were just written change most, and each
change rewrites their file.
"""
ROW_GROUP_BYTES = 64 << 20
"""Bytes of rows in memory at a time, in Arrow's format."""


def small_files(files: Sequence[TableFile]) -> Iterator[Sequence[TableFile]]:
    """Yield the files of each partition that are due to be merged, smallest first, together at most
    `FILE_BYTES_TARGET`.

    A file that is larger than all smaller ones together waits for more of them, so a row is copied
    a few times in total, not once in 64 cuts. A partition has at most `SMALL_FILES_MAX` small files
    beside the newest, and at most 24 more, each twice as large as the one before.
    """
    order = sorted(files, key=lambda file: (file.partition, file.bytes, file.path))
    for _, found in groupby(
        (file for file in order if file.bytes < SMALL_FILE_BYTES), key=lambda file: file.partition
    ):
        group = list(found)
        for newest in nlargest(NEWEST_FILES, group, key=lambda file: file.tick_min or 0):
            group.remove(newest)
        while len(group) >= SMALL_FILES_MAX and group[-1].bytes > sum(
            file.bytes for file in group[:-1]
        ):
            group.pop()
        if len(group) >= SMALL_FILES_MAX:
            while sum(file.bytes for file in group) > FILE_BYTES_TARGET:
                group.pop()
            yield group


def compact(table: OpenTable, *, is_stopping: Callable[[], bool] = lambda: False) -> int:
    """Merge the small files of each partition that has many; return the decrease in the number of
    files.

    Once `is_stopping` is true, no further merge begins. Readers of an older version find its files
    until `remove_unused` removes them. Blocks; can be killed anywhere.
    """
    removed = 0
    for files in takewhile(lambda _: not is_stopping(), small_files(table.files())):
        attempt = Attempt.begin(table.path, table.watermark.cut)
        failpoint("compact.intended")
        with suppress(CommitConflict), attempt.undone_on_error(table):
            _merge(
                table,
                files,
                attempt.directory / f"{PARTITION}={files[0].partition}" / "compacted.parquet",
            )
            failpoint("compact.written")
            adds = attempt.seal()
            if sum(file.rows for file in adds) < sum(file.rows or 0 for file in files):
                raise StorageFailed(
                    f"rows in {attempt.directory} were removed by another tool — run it again"
                )
            with table_lock(table.path.parent, table.path.name):
                newest = table.at_version()
                if newest.identity != table.identity:  # dropped and created again
                    raise CommitConflict(f"{table.path} is another table now")
                sync_log(table.path)
                newest.compact(adds=adds, removes=files, attempt=attempt.name)
                failpoint("compact.committed")
                sync_log(table.path)
            attempt.finish()
            removed += len(files) - len(adds)
    return removed


def _merge(table: OpenTable, files: Sequence[TableFile], target: Path) -> None:
    schema = table.schema.remove(table.schema.get_field_index(PARTITION))
    target.parent.mkdir(parents=True)
    ordered = sorted(files, key=lambda file: (file.offset_min or 0, file.path))
    given = (shaped(table.read_file(file), schema, partition=file.partition) for file in ordered)
    # statistics of floating-point columns leave out NaN
    ranged = [field.name for field in schema if not pa.types.is_floating(field.type)]
    with pq.ParquetWriter(
        target, schema, compression="zstd", write_page_checksum=True, write_statistics=ranged
    ) as writer:
        for rows in batches(given, lambda each: each.nbytes, bytes_max=ROW_GROUP_BYTES):
            writer.write_table(pa.concat_tables(rows))


def keep_versions(table: OpenTable, seconds: int) -> None:
    """Let the table's log remove versions older than `seconds`; younger ones stay readable."""
    with table_lock(table.path.parent, table.path.name):
        sync_log(table.path)
        table.at_version().keep(seconds, unused_s=max(seconds, ABANDONED_AGE_S))
        sync_log(table.path)


def remove_unused(table: OpenTable) -> None:
    """Remove files of attempts that no version in the log needs; attempts under way stay."""
    # The order matters: an attempt in `attempts` without an intent has been committed, and is in
    # the log, or discarded.
    attempts = sorted(path for path in table.path.glob("cut-*") if path.is_dir())
    kept = {path.name for path in (table.path / INTENTS).glob("cut-*")}
    newest = table.at_version()
    versions = list(newest.history())
    kept |= {version.note.attempt for version in versions}
    # Files of the earliest version were added by commits that are no longer in the log; `versions`
    # has all later commits.
    needed = {
        file.path
        for each in (versions[-1].version, newest.version)
        for file in newest.at_version(each).files()
    }
    for attempt in [path for path in attempts if path.name not in kept]:
        files = sorted(attempt.rglob("*.parquet"))
        unused = [path for path in files if path.relative_to(table.path).as_posix() not in needed]
        if len(unused) == len(files):
            shutil.rmtree(attempt, ignore_errors=True)
        for path in unused:
            path.unlink(missing_ok=True)
