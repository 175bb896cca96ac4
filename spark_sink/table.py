"""The open table: a Delta table that remembers which cuts of which node it has taken.

One `OpenTable` is one loaded version. The watermark (cut, tick, manifest checksum) is read from that version and a commit
is conditional on it: the Delta log holds the three as app transactions, so a second writer that started from the same
version is refused by the log itself, whatever lock it did or did not hold. Delta alone would accept a repeated number from
a fresh handle; therefore a watermark is only ever compared and committed on one handle. ADR 0002 says why Delta.

Every version is the state at its cut. Its commit info carries `streamingnode`: node id, collection id, the ticks of its
first and last change, cut, tick, manifest checksum and attempt.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, RemoveAction, Transaction

from interceptors.errors import AlreadyExists, SchemaMismatch
from spark_sink.columns import OFFSET, PARTITION, TICK, VCHANNEL, as_given, table_schema
from wal.errors import Corrupt, StorageFailed, UnsupportedFormat

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# --- table model ---
#
# What an open table is made of: whose it is, what it has taken, its files. No I/O; loads without the table's library.


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """Whose rows a table holds."""

    node_id: str
    collection_id: int
    collection: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """The newest cut a table has taken; cut 0 is before all."""

    cut: int
    tick: int
    crc32c: int


class CommitNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit says about itself: the cut it brought the table to, and the ticks of its first and last change.

    The version is the collection's state from `last_tick` until the `first_tick` of the next version. A commit that changed
    nothing has the cut's tick in both.
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
    """One version of a table and the cut it is the state of."""

    version: int
    note: CommitNote


@dataclass(frozen=True, slots=True)
class TableFile:
    """One active data file; a range is None where its writer recorded none."""

    path: str
    bytes: int
    rows: int | None
    partition: str
    key_range: tuple[int | str, int | str] | None = None
    offset_min: int | None = None
    vchannel_range: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """One data file to add; `stats` is the JSON text that Delta stores for readers that skip files."""

    path: str
    bytes: int
    rows: int
    partition: str
    stats: str


def state_at(history: Sequence[TableVersion], tick: int) -> TableVersion | None:
    """Return the version, of some that are newest first, that is the collection's state at a tick; None when none is.

    None is: past the newest cut, whose table has not seen what follows; between the first and the last change of one
    commit; and before the earliest version.
    """
    if not history or tick > history[0].note.tick:
        return None
    hidden_from = tick + 1
    for found in history:
        if found.note.last_tick <= tick:
            return found if tick < hidden_from else None
        hidden_from = found.note.first_tick
    return None


def nearest_states(histories: Sequence[Sequence[TableVersion]], tick: int) -> tuple[int | None, int | None]:
    """Return the last tick before `tick`, and the first one after it, at which every table has its state; None for none."""
    ends = {found.note.first_tick - 1 for history in histories for found in history}
    ends |= {history[0].note.tick for history in histories if history}
    starts = {found.note.last_tick for history in histories for found in history}

    def held(candidate: int) -> bool:
        return all(state_at(history, candidate) for history in histories)

    before = next(filter(held, sorted((end for end in ends if end < tick), reverse=True)), None)
    after = next(filter(held, sorted(start for start in starts if start > tick)), None)
    return before, after


_PROPERTY = "streamingnode."
_COMMIT_KEY = "streamingnode"

HISTORY_STEP = 64
"""Commits looked at before asking for more; reading one is one small file."""

_UNREADABLE_FEATURES = frozenset({"deletionVectors", "columnMapping"})
"""Delta features under which the active files alone are not the rows."""


class CommitConflict(Exception):
    """Another writer committed after this version was loaded; nothing of ours is in the table."""


class OpenTable:
    """One loaded version of the table at a path, and the commit that follows it. Not safe across threads."""

    def __init__(self, path: Path, delta: DeltaTable) -> None:
        self.path = path
        self._delta = delta

    @classmethod
    def load(cls, path: Path, *, version: int | None = None) -> "OpenTable | None":
        """Return the table at `path`, None when there is none.

        Raises `UnsupportedFormat` when another tool turned on a Delta feature under which files are not rows.
        """
        if not (path / "_delta_log").is_dir():
            return None
        try:
            table = cls(path, DeltaTable(str(path), version=version))
        except TableNotFoundError:  # a crash before the first commit
            return None
        table._refuse_unreadable_features()
        return table

    @classmethod
    def create(cls, path: Path, identity: TableIdentity, collection: pa.Schema, before: Watermark) -> "OpenTable":
        """Create the empty table that has taken everything up to `before`, and return it.

        Raises `CommitConflict` when another writer created it first, `AlreadyExists` when the directory holds other things.
        """
        note = _note(identity, changed=(before.tick, before.tick), at=before, attempt="")
        path.mkdir(parents=True, exist_ok=True)
        try:
            DeltaTable.create(
                str(path),
                Schema.from_arrow(table_schema(collection)),
                mode="error",
                partition_by=[PARTITION],
                name=identity.collection,
                configuration=_properties(identity),
                commit_properties=_commit_properties(identity, before, note),
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if cls.load(path) is None:
                raise
            raise CommitConflict(str(error)) from error
        created = cls.load(path)
        assert created is not None
        return created

    @property
    def version(self) -> int:
        """The number of the loaded version."""
        return self._delta.version()

    @property
    def identity(self) -> TableIdentity | None:
        """Whose table this is; None when it was not made by an ingest."""
        properties = self._delta.metadata().configuration
        try:
            return TableIdentity(
                node_id=properties[f"{_PROPERTY}node_id"],
                collection_id=int(properties[f"{_PROPERTY}collection_id"]),
                collection=properties[f"{_PROPERTY}collection"],
            )
        except (KeyError, ValueError):
            return None

    @property
    def watermark(self) -> Watermark:
        """The newest cut this version has taken. Raises `Corrupt` when the table does not say."""
        identity = self.owner()
        values = [self._delta.transaction_version(app) for app in _apps(identity)]
        cut, tick, crc32c = (-1 if value is None else value for value in values)
        if min(cut, tick, crc32c) < 0:
            raise Corrupt(f"table {self.path} does not say which cuts it has taken — ingest into another directory")
        return Watermark(cut, tick, crc32c)

    @property
    def spark_schema(self) -> "StructType":
        """The table's columns; Delta and Spark write schemas alike."""
        from pyspark.sql.types import StructType  # a node reads tables without Spark

        return StructType.fromJson(msgspec.json.decode(self._delta.schema().to_json()))

    def owner(self) -> TableIdentity:
        """Return whose table this is. Raises `AlreadyExists` when no ingest made it."""
        identity = self.identity
        if identity is None:
            raise AlreadyExists(
                f"{self.path} is a Delta table that no ingest made — move it, or ingest into another directory"
            )
        return identity

    def files(self, *, key: str) -> list[TableFile]:
        """Return the active files; `key` is the column whose range they report."""
        return [_table_file(row, key) for row in pa.table(self._delta.get_add_actions(flatten=False)).to_pylist()]

    def paths_by_partition(self) -> dict[str, list[str]]:
        """Return the active files' paths, relative to the table, by partition name."""
        paths: dict[str, list[str]] = {}
        for row in pa.table(self._delta.get_add_actions(flatten=False)).select(["path", "partition"]).to_pylist():
            paths.setdefault(row["partition"][PARTITION], []).append(row["path"])
        return paths

    def rows(self, collection: pa.Schema) -> pa.Table:
        """Return all rows with the collection's own types, then `_tick`, `_offset`, `_vchannel`, `_partition`.

        Each file's are in the order of their ticks, and the files in that of their first. Raises `StorageFailed` when a
        file that the log names is not there, `Corrupt` when it is not what the log says.
        """
        root = self.path.resolve()
        empty = as_given(pa.table({}), collection).append_column(PARTITION, pa.chunked_array([], pa.string()))
        tables: list[pa.Table] = []
        for file in self.files(key=OFFSET):
            found = _read_file(root, file).sort_by(
                [(TICK, "ascending"), (VCHANNEL, "ascending"), (OFFSET, "ascending")]
            )
            named = pa.repeat(pa.scalar(file.partition, pa.string()), found.num_rows)
            tables.append(as_given(found, collection).append_column(PARTITION, named))
        tables.sort(key=lambda table: table[TICK][0].as_py() if table.num_rows else 0)
        return pa.concat_tables([empty, *tables])

    def adopt_columns(self, collection: pa.Schema) -> "OpenTable":
        """Return the table with the collection's newer columns, this one when it has them; old rows hold null there.

        Raises `SchemaMismatch` when a column the table has is gone or has another type.
        """
        wanted = Schema.from_arrow(table_schema(collection)).fields
        have = {field.name: field for field in self._delta.schema().fields}
        for field in wanted:
            if field.name in have and have[field.name].type != field.type:
                message = (
                    f"column {field.name} of {self.path} is {have[field.name].type}, the collection's is {field.type}"
                )
                raise SchemaMismatch(f"{message} — drop the table and ingest again", column=field.name)
        added = [field for field in wanted if field.name not in have]
        if not added:
            return self
        try:
            self._delta.alter.add_columns(added)
        except CommitFailedError as error:
            raise CommitConflict(str(error)) from error
        changed = OpenTable.load(self.path)
        assert changed is not None
        return changed

    def commit(
        self,
        at: Watermark,
        *,
        changed: tuple[int, int],
        adds: Sequence[NewFile],
        removes: Sequence[TableFile],
        attempt: str,
    ) -> int:
        """Swap files and move the watermark in one commit, and return its version; on disk when `sync` has returned.

        `changed` are the ticks of the first and the last change, the cut's own when there was none.
        Raises `CommitConflict` when this is no longer the newest version that ingests see; the table is unchanged then.
        """
        assert at.cut > self.watermark.cut, "a cut is taken once"
        identity = self.owner()
        now_ms = int(time.time() * 1000)
        try:
            self._delta.create_write_transaction(
                [
                    *(
                        RemoveAction(file.path, True, now_ms, file.bytes, {PARTITION: file.partition})
                        for file in removes
                    ),
                    *(AddAction(f.path, f.bytes, {PARTITION: f.partition}, now_ms, True, f.stats) for f in adds),
                ],
                "append",
                self._delta.schema(),
                [PARTITION],
                commit_properties=_commit_properties(
                    identity, at, _note(identity, changed=changed, at=at, attempt=attempt)
                ),
            )
        except CommitFailedError as error:
            raise CommitConflict(str(error)) from error
        self._delta.update_incremental()
        return next((found.version for found in self.history() if found.note.cut == at.cut), self.version)

    def history(self) -> Iterator[TableVersion]:
        """Yield the versions that an ingest committed and the log still names, newest first; reads only as far as asked."""
        seen, limit = 0, HISTORY_STEP
        while entries := self._delta.history(limit)[seen:]:
            yield from filter(None, map(_table_version, entries))
            seen, limit = seen + len(entries), limit * 4

    def has_attempt(self, attempt: str) -> bool:
        """Whether an attempt's commit is in the log."""
        return any(version.note.attempt == attempt for version in self.history())

    def _refuse_unreadable_features(self) -> None:
        features = _UNREADABLE_FEATURES.intersection(self._delta.protocol().reader_features or ())
        if features:
            raise UnsupportedFormat(
                f"table {self.path} uses {', '.join(sorted(features))}, turned on by another tool — read it with that tool"
            )


