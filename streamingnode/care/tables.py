"""Checks the tables fed from a node: each took every cut at most once and only cuts of the node,
and has their rows. Blocks.

A table that is ahead of its node, or has another cut of the same number, was fed by a history of
the node that is not in the restored backup. A table that lacks cuts which the node has deleted is
itself an older copy. Imported only when tables are checked.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flusher.cuts import Lease, lease_path
from flusher.directory import CutLog
from flusher.manifest import OFFSET, TICK, VCHANNEL
from spark_sink.table import OpenTable, TableVersion, Watermark
from streamingnode.care.findings import Report
from wal.errors import StreamingNodeError

_DROP = "move the table away and ingest again"
_OLDER = "restore a newer backup of the node, or move the table away and ingest again"


def check_tables(
    node: Path, tables: Path, leases: Sequence[Lease], node_id: str, report: Report
) -> None:
    """Check every table in a directory against the cuts of the node, and each of the node's leases
    against the tables.
    """
    cuts = CutLog(node)
    for path in sorted(tables.iterdir()):
        if "@" not in path.name and not path.name.startswith(".") and path.is_dir():
            _check_table(path, cuts, node_id, report)
    for lease in leases:
        if lease.node_id == node_id and not Path(lease.table).is_dir():
            detail = f"is missing, but the node has a lease of it, at cut {lease.cut}"
            remove = f"remove {lease_path(node, Path(lease.table))} and ingest"
            step = (
                f"put it back; if it was moved, or to create it again from the kept cuts, {remove}"
            )
            report.damage(f"table {lease.table}", detail, step)


def _check_table(path: Path, cuts: CutLog, node_id: str, report: Report) -> None:
    place = f"table {path}"
    try:
        table = OpenTable.load(path)
        if table is None or table.identity is None:
            report.warn(
                place, "is not a table that an ingest created", "nothing to do, or move it away"
            )
            return
        identity = table.identity
        if node_id and identity.node_id != node_id:
            report.warn(
                place,
                f"is fed from node {identity.node_id}, not {node_id}",
                "verify that node with it",
            )
            return
        report.count("tables")
        mark = table.watermark
        versions = list(table.history())
        rows = table.rows(pa.schema([]))
        report.read("tables", sum(file.bytes for file in table.files()))
    except Exception as error:  # noqa: BLE001
        # damaged files may make the table's library raise anything
        report.error(place, error, _DROP)
        return
    if identity.collection != path.name:
        detail = (
            f"holds the collection {identity.collection!r}: the table was renamed, or swapped "
            "with another"
        )
        report.damage(
            place, detail, f"give it its name back: {path.with_name(identity.collection)}"
        )
    _check_rows(place, rows, mark, report)
    try:
        if _is_of_this_node(place, versions, mark, cuts, report):
            _check_cuts(
                place,
                np.sort(rows.column(TICK).to_numpy()),
                identity.collection_id,
                mark,
                cuts,
                report,
            )
    except StreamingNodeError as error:  # an unreadable cut, already reported with the cuts
        report.warn(
            place, f"cannot be compared with the cuts: {error.happened}", "restore the cuts first"
        )


def _is_of_this_node(
    place: str, versions: Sequence[TableVersion], mark: Watermark, cuts: CutLog, report: Report
) -> bool:
    """Whether each version of a table took the node's own cut of that number; if not, its rows
    cannot be compared.
    """
    if mark.cut > cuts.newest:
        detail = f"has taken cut {mark.cut}, the node's newest is {cuts.newest}"
        report.damage(place, f"{detail}: the node was restored from an older copy", _OLDER)
        return False
    if mark.cut and mark.cut + 1 < cuts.first:
        detail = (
            f"has taken cut {mark.cut}, and cuts {mark.cut + 1} to {cuts.first - 1} were deleted "
            "since"
        )
        report.damage(
            place, f"{detail}: the table is an older copy", "put the newer copy of the table back"
        )
    for version in versions:
        known = cuts.crc32c_of(version.note.cut)
        if known is not None and known != version.note.crc32c:
            detail = f"version {version.version} has another cut {version.note.cut} than the node"
            report.damage(place, f"{detail}: histories have parted", _OLDER)
            return False
    return True


def _check_rows(place: str, rows: pa.Table, mark: Watermark, report: Report) -> None:
    """Check that no row occurs twice, and that no row is of a cut that the table has not taken."""
    report.count("table rows", rows.num_rows)
    names = rows.column(VCHANNEL).combine_chunks().dictionary_encode()
    channel = names.indices.to_numpy()
    offset = rows.column(OFFSET).to_numpy()
    order = np.lexsort((offset, channel))  # each row offset of a vchannel belongs to one row
    same = (np.diff(channel[order]) == 0) & (np.diff(offset[order]) == 0)
    if repeated := int(same.sum()):
        report.damage(place, f"holds {repeated} rows more than once", _DROP)
    if beyond := int((rows.column(TICK).to_numpy() > mark.tick).sum()):
        report.damage(
            place,
            f"holds {beyond} rows of cuts that it has not taken according to its watermark",
            _DROP,
        )


def _check_cuts(
    place: str,
    ticks: npt.NDArray[np.int64],
    collection_id: int,
    mark: Watermark,
    cuts: CutLog,
    report: Report,
) -> None:
    """Compare the table's rows of each cut with the rows of the cut: deletes and dropped partitions
    may leave fewer, never more.
    """
    others: list[tuple[int, int, int]] = []
    some_removed = False
    for number in cuts.numbers:
        if number > mark.cut:
            break
        cut = cuts.read(number).manifest
        brought = sum(
            segment.rows for segment in cut.segments if segment.collection_id == collection_id
        )
        low, high = np.searchsorted(ticks, [cut.previous_tick, cut.tick], side="right")
        if high - low != brought:
            others.append((number, int(high - low), brought))
        entries = [entry for entry in cut.collections if entry.collection_id == collection_id]
        some_removed = some_removed or any(
            file.collection_id == collection_id for file in cut.deletes
        )
        some_removed = some_removed or any(
            each.dropped_tick for entry in entries for each in entry.partitions
        )
        report.count("cuts compared with tables")
    for number, have, brought in others:
        if have > brought or not some_removed:
            report.damage(place, f"has {have} rows of cut {number}, which brought {brought}", _DROP)
