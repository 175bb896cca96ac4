"""The tables fed from a node: each cut taken at most once, none the node never made, and the rows of each cut. Blocks.

In: a directory of open tables, the cuts of the node, and the leases of its tables. Out: findings. A table that is ahead of
its node, or has another cut of the same number, was fed by a life of the node that a restored backup does not know. One that
lacks cuts which the node gave up is an older copy itself, and one that a lease names and nobody finds is lost. A cut's rows
can be fewer in the table than in the cut when deletes or dropped partitions took some; never more, and without those
exactly as many.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flusher.cut_log import CutLog
from flusher.manifest import CollectionEntry
from flusher.rows import OFFSET, TICK, VCHANNEL
from spark_sink.commit import Lease, lease_path
from spark_sink.table import OpenTable, TableFile, TableIdentity, TableVersion, Watermark
from streamingnode.inspection.node_files import read_leases
from streamingnode.verification.finding import Kind, Report
from wal.errors import StreamingNodeError

_DROP = "move the table away and ingest again"
_OLDER = "restore a newer backup of the node, or move the table away and ingest again"


@dataclass(frozen=True, slots=True)
class _CutRows:
    """The rows a collection got in one cut, at ticks above `after_tick` and up to `tick`."""

    number: int
    after_tick: int
    tick: int
    rows: int


def walk_tables(node: Path, tables: Path, node_id: str, report: Report) -> Iterator[int]:
    """Check every table in a directory and yield the bytes read after each file."""
    try:
        cuts = CutLog(node)
    except StreamingNodeError:  # the walk over the cuts has named what is missing
        return
    at_home: dict[int, Path] = {}
    for path in sorted(tables.iterdir()):
        if "@" in path.name or path.name.startswith(".") or not path.is_dir():
            continue
        identity = yield from _walk_table(path, cuts, node_id, report)
        if identity is not None and identity.node_id == node_id:
            at_home[identity.collection_id] = path
    for lease in read_leases(node):
        if lease.node_id == node_id and not Path(lease.table).is_dir():
            _check_leased(lease, at_home.get(lease.collection_id), node, report)


def _check_leased(lease: Lease, at_home: Path | None, node: Path, report: Report) -> None:
    """Say what became of a table that is not where its lease says."""
    place, told = f"table {lease.table}", lease_path(node, Path(lease.table))
    if at_home is not None:
        detail = f"is at {at_home} now, and its lease still holds the node's files from cut {lease.cut} on"
        report.warn(Kind.ORPHAN, place, detail, f"ingest into {at_home.parent}, then remove {told}")
        return
    detail = f"the node has a lease of it, at cut {lease.cut}, and it is not there"
    step = f"put it back; to make it anew of the cuts that are kept, remove {told} and ingest"
    report.damage(Kind.MISSING, place, detail, step)


def _walk_table(path: Path, cuts: CutLog, node_id: str, report: Report) -> Generator[int, None, TableIdentity | None]:
    """Check one table and return what it says of itself, None when nothing can be told."""
    place = f"table {path}"
    try:
        table = OpenTable.load(path)
        if table is None or table.identity is None:
            report.warn(Kind.FOREIGN, place, "is no table that an ingest made", "nothing to do, or move it away")
            return None
        identity, mark = table.identity, table.watermark
        versions = list(table.history())
        files = table.files(key=OFFSET)
    except Exception as error:  # noqa: BLE001 - the table's library raises whatever its files make it
        report.damage(Kind.UNREADABLE, place, f"cannot be opened: {error}", _DROP)
        return None
    report.count("tables")
    if node_id and identity.node_id != node_id:
        report.warn(
            Kind.FOREIGN, place, f"is fed from node {identity.node_id}, not {node_id}", "verify that node with it"
        )
        return identity
    if identity.collection != path.name:
        detail = f"holds the collection {identity.collection!r}: it was renamed, or swapped with another"
        report.damage(Kind.MIXED, place, detail, f"give it its name back: {path.with_name(identity.collection)}")
    try:
        parted = _check_history(place, versions, mark, cuts, report)
        found = yield from _walk_files(path, files, report)
        if found is not None:
            _check_rows(place, found, mark, report)
            if not parted:
                _check_cuts(place, found, identity.collection_id, mark, cuts, report)
    except StreamingNodeError as error:  # a cut that cannot be read, and is named by the walk over the cuts
        report.warn(
            Kind.UNREADABLE, place, f"cannot be compared with the cuts: {error.happened}", "restore the cuts first"
        )
    return identity


def _check_history(place: str, versions: list[TableVersion], mark: Watermark, cuts: CutLog, report: Report) -> bool:
    """Versions, newest first: cuts descend strictly, and each is the node's own cut of that number.

    Return whether the table's history has parted from the node's: then nothing more can be compared.
    """
    parted = mark.cut > cuts.newest
    if mark.cut > cuts.newest:
        detail = (
            f"has taken cut {mark.cut}, the node's newest is {cuts.newest}: the node was restored from an older copy"
        )
        report.damage(Kind.AHEAD, place, detail, _OLDER)
    if mark.cut and mark.cut + 1 < cuts.first:
        given_up = f"cuts {mark.cut + 1} to {cuts.first - 1}"
        detail = f"has taken cut {mark.cut}, and {given_up} were given up since: the table is an older copy"
        report.damage(Kind.MISSING, place, detail, "put the newer copy of the table back")
    for newer, older in itertools.pairwise(versions):
        if newer.note.cut <= older.note.cut and newer.note.attempt:
            taken = f"version {older.version} took {older.note.cut}"
            detail = f"version {newer.version} takes cut {newer.note.cut} after {taken}"
            report.damage(Kind.DUPLICATE, place, detail, _DROP)
    for version in versions:
        report.count("table commits")
        known = cuts.crc32c_of(version.note.cut) if version.note.cut <= cuts.newest else None
        if known is not None and known != version.note.crc32c:
            detail = (
                f"version {version.version} has another cut {version.note.cut} than the node: histories have parted"
            )
            report.damage(Kind.AHEAD, place, detail, _OLDER)
            parted = True
    return parted


def _walk_files(path: Path, files: list[TableFile], report: Report) -> Generator[int, None, pa.Table | None]:
    """Read the system columns of all files, yielding the bytes; return them when every file is whole and there is one."""
    columns: list[pa.Table] = []
    whole = True
    for file in files:
        found = _read_file(path, file, report)
        yield file.bytes
        whole = whole and found is not None
        columns += [] if found is None else [found]
    return pa.concat_tables(columns) if whole and columns else None


def _read_file(path: Path, file: TableFile, report: Report) -> pa.Table | None:
    """Return the system columns of one file; None when it is not whole, which is then found."""
    place = f"table {path}, {file.path}"
    try:
        if (path / file.path).stat().st_size != file.bytes:
            report.damage(Kind.LENGTH, place, f"does not have the {file.bytes} bytes that the table's log says", _DROP)
            return None
        table = pq.ParquetFile(path / file.path).read(columns=[TICK, OFFSET, VCHANNEL])
    except FileNotFoundError:
        report.damage(Kind.MISSING, place, "the table's log names it and it is not there", _DROP)
        return None
    except (pa.ArrowException, OSError) as error:
        report.damage(Kind.CHECKSUM, place, f"cannot be decoded: {error}", _DROP)
        return None
    report.count("table files")
    if file.rows is not None and table.num_rows != file.rows:
        report.damage(Kind.CONTENT, place, f"holds {table.num_rows} rows, the table's log says {file.rows}", _DROP)
        return None
    return table


def _check_rows(place: str, rows: pa.Table, mark: Watermark, report: Report) -> None:
    """Each row is there once, and none is of a cut that the table has not taken."""
    report.count("table rows", rows.num_rows)
    _check_repeats(place, rows, report)
    ticks = np.sort(rows.column(TICK).to_numpy())
    if len(ticks) and ticks[-1] > mark.tick:
        beyond = len(ticks) - int(np.searchsorted(ticks, mark.tick, side="right"))
        report.damage(Kind.CONTENT, place, f"holds {beyond} rows of cuts it says it has not taken", _DROP)


def _check_cuts(place: str, rows: pa.Table, collection_id: int, mark: Watermark, cuts: CutLog, report: Report) -> None:
    ticks = np.sort(rows.column(TICK).to_numpy())
    removing = _something_removed(collection_id, cuts, mark.cut)
    for cut in _rows_by_cut(collection_id, cuts, mark.cut):
        _check_cut(place, cut, ticks, removing=removing, report=report)


def _check_cut(place: str, cut: _CutRows, ticks: npt.NDArray[np.int64], *, removing: bool, report: Report) -> None:
    low, high = np.searchsorted(ticks, [cut.after_tick, cut.tick], side="right")
    have = int(high - low)
    report.count("cuts compared with tables")
    if have > cut.rows or (have < cut.rows and not removing):
        report.damage(Kind.CONTENT, place, f"has {have} rows of cut {cut.number}, which brought {cut.rows}", _DROP)


def _check_repeats(place: str, rows: pa.Table, report: Report) -> None:
    """A row offset of a vchannel is given to one row."""
    names = rows.column(VCHANNEL).combine_chunks().dictionary_encode()
    channel, offset = names.indices.to_numpy(), rows.column(OFFSET).to_numpy()
    order = np.lexsort((offset, channel))
    same = (np.diff(channel[order]) == 0) & (np.diff(offset[order]) == 0)
    if repeated := int(same.sum()):
        report.damage(Kind.DUPLICATE, place, f"holds {repeated} rows more than once", _DROP)


def _rows_by_cut(collection_id: int, cuts: CutLog, last: int) -> Iterator[_CutRows]:
    for number in cuts.numbers:
        if number > last:
            return
        manifest = cuts.read(number).manifest
        rows = sum(segment.rows for segment in manifest.segments if segment.collection_id == collection_id)
        yield _CutRows(number, manifest.previous_tick, manifest.tick, rows)


def _something_removed(collection_id: int, cuts: CutLog, last: int) -> bool:
    """Whether any kept cut up to `last` has a delete or a dropped partition of the collection."""
    return any(
        any(file.collection_id == collection_id for file in cuts.read(number).manifest.deletes)
        or _drops(cuts.read(number).manifest.collections, collection_id)
        for number in cuts.numbers
        if number <= last
    )


def _drops(entries: Iterable[CollectionEntry], collection_id: int) -> bool:
    return any(
        partition.dropped_tick
        for entry in entries
        if entry.collection_id == collection_id
        for partition in entry.partitions
    )