def _read_file(root: Path, file: TableFile) -> pa.Table:
    path = root / file.path
    if not path.resolve().is_relative_to(root):
        raise Corrupt(f"the log of table {root} names {file.path}, which is outside it — move the table away")
    try:
        if path.stat().st_size != file.bytes:
            raise Corrupt(f"{path} has {path.stat().st_size} bytes, its table says {file.bytes} — restore the table")
        with pq.ParquetFile(path, page_checksum_verification=True) as content:
            rows = content.read()
    except FileNotFoundError:
        raise StorageFailed(f"{path} is missing from its table — restore the table, or ingest again") from None
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"{path} cannot be read: {error} — restore the table") from error
    if file.rows is not None and rows.num_rows != file.rows:
        raise Corrupt(f"{path} has {rows.num_rows} rows, its table says {file.rows} — restore the table")
    return rows


def _apps(identity: TableIdentity) -> tuple[str, str, str]:
    prefix = f"streamingnode/{identity.node_id}"
    return f"{prefix}/cut", f"{prefix}/tick", f"{prefix}/crc32c"


def _properties(identity: TableIdentity) -> dict[str, str | None]:
    return {
        f"{_PROPERTY}node_id": identity.node_id,
        f"{_PROPERTY}collection_id": str(identity.collection_id),
        f"{_PROPERTY}collection": identity.collection,
    }


