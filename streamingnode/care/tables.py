"""The tables fed from a node: each cut taken at most once, none the node never made, and the rows of each cut. Blocks.

A table that is ahead of its node, or has another cut of the same number, was fed by a life of the node that a restored
backup does not know. One that lacks cuts which the node gave up is an older copy itself, and one that a lease names and
nobody finds is lost. Needs the tables' library, so it is imported where tables are asked for.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flusher.cuts import Lease, lease_path
from flusher.directory import CutLog
from flusher.manifest import OFFSET, TICK, VCHANNEL
from spark_sink.table import OpenTable, TableFile, TableIdentity, TableVersion, Watermark
from streamingnode.care.findings import Kind, Report
from wal.errors import StreamingNodeError

_DROP = "move the table away and ingest again"
_OLDER = "restore a newer backup of the node, or move the table away and ingest again"


def check_tables(node: Path, tables: Path, leases: Sequence[Lease], node_id: str, report: Report) -> None:
    """Check every table in a directory against the cuts of the node, and each of its leases against the tables."""
    cuts = CutLog(node)
    at_home: dict[int, Path] = {}
    for path in sorted(tables.iterdir()):
        if "@" in path.name or path.name.startswith(".") or not path.is_dir():
            continue
        identity = _check_table(path, cuts, node_id, report)
        if identity is not None and identity.node_id == node_id:
            at_home[identity.collection_id] = path
    for lease in leases:
        if lease.node_id != node_id or Path(lease.table).is_dir():
            continue
        place, told = f"table {lease.table}", lease_path(node, Path(lease.table))
        if home := at_home.get(lease.collection_id):
            detail = f"is at {home} now, and its lease still holds the node's files from cut {lease.cut} on"
            report.warn(Kind.ORPHAN, place, detail, f"ingest into {home.parent}, then remove {told}")
        else:
            detail = f"the node has a lease of it, at cut {lease.cut}, and it is not there"
            step = f"put it back; to make it anew of the cuts that are kept, remove {told} and ingest"
            report.damage(Kind.MISSING, place, detail, step)


def _check_table(path: Path, cuts: CutLog, node_id: str, report: Report) -> TableIdentity | None:
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
        detail = f"is fed from node {identity.node_id}, not {node_id}"
        report.warn(Kind.FOREIGN, place, detail, "verify that node with it")
        return identity
    if identity.collection != path.name:
        detail = f"holds the collection {identity.collection!r}: it was renamed, or swapped with another"
        report.damage(Kind.MIXED, place, detail, f"give it its name back: {path.with_name(identity.collection)}")
    try:
        parted = _check_history(place, versions, mark, cuts, report)
        found = [_read_file(path, file, report) for file in files]
        whole = [rows for rows in found if rows is not None]
        if found and len(whole) == len(found):
            rows = pa.concat_tables(whole)
            _check_rows(place, rows, mark, report)
            if not parted:
                _check_cuts(place, np.sort(rows.column(TICK).to_numpy()), identity.collection_id, mark, cuts, report)
    except StreamingNodeError as error:  # a cut that cannot be read, and was named with the cuts
        detail = f"cannot be compared with the cuts: {error.happened}"
        report.warn(Kind.UNREADABLE, place, detail, "restore the cuts first")
    return identity


def _check_history(place: str, versions: Sequence[TableVersion], mark: Watermark, cuts: CutLog, report: Report) -> bool:
    """Check versions, newest first: cuts descend strictly, and each is the node's own cut of that number.

    Return whether the table's history has parted from the node's: then nothing more can be compared.
    """
    parted = mark.cut > cuts.newest
    taken = f"has taken cut {mark.cut}"
    if parted:
        detail = f"{taken}, the node's newest is {cuts.newest}: the node was restored from an older copy"
        report.damage(Kind.AHEAD, place, detail, _OLDER)
    if mark.cut and mark.cut + 1 < cuts.first:
        detail = f"{taken}, and cuts {mark.cut + 1} to {cuts.first - 1} were given up since: the table is an older copy"
        report.damage(Kind.MISSING, place, detail, "put the newer copy of the table back")
    for newer, older in itertools.pairwise(versions):
        if newer.note.cut <= older.note.cut and newer.note.attempt:
            before = f"version {older.version} took {older.note.cut}"
            detail = f"version {newer.version} takes cut {newer.note.cut} after {before}"
            report.damage(Kind.DUPLICATE, place, detail, _DROP)
    for version in versions:
        report.count("table commits")
        cut = version.note.cut
        known = cuts.crc32c_of(cut) if cut <= cuts.newest else None
        if known is not None and known != version.note.crc32c:
            detail = f"version {version.version} has another cut {cut} than the node: histories have parted"
            report.damage(Kind.AHEAD, place, detail, _OLDER)
            parted = True
    return parted


def _read_file(path: Path, file: TableFile, report: Report) -> pa.Table | None:
    """Return the system columns of one file; None when it is not whole, which is then found."""
    place = f"table {path}, {file.path}"
    report.read("tables", file.bytes)
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
    """Check that each row is there once, and none is of a cut that the table has not taken."""
    report.count("table rows", rows.num_rows)
    names = rows.column(VCHANNEL).combine_chunks().dictionary_encode()
    channel, offset = names.indices.to_numpy(), rows.column(OFFSET).to_numpy()
    order = np.lexsort((offset, channel))  # a row offset of a vchannel is given to one row
    same = (np.diff(channel[order]) == 0) & (np.diff(offset[order]) == 0)
    if repeated := int(same.sum()):
        report.damage(Kind.DUPLICATE, place, f"holds {repeated} rows more than once", _DROP)
    if beyond := int((rows.column(TICK).to_numpy() > mark.tick).sum()):
        report.damage(Kind.CONTENT, place, f"holds {beyond} rows of cuts it says it has not taken", _DROP)


def _check_cuts(
    place: str, ticks: npt.NDArray[np.int64], collection_id: int, mark: Watermark, cuts: CutLog, report: Report
) -> None:
    """Compare the rows of each cut with what it brought: fewer when deletes or dropped partitions took some, never more."""
    brought: list[tuple[int, int, int, int]] = []
    some_removed = False
    for number in cuts.numbers:
        if number > mark.cut:
            break
        cut = cuts.read(number).manifest
        rows = sum(segment.rows for segment in cut.segments if segment.collection_id == collection_id)
        brought.append((number, cut.previous_tick, cut.tick, rows))
        some_removed = some_removed or any(file.collection_id == collection_id for file in cut.deletes)
        some_removed = some_removed or any(
            partition.dropped_tick
            for entry in cut.collections
            if entry.collection_id == collection_id
            for partition in entry.partitions
        )
    for number, after_tick, tick, rows in brought:
        low, high = np.searchsorted(ticks, [after_tick, tick], side="right")
        have = int(high - low)
        report.count("cuts compared with tables")
        if have > rows or (have < rows and not some_removed):
            report.damage(Kind.CONTENT, place, f"has {have} rows of cut {number}, which brought {rows}", _DROP)
