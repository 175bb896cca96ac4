"""The open table: a Delta table that records which cuts of which node it has taken.

The watermark (cut, tick, manifest checksum; app transactions in the Delta log) is read from one
loaded version. A commit becomes the next version, or fails if another writer was faster: the log
itself refuses it, whatever lock was held. So a watermark is only compared and committed on one
handle. Every version is the collection's state at its cut. ADR 0002 gives the reasons for Delta.
"""

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    PostCommitHookProperties,
    RemoveAction,
    Transaction,
)

from flusher.manifest import OFFSET, TICK, VCHANNEL, stored_schema
from flusher.selection import Selection
from spark_sink.columns import (
    PARTITION,
    TableFile,
    file_in_log,
    opened_file,
    place_of,
    shaped,
    table_schema,
)
from wal.errors import AlreadyExists, Corrupt, StorageFailed, UnsupportedFormat
from wal.failpoint import failpoint
from wal.files import sync_directory, sync_file

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_PROPERTIES = ("streamingnode.node_id", "streamingnode.collection_id", "streamingnode.collection")
_COMMIT_KEY = "streamingnode"

CHECKPOINT_COMMITS = 16
"""Commits between two checkpoints of the log: opening a table reads one checkpoint and at most this
many commits.
"""
_SETTINGS = {
    "delta.checkpointInterval": str(CHECKPOINT_COMMITS),
    "delta.dataSkippingNumIndexedCols": "-1",
}
"""By default Delta keeps the ranges of 32 columns only, in a wide table not those of `_tick` and
`_offset`.
"""
_CLEANED = "delta.enableExpiredLogCleanup"
_LOG_KEPT = "delta.logRetentionDuration"
_FILES_KEPT = "delta.deletedFileRetentionDuration"
_KEPT_FOR = "interval {} seconds"
_BARE = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
"""Runs nothing after a commit, which is not yet durable; `OpenTable.checkpoint` does that work
later.
"""

_MAPPING = "delta.columnMapping.mode"
_UNREADABLE_FEATURES = frozenset({"deletionVectors", "columnMapping"})
"""Delta features with which the rows are more than the content of the active files."""


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """The node and collection whose rows a table holds."""

    node_id: str
    collection_id: int
    collection: str


class Watermark(NamedTuple):
    """The newest cut that a table has taken; cut 0 is before the first one."""

    cut: int
    tick: int
    crc32c: int