def _note(identity: TableIdentity, *, changed: tuple[int, int], at: Watermark, attempt: str) -> CommitNote:
    return CommitNote(
        node_id=identity.node_id,
        collection_id=identity.collection_id,
        first_tick=changed[0],
        last_tick=changed[1],
        cut=at.cut,
        tick=at.tick,
        crc32c=at.crc32c,
        attempt=attempt,
    )


def _commit_properties(identity: TableIdentity, at: Watermark, note: CommitNote) -> CommitProperties:
    values = (at.cut, at.tick, at.crc32c)
    return CommitProperties(
        custom_metadata={_COMMIT_KEY: msgspec.to_builtins(note)},
        app_transactions=[Transaction(app, value) for app, value in zip(_apps(identity), values, strict=True)],
    )


def _table_version(entry: dict[str, object]) -> TableVersion | None:
    if _COMMIT_KEY not in entry:
        return None
    try:
        return TableVersion(
            msgspec.convert(entry["version"], int), msgspec.convert(entry[_COMMIT_KEY], CommitNote, strict=False)
        )
    except msgspec.ValidationError:
        return None


def _table_file(row: dict[str, object], key: str) -> TableFile:
    action = msgspec.convert(row, _AddRow)
    return TableFile(
        path=action.path,
        bytes=action.size_bytes,
        rows=action.num_records,
        partition=action.partition[PARTITION] or "",
        key_range=_int_or_text_range(action, key),
        offset_min=_whole(action.min, OFFSET),
        vchannel_range=_text_range(action, VCHANNEL),
    )


class _AddRow(msgspec.Struct):
    path: str
    size_bytes: int
    num_records: int | None
    partition: dict[str, str | None]
    min: dict[str, object] | None = None
    max: dict[str, object] | None = None


def _whole(values: dict[str, object] | None, column: str) -> int | None:
    value = (values or {}).get(column)
    return value if isinstance(value, int) else None


def _int_or_text_range(action: _AddRow, column: str) -> tuple[int | str, int | str] | None:
    low, high = (action.min or {}).get(column), (action.max or {}).get(column)
    if isinstance(low, int | str) and isinstance(high, int | str):
        return low, high
    return None


def _text_range(action: _AddRow, column: str) -> tuple[str, str] | None:
    low, high = (action.min or {}).get(column), (action.max or {}).get(column)
    return (low, high) if isinstance(low, str) and isinstance(high, str) else None
