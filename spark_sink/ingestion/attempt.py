"""One attempt to bring cuts into a table: a directory of new files, an intent beside it, and what a crash leaves of both.

An attempt writes into a directory of its own inside the table, so that two jobs never share one and no file is ever moved.
Its intent, an empty file of the same name in `_attempts`, is on disk before the directory and goes after the commit.

| killed                  | left behind                          | the next ingest                              |
|-------------------------|--------------------------------------|----------------------------------------------|
| before the intent       | nothing                              | takes the cuts                               |
| between the two         | the intent, maybe files nobody reads | takes the cuts; removes both once old        |
| after the commit        | the intent of a committed attempt    | finds the cuts taken; removes the intent     |

An intent counts as abandoned only when it is old and its attempt is not in the table's log: a job on another machine may
still be writing. Delta's own vacuum never sees `_attempts`, because it starts with an underscore.
"""

import re
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq

from spark_sink.table.columns import PARTITION
from spark_sink.table.file_stats import stats_json
from spark_sink.table.open_table import OpenTable
from spark_sink.table.table_model import NewFile
from wal.failpoint import failpoint
from wal.files import make_parents, sync_directory, sync_file

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