class CommitNote(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a commit: the cut it brought the table to, and the ticks of its first and
    last change.

    The version is the collection's state from `last_tick` until the `first_tick` of the next
    version. A commit without changes has the cut's tick in both.
    """

    node_id: str
    collection_id: int
    first_tick: int
    last_tick: int
    cut: int
    tick: int
    crc32c: int
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table, and the note of its commit."""

    version: int
    note: CommitNote

    @property
    def created_tick(self) -> int:
        """The collection's creation tick in version 0, which created its table; 0 in other
        versions.
        """
        return self.note.first_tick if self.version == 0 else 0


@dataclass(frozen=True, slots=True)
class NewFile:
    """One data file to add; `stats` is the JSON text that Delta stores for data skipping."""

    path: str
    bytes: int
    rows: int
    partition: str
    stats: str


def state_at(history: Sequence[TableVersion], tick: int) -> TableVersion | None:
    """Return the version that is the collection's state at a tick, from a history that is newest
    first; None without one.

    No version is the state at a tick past the newest cut, between the first and the last change of
    one commit, or before the earliest version.
    """
    return next(
        (version for version, first, last in _spans(history) if first <= tick <= last), None
    )


def nearest_states(
    histories: Sequence[Sequence[TableVersion]], tick: int
) -> tuple[int | None, int | None]:
    """Return the last tick before `tick`, and the first one after it, at which every table has a
    state; None for a missing one.
    """
    spans = [span for history in histories for span in _spans(history)]
    ends = sorted({last for _, _, last in spans if last < tick}, reverse=True)
    starts = sorted({first for _, first, _ in spans if first > tick})

    def first_held(candidates: Sequence[int]) -> int | None:
        return next(
            (each for each in candidates if all(state_at(history, each) for history in histories)),
            None,
        )

    return first_held(ends), first_held(starts)


def _spans(history: Sequence[TableVersion]) -> Iterator[tuple[TableVersion, int, int]]:
    """Yield each version with the first and the last tick at which it is the collection's state."""
    last = history[0].note.tick if history else 0
    for version in history:
        yield version, version.note.last_tick, last
        last = version.note.first_tick - 1


class CommitConflict(Exception):
    """Another writer committed after this version was loaded; this commit changed nothing."""


class OpenTable:
    """One loaded version of the table at a path, and the commit after it. Not thread-safe."""

    def __init__(self, path: Path, delta: DeltaTable) -> None:
        self.path = path
        self._delta = delta
        # of a version; cached, as reading it takes 1 to 3 ms
        self._mark: tuple[int, Watermark] | None = None

    @classmethod
    def load(cls, path: Path, *, version: int | None = None) -> "OpenTable | None":
        """Return the table at `path`, also one of another tool; None when there is none."""
        if not (path / "_delta_log").is_dir():
            return None
        try:
            return cls(path, DeltaTable(str(path), version=version))
        except TableNotFoundError:  # a crash before the first commit
            return None

    @classmethod
    def create(
        cls,
        path: Path,
        identity: TableIdentity,
        collection: pa.Schema,
        before: Watermark,
        *,
        created_tick: int,
    ) -> "OpenTable":
        """Create the empty table that has taken everything up to `before`, and return it.

        It is the collection's state from `created_tick` on, the tick of the collection's creation,
        which is later than the tick of `before`. Raises `CommitConflict` when another writer
        created a table there first.
        """
        path.mkdir(parents=True, exist_ok=True)
        properties = (identity.node_id, str(identity.collection_id), identity.collection)
        try:
            DeltaTable.create(
                str(path),
                Schema.from_arrow(table_schema(collection)),
                mode="error",
                partition_by=[PARTITION],
                name=identity.collection,
                configuration=dict(zip(_PROPERTIES, properties, strict=True)) | _SETTINGS,
                commit_properties=_commit_properties(
                    identity, before, changed=(created_tick, created_tick), attempt=""
                ),
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if cls.load(path) is None:
                raise
            raise CommitConflict(str(error)) from error
        return cls(path, DeltaTable(str(path)))

    def at_version(self, version: int | None = None) -> "OpenTable":
        """Return the table at a version; None loads the newest one again."""
        loaded = self if version == self.version else OpenTable.load(self.path, version=version)
        if loaded is None:
            raise StorageFailed(
                f"table {self.path} was removed after it was opened — put it back, or read again"
            )
        return loaded

    def refresh(self) -> None:
        """Advance to the newest version, in less than half the time that loading takes."""
        self._delta.update_incremental()

    @property
    def version(self) -> int:
        """The number of the loaded version."""
        return self._delta.version()

    @property
    def identity(self) -> TableIdentity | None:
        """The node and collection of this table; None when no ingest made it."""
        properties = self._delta.metadata().configuration
        try:
            node_id, collection_id, collection = (properties[name] for name in _PROPERTIES)
            return TableIdentity(node_id, int(collection_id), collection)
        except (KeyError, ValueError):
            return None

    @property
    def watermark(self) -> Watermark:
        """The newest cut this version has taken. Raises `Corrupt` when the table has none."""
        if self._mark is not None and self._mark[0] == self.version:
            return self._mark[1]
        versions = map(self._delta.transaction_version, _apps(self.owner()))
        mark = Watermark(*(-1 if version is None else version for version in versions))
        if min(mark) < 0:
            raise Corrupt(
                f"table {self.path} has no watermark of the cuts it has taken — ingest into "
                "another directory"
            )
        self._mark = self.version, mark
        return mark

    @property
    def spark_schema(self) -> "StructType":
        """The table's columns; Delta and Spark use one JSON form for schemas."""
        from pyspark.sql.types import StructType  # a node reads tables without Spark

        return StructType.fromJson(msgspec.json.decode(self._delta.schema().to_json()))

    def owner(self) -> TableIdentity:
        """Return the node and collection of this table.

        Raises `AlreadyExists` when no ingest made it, `UnsupportedFormat` as `files`.
        """
        identity = self.identity
        if identity is None:
            raise AlreadyExists(
                f"{self.path} is a Delta table that no ingest made — move it, or ingest into "
                "another directory"
            )
        self._refuse_unreadable_features()
        return identity

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        # `to_arrow` returns an object of Arrow's C interface
        return pa.schema(self._delta.schema().to_arrow())  # type: ignore[arg-type]

    def files(self, *, key: str = OFFSET) -> list[TableFile]:
        """Return the active files; `key` is the column whose range they report.

        Raises `UnsupportedFormat` when another tool turned on a Delta feature with which the active
        files alone are not the rows.
        """
        self._refuse_unreadable_features()
        rows = pa.table(self._delta.get_add_actions(flatten=False))
        wanted = {key, OFFSET, TICK, VCHANNEL}
        # converting the ranges of the other columns would take nearly all of the time
        for name in ("min", "max"):
            if name in rows.column_names:
                ranges = zip(rows.schema.field(name).type, rows[name].flatten(), strict=True)
                kept = {field.name: values for field, values in ranges if field.name in wanted}
                rows = rows.drop([name])
                if kept:  # otherwise the log has no range of any of them
                    rows = rows.append_column(name, pa.table(kept).to_struct_array())
        return [file_in_log(row, key) for row in rows.to_pylist()]

    def rows(self, columns: pa.Schema, selection: Selection | None = None) -> pa.Table:
        """Return all rows, in columns with the collection's own types, then `_tick`, `_offset`,
        `_vchannel`, `_partition`.

        With a selection, which has these columns, rows outside it may be missing. The rows of each
        file are in tick order, and files are in the order of their first ticks. Raises
        `StorageFailed` when a file that the log names is missing, `Corrupt` when it does not match
        the log.
        """
        stored = stored_schema(columns)
        schema = stored.append(pa.field(PARTITION, pa.string()))
        order: Any = [(column, "ascending") for column in (TICK, VCHANNEL, OFFSET)]
        files = self.files(key=selection.key if selection else OFFSET)
        # Without a selection all columns are read: the caller verifies a table, and its pages need
        # reading.
        read = partial(self.read_file, columns=stored if selection else None, selection=selection)
        tables = [
            (file.tick_min, shaped(read(file), schema, partition=file.partition).sort_by(order))
            for file in files
            if selection is None or selection.may_have(file.key_range, file.vchannel_range)
        ]
        tables.sort(
            key=lambda found: found[0] or (found[1][TICK][0].as_py() if found[1].num_rows else 0)
        )
        return pa.concat_tables([schema.empty_table(), *(table for _, table in tables)])

    def place_of(self, file: TableFile) -> Path:
        """Return the path of a data file, after checking that it exists and has the logged length.
        Raises as `rows`.
        """
        return place_of(self.path, file)

    def read_file(
        self,
        file: TableFile,
        *,
        columns: pa.Schema | None = None,
        selection: Selection | None = None,
    ) -> pa.Table:
        """Return the rows of a data file, with at least these columns; None reads all columns.
        Raises as `rows`.
        """
        with opened_file(self.path, file) as content:
            if selection is not None and columns is not None:
                return selection.read(content, columns)
            return content.read(None if columns is None else columns.names)

    def commit(
        self,
        at: Watermark,
        *,
        changed: tuple[int, int],
        adds: Sequence[NewFile],
        removes: Sequence[TableFile],
        attempt: str,
    ) -> int:
        """Swap files and move the watermark in one commit, and return its version; durable once the
        caller has synced the log.

        `changed` are the ticks of the first and the last change, both the cut's own without one.
        Raises `CommitConflict` when this is no longer the newest version, whoever made that; the
        table is then unchanged.
        """
        assert at.cut > self.watermark.cut, "a cut is taken once"
        version = self.version + 1
        self._swap(
            adds,
            removes,
            _commit_properties(self.owner(), at, changed=changed, attempt=attempt),
            changes=True,
        )
        return version

    def compact(
        self, *, adds: Sequence[NewFile], removes: Sequence[TableFile], attempt: str
    ) -> None:
        """Replace files by others with the same rows: the new version is the same state as this
        one, and reads as of it.

        Raises `CommitConflict` as `commit` does, also when a file to remove is no longer in the
        table.
        """
        if not {file.path for file in removes} <= {file.path for file in self.files()}:
            raise CommitConflict("another writer has replaced a file that was to be compacted")
        note = next(self.history()).note  # the newest version's note
        changed = (note.first_tick, note.last_tick)
        properties = _commit_properties(
            self.owner(), self.watermark, changed=changed, attempt=attempt
        )
        self._swap(adds, removes, properties, changes=False)

    def keep(self, seconds: int, *, unused_s: int) -> None:
        """Set Delta's ages for removing commits, and files that no version has, unless they are set
        already.

        Other tools vacuum by `unused_s`: they remove the files of an attempt that is under way for
        longer than that.
        """
        ages = {_LOG_KEPT: seconds, _FILES_KEPT: unused_s}
        wanted = {name: _KEPT_FOR.format(age) for name, age in ages.items()} | _SETTINGS
        if not wanted.items() <= self._delta.metadata().configuration.items():
            self._delta.alter.set_table_properties(wanted, post_commithook_properties=_BARE)

    def checkpoint(self) -> None:
        """Write the log's checkpoint when it is due, durably, and remove old commits. All commits
        must be durable before.

        Delta writes a checkpoint in place and syncs nothing: a power cut could leave half of one,
        and no reader could open the table. So it is made in a copy of the log's end, and moved.
        """
        log = self.path / "_delta_log"
        building = self.path / "_checkpoint"
        first = max((path.name[:20] for path in log.glob("*.checkpoint*.parquet")), default="")
        last = f"{self.version:020}"
        if self.version - int(first or -1) < CHECKPOINT_COMMITS:
            return
        if next(self.history()).version < self.version:
            # Wait for a commit with a note: after the clean-up the log begins with this version's
            # commit.
            return
        shutil.rmtree(building, ignore_errors=True)  # of a job that was killed
        made = building / log.name
        made.mkdir(parents=True)
        try:
            for path in log.iterdir():
                if first <= path.name[:20] <= last:
                    shutil.copy(path, made)
            DeltaTable(str(building)).create_checkpoint()
            failpoint("compact.checkpoint_made")
            # `_last_checkpoint` names the checkpoint, so it comes second
            for name in (f"{last}.checkpoint.parquet", "_last_checkpoint"):
                sync_file(made / name)
                (made / name).replace(log / name)
                sync_directory(log)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        failpoint("compact.checkpointed")
        if self._delta.metadata().configuration.get(_CLEANED, "true") == "true":
            self._remove_old_commits(log)

    def _remove_old_commits(self, log: Path) -> None:
        """Remove the log before the version that was the newest one at the age that `keep` set.

        Delta's own clean-up uses the age of commits: after a pause it removes the version that was
        the newest until a moment ago.
        """
        kept = re.fullmatch(
            _KEPT_FOR.format(r"(\d+)"), self._delta.metadata().configuration.get(_LOG_KEPT, "")
        )
        if kept is None:
            self._delta.cleanup_metadata()
            return
        until = time.time() - int(kept[1])
        newest = max(
            (path.name for path in log.glob("*.json") if path.stat().st_mtime < until), default=""
        )
        first = max(
            (path.name[:20] for path in log.glob("*.checkpoint*.parquet") if path.name <= newest),
            default="",
        )
        for path in sorted(path for path in log.glob("[0-9]*") if path.name[:20] < first):
            path.unlink(missing_ok=True)

    def _swap(
        self,
        adds: Sequence[NewFile],
        removes: Sequence[TableFile],
        properties: CommitProperties,
        *,
        changes: bool,
    ) -> None:
        if gone := [file.path for file in adds if not (self.path / file.path).is_file()]:
            raise StorageFailed(
                f"{self.path / gone[0]} was removed before its commit, by another tool — run it "
                "again"
            )
        now_ms = int(time.time() * 1000)
        removed = [
            RemoveAction(f.path, changes, now_ms, f.bytes, {PARTITION: f.partition})
            for f in removes
        ]
        added = [
            AddAction(f.path, f.bytes, {PARTITION: f.partition}, now_ms, changes, f.stats)
            for f in adds
        ]
        try:
            self._delta.create_write_transaction(
                [*removed, *added],
                "append",
                self._delta.schema(),
                [PARTITION],
                commit_properties=properties,
                post_commithook_properties=_BARE,
            )
        except CommitFailedError as error:
            if self.at_version().version > self.version:
                raise CommitConflict(str(error)) from error
            raise UnsupportedFormat(
                f"{self.path} refuses this: {error} — undo what another tool set on it"
            ) from error
        self.refresh()

    def history(self) -> Iterator[TableVersion]:
        """Yield the versions of ingests in the log, newest first; reads only as far as the caller
        iterates.

        If other tools, which change no rows, have removed all of these, it yields the loaded
        version. Delta's own history is not used: it numbers the commits downwards from the loaded
        version, so a commit made meanwhile shifts every number.
        """
        is_found = False
        for version in range(self.version, -1, -1):
            try:
                commit = (self.path / "_delta_log" / f"{version:020}.json").read_bytes()
            except FileNotFoundError:
                break
            if (note := _note(commit)) is not None:
                is_found = True
                yield TableVersion(version, note)
        if not is_found:
            at = self.watermark
            yield TableVersion(self.version, _note_at(self.owner(), at, changed=(at.tick, at.tick)))

    def attempts(self) -> frozenset[str]:
        """Return the committed attempts, from the commits in the log and from the active files,
        which may outlive those commits.
        """
        files = (file.path.partition("/")[0] for file in self.files())
        return frozenset([*files, *(version.note.attempt for version in self.history())])

    def _refuse_unreadable_features(self) -> None:
        features = _UNREADABLE_FEATURES.intersection(self._delta.protocol().reader_features or ())
        # an older protocol lists no features
        if self._delta.metadata().configuration.get(_MAPPING, "none") != "none":
            features |= {"columnMapping"}
        if features:
            raise UnsupportedFormat(
                f"table {self.path} uses {', '.join(sorted(features))}, turned on by another tool "
                "— read it with that tool"
            )


def _apps(identity: TableIdentity) -> list[str]:
    return [f"streamingnode/{identity.node_id}/{name}" for name in Watermark._fields]


def _note_at(
    identity: TableIdentity, at: Watermark, *, changed: tuple[int, int], attempt: str = ""
) -> CommitNote:
    return CommitNote(
        node_id=identity.node_id,
        collection_id=identity.collection_id,
        first_tick=changed[0],
        last_tick=changed[1],
        attempt=attempt,
        **at._asdict(),
    )


def _commit_properties(
    identity: TableIdentity, at: Watermark, *, changed: tuple[int, int], attempt: str
) -> CommitProperties:
    note = _note_at(identity, at, changed=changed, attempt=attempt)
    return CommitProperties(
        custom_metadata={_COMMIT_KEY: msgspec.to_builtins(note)},
        app_transactions=[
            Transaction(app, value) for app, value in zip(_apps(identity), at, strict=True)
        ],
        # On a retry Delta would accept a commit after another one that removed the same files, and
        # rows would be doubled.
        max_commit_retries=0,
    )


def _note(commit: bytes) -> CommitNote | None:
    """Return the note of a commit; None for a commit that no ingest made."""
    with suppress(msgspec.MsgspecError):
        for action in map(msgspec.json.decode, commit.splitlines()):
            if _COMMIT_KEY in (action.get("commitInfo") or ()):
                return msgspec.convert(action["commitInfo"][_COMMIT_KEY], CommitNote, strict=False)
    return None
