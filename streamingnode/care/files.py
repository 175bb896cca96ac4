"""The cuts of a node, every file they name, leases, and what lies there besides. Blocks.

A cut must follow the one before it, its files must be those it names, and the newest one must be the one that the
checkpoint knows, or the next. The checksum of a whole file finds every changed byte; the pages are decoded all the same:
they say which rows a changed byte takes, and that the rows are those that the manifest counts.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flusher.cuts import LEASES, TOGETHER, Lease, lease_files, lease_path
from flusher.directory import CUTS, Cut, NodeDirectory, cut_numbers, living, manifest_path, measure_file, read_cut
from flusher.manifest import (
    OFFSET,
    TICK,
    VCHANNEL,
    Checkpoint,
    CutManifest,
    DataFile,
    SegmentFile,
    decode_manifest,
    manifest_crc32c,
)
from flusher.retention import SET_ASIDE_SUFFIX
from streamingnode.care.database import UNFINISHED_NAME, is_unfinished_creation
from streamingnode.care.findings import Kind, Report
from wal.errors import Corrupt, StreamingNodeError, UnsupportedFormat
from wal.files import LOCK_NAME, place_beneath
from wal.rocks.floor import FLOOR_NAME
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME

DATA, TEMPORARY = ("segments", "deletes"), ".tmp"

_PARQUET_ERRORS = (pa.ArrowException, OSError, ValueError)
_KNOWN = frozenset({LOCK_NAME, FLOOR_NAME, DATABASE_NAME, CUTS, *DATA, LEASES, BACKUP_RECORD_NAME})
_SOCKET_OR_RESERVE = re.compile(r"node\.[a-z]+|reserve|scrub\.json")
"""Files a running or an earlier owner keeps beside its data; `scrub.json` is from owners that verified by themselves."""
_MANIFEST = re.compile(r"\d{16}\.json")
_STARTS = "nothing to do: the node removes it when it starts, if it wrote it"
_INGEST = "run `streamingnode ingest` for each table, which writes it again; then remove what is left over"
_MOVE = "move it away"


@dataclass(slots=True, kw_only=True)
class LogFacts:
    """What the log knows of the cuts beside it: checkpoint and last tick are None when nobody could be asked.

    Cuts below `first_kept` may be gone. `running` is for a node that goes on meanwhile: cuts may come and, by retention, go.
    """

    node_id: str
    checkpoint: Checkpoint | None = None
    last_tick: int | None = None
    first_kept: int | None = None
    running: bool = False


# --- cuts -------------------------------------------------------------------------------------------------------------


def check_cuts(directory: Path, facts: LogFacts, report: Report) -> frozenset[str]:
    """Check every cut with its files, oldest first, and return the paths of all files that are named."""
    numbers = cut_numbers(directory)
    check_oldest(numbers, facts.first_kept, report)
    living_ids: frozenset[int] | None = None
    with suppress(OSError, StreamingNodeError):  # what is wrong with it is found in its turn
        living_ids = living(read_cut(NodeDirectory(directory), numbers[-1]).manifest) if numbers else None
    cuts = _Cuts(NodeDirectory(directory), facts, living_ids, report)
    for number in numbers:
        cuts.check(number)
    cuts.check_newest(numbers[-1] if numbers else 0)
    return frozenset(cuts.named)


def check_oldest(numbers: list[int], first_kept: int | None, report: Report) -> None:
    """Report cuts that are missing before the earliest one that is there; None: nobody knows which one that has to be."""
    if first_kept is not None and numbers and numbers[0] > first_kept:
        detail = f"the cuts from {first_kept} on, before {numbers[0]}, are missing, and retention did not take them"
        report.damage(Kind.MISSING, CUTS, detail)


class _Cuts:
    """The cuts of a node in ascending order; `living_ids` are the collections at the newest one, None: nobody knows."""

    def __init__(self, node: NodeDirectory, facts: LogFacts, living_ids: frozenset[int] | None, report: Report) -> None:
        self.named: dict[str, int] = {}
        self._node, self._facts, self._living_ids, self._report = node, facts, living_ids, report
        self._before: Cut | None = None

    def check(self, number: int) -> None:
        place, before = manifest_path(number), self._before
        self._before = None
        try:
            content = self._node.read(place)
        except FileNotFoundError:
            return  # retention took it since it was listed, and those before it
        except Corrupt as error:
            self._report.damage(Kind.UNREADABLE, place, error.happened)
            return
        if before is not None and number != before.number + 1:
            gone = f"cuts {before.number + 1} to {number - 1}"
            self._report.damage(Kind.MISSING, CUTS, f"{gone} are missing between others")
        manifest = self._decode(number, place, content)
        self._report.read(CUTS, len(content))
        if manifest is None:
            return
        self._check_place(before, manifest, place)
        self._check_offsets(before, manifest, place)
        self._before = Cut(manifest, manifest_crc32c(content))
        for file in manifest.files:
            self._check_file(manifest, file, place)

    def check_newest(self, newest: int) -> None:
        facts, before = self._facts, self._before
        if facts.checkpoint is None:
            return
        known = facts.checkpoint.cut_number
        told = f"the newest cut is {newest}, the log's checkpoint is at {known}"
        is_beyond = facts.last_tick is not None and before is not None and before.tick > facts.last_tick
        if newest < known:
            self._report.damage(Kind.MISSING, CUTS, f"{told}: newer cuts are missing")
        elif not facts.running and (newest > known + 1 or is_beyond):
            self._report.damage(Kind.MIXED, CUTS, f"{told}: the log is older than the cuts beside it", TOGETHER)
        elif newest == known and before is not None and before.crc32c != facts.checkpoint.manifest_crc32c:
            detail = f"cut {newest} is not the one the log's checkpoint knows"
            self._report.damage(Kind.MIXED, manifest_path(newest), detail)

    def _decode(self, number: int, place: str, content: bytes) -> CutManifest | None:
        report, node_id = self._report, self._facts.node_id
        try:
            manifest = decode_manifest(content, name=place)
        except UnsupportedFormat as error:
            report.damage(Kind.UNREADABLE, place, str(error), "use the release that wrote it, or a newer one")
            return None
        except StreamingNodeError as error:
            report.damage(Kind.CHECKSUM, place, error.happened)
            return None
        if manifest.number != number:
            report.damage(Kind.MIXED, place, f"holds cut {manifest.number}: it was copied over, or swapped")
            return None
        report.count("cuts")
        if node_id and manifest.node_id != node_id:
            report.damage(Kind.FOREIGN, place, f"is of node {manifest.node_id}, not of {node_id}")
            return None
        return manifest

    def _check_place(self, before: Cut | None, manifest: CutManifest, place: str) -> None:
        if before is None:
            if manifest.number == 1 and (manifest.previous_tick or manifest.previous_crc32c):
                self._report.damage(Kind.CONTENT, place, "is the first cut and names one before it")
            return
        if before.number + 1 == manifest.number and (
            (manifest.previous_crc32c, manifest.previous_tick) != (before.crc32c, before.tick)
        ):
            detail = f"does not follow the cut {before.number} that is here: one of them is of another history"
            self._report.damage(Kind.MIXED, place, detail)
        elif manifest.tick <= before.tick:
            detail = f"has tick {manifest.tick}, the cut before it {before.tick}"
            self._report.damage(Kind.CONTENT, place, detail)

    def _check_offsets(self, before: Cut | None, manifest: CutManifest, place: str) -> None:
        """Rows of a cut lie between the next offset of the cut before it and its own, and no more than fit there."""
        ends = {each.name: each.next_offset for each in manifest.vchannels}
        follows = before is not None and before.number + 1 == manifest.number
        starts = {each.name: each.next_offset for each in before.manifest.vchannels} if before and follows else {}
        rows: dict[str, int] = {}
        for segment in manifest.segments:
            rows[segment.vchannel] = rows.get(segment.vchannel, 0) + segment.rows
            end, start = ends.get(segment.vchannel), starts.get(segment.vchannel)
            if (end is not None and segment.offset_max >= end) or (start is not None and segment.offset_min < start):
                offsets = f"offsets {segment.offset_min} to {segment.offset_max}, not {start} to {end}"
                self._report.damage(Kind.CONTENT, place, f"says {segment.path} has {offsets}")
        for vchannel in sorted(rows.keys() & ends.keys() & starts.keys()):
            given = ends[vchannel] - starts[vchannel]
            if rows[vchannel] > given:
                detail = f"names {rows[vchannel]} rows of {vchannel}, which got {given} offsets"
                self._report.damage(Kind.CONTENT, place, detail)

    def _check_file(self, manifest: CutManifest, file: DataFile, place: str) -> None:
        if file.path in self.named:
            detail = f"names {file.path}, which cut {self.named[file.path]} names too"
            self._report.damage(Kind.DUPLICATE, place, detail)
            return
        self.named[file.path] = manifest.number
        try:
            _check_data_file(place_beneath(self._node.root, file.path), file, manifest, self._report)
        except FileNotFoundError:
            # Retention removes files of a dropped collection before their cut, and those of a cut after it.
            is_gone = self._living_ids is not None and file.collection_id not in self._living_ids
            if not is_gone and not (self._facts.running and not (self._node.root / place).exists()):
                detail = f"cut {manifest.number} names it ({file.rows} rows) and it is not there"
                self._report.damage(Kind.MISSING, file.path, detail)
        except OSError as error:
            self._report.damage(Kind.UNREADABLE, file.path, f"cannot be read: {error.strerror}")
        except Corrupt as error:
            self._report.damage(Kind.UNREADABLE, file.path, error.happened)


# --- the files of a cut -----------------------------------------------------------------------------------------------


def _check_data_file(path: Path, file: DataFile, manifest: CutManifest, report: Report) -> None:
    length, checksum = measure_file(path, expected_bytes=file.bytes, take=lambda chunk: report.read(CUTS, len(chunk)))
    report.count("segments" if isinstance(file, SegmentFile) else "delete files")
    other = _other_identity(path, file, manifest)
    if length != file.bytes:
        detail = f"has {length} bytes, its cut says {file.bytes}" + (f"; {other}" if other else "")
        report.damage(Kind.LENGTH, file.path, detail)
    elif checksum != file.crc32c:
        detail = other or f"fails its checksum; unreadable: {_broken_rows(path) or 'nothing of its rows'}"
        report.damage(Kind.FOREIGN if "of node" in other else Kind.CHECKSUM, file.path, detail)
    elif other:
        report.damage(Kind.FOREIGN, file.path, other)
    else:
        _check_row_groups(path, file, report)


def _check_row_groups(path: Path, file: DataFile, report: Report) -> None:
    rows, before = 0, -1
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group)
                if problem := _wrong_rows(table, file, before):
                    report.damage(Kind.CONTENT, file.path, f"row group {group}: {problem}")
                    return
                rows += table.num_rows
                before = int(table.column(OFFSET)[-1].as_py()) if table.num_rows else before
                report.read(CUTS, 0)
    except _PARQUET_ERRORS as error:
        report.damage(Kind.CHECKSUM, file.path, f"is what its cut names, and is no Parquet file: {error}")
        return
    report.count("rows", rows)
    if rows != file.rows:
        report.damage(Kind.CONTENT, file.path, f"holds {rows} rows, its cut says {file.rows}")


def _wrong_rows(table: pa.Table, file: DataFile, before: int) -> str:
    """Return what is wrong with the rows of a row group that follows the offset `before`; nothing when all is well."""
    if not table.num_rows:
        return ""
    ticks, offsets = table.column(TICK).to_numpy(), table.column(OFFSET).to_numpy()
    if not (file.tick_min <= ticks.min() and ticks.max() <= file.tick_max):
        return f"ticks {ticks.min()} to {ticks.max()} are outside {file.tick_min} to {file.tick_max}"
    if not (file.offset_min <= offsets.min() and offsets.max() <= file.offset_max):
        return f"offsets {offsets.min()} to {offsets.max()} are outside {file.offset_min} to {file.offset_max}"
    if isinstance(file, SegmentFile) and (offsets[0] <= before or np.any(np.diff(offsets) <= 0)):
        return "row offsets do not ascend"
    names = pc.unique(table.column(VCHANNEL)).to_pylist()
    return "" if names == [file.vchannel] else f"holds rows of {', '.join(map(str, names))}, not of {file.vchannel}"


def _other_identity(path: Path, file: DataFile, manifest: CutManifest) -> str:
    """Return who a file is when that is somebody else than its cut names; nothing when it is itself or does not say."""
    try:
        with pq.ParquetFile(path) as parquet:
            metadata = {key.decode(): value.decode() for key, value in (parquet.metadata.metadata or {}).items()}
    except _PARQUET_ERRORS:
        return ""
    node_id, segment = metadata.get("streamingnode.node_id"), metadata.get("streamingnode.segment_id")
    if node_id is not None and node_id != manifest.node_id:
        return f"it is a file of node {node_id}"
    if isinstance(file, SegmentFile) and segment is not None and segment != str(file.segment_id):
        return f"it holds segment {segment}, not {file.segment_id}: files were swapped or copied"
    return ""


def _broken_rows(path: Path) -> str:
    """Return which row groups of a damaged file cannot be decoded, by their rows."""
    broken, first = [], 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as parquet:
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                try:
                    parquet.read_row_group(group)
                except _PARQUET_ERRORS:
                    broken.append(f"rows {first} to {first + count - 1}")
                first += count
    except _PARQUET_ERRORS:
        return "its footer, so all of its rows"
    return ", ".join(broken)


# --- leases and strays ------------------------------------------------------------------------------------------------


def check_leases(directory: Path, node_id: str, report: Report) -> list[Lease]:
    """Look at what tables say they have taken, and return the leases that can be read.

    One ahead of the node is damage: its table took cuts that the node never made, so the node is an older copy.
    """
    leases: list[Lease] = []
    for path in sorted((directory / LEASES).glob("*")):
        if path.suffix != ".json":
            _stray(f"{LEASES}/{path.name}", report)
    for place, lease in lease_files(NodeDirectory(directory)):
        report.count("leases")
        if isinstance(lease, str):
            detail = f"does not decode, and holds all retention until it does: {lease}"
            report.warn(Kind.CHECKSUM, place, detail, _INGEST)
            continue
        leases.append(lease)
        newest = max(cut_numbers(directory), default=0)  # listed after the lease, which may be of a cut just made
        if lease_path(directory, Path(lease.table)).name != Path(place).name:
            report.warn(Kind.MIXED, place, f"is of table {lease.table}: it was swapped or copied", _INGEST)
        if node_id and lease.node_id != node_id:
            report.warn(Kind.FOREIGN, place, f"is of node {lease.node_id}; it holds nothing here", _MOVE)
        elif lease.cut > newest:
            taken = f"table {lease.table} has taken cut {lease.cut}, the node's newest is {newest}"
            step = "restore a newer backup, or move the table away and ingest again"
            report.damage(Kind.AHEAD, place, f"{taken}: the node is an older copy", step)
    return leases


def check_strays(directory: Path, named: frozenset[str], report: Report, *, running: bool = False) -> None:
    """Look for what nothing names. Of a running node only what it cannot be about to name.

    `named` are the files that cuts name. While cuts are damaged, as `report` has it, nobody knows what they named.
    """
    _check_top(directory, report, running=running)
    for path in sorted((directory / CUTS).glob("*")):
        if not _MANIFEST.fullmatch(path.name) and not (running and path.name.endswith((TEMPORARY, SET_ASIDE_SUFFIX))):
            _stray(f"{CUTS}/{path.name}", report)
    if running or any(found.place.startswith(CUTS) for found in report.damages):
        return
    places: list[str] = []
    for top in DATA:
        with suppress(Corrupt):  # a link in its place, which every file that is named in it has told
            places += NodeDirectory(directory).files(top)
    for place in places:
        if not place.endswith(".parquet"):
            _stray(place, report)
        elif place not in named:
            report.warn(Kind.ORPHAN, place, "no cut names it: a crash before its cut, or somebody else's", _STARTS)


def _check_top(directory: Path, report: Report, *, running: bool) -> None:
    for path in sorted(directory.iterdir()):
        is_temporary = path.name.endswith(TEMPORARY)
        if path.name in _KNOWN or _SOCKET_OR_RESERVE.fullmatch(path.name) or (is_temporary and running):
            continue
        if path.name == UNFINISHED_NAME and is_unfinished_creation(directory):
            continue  # which is a finding of its own
        if is_temporary:
            report.warn(Kind.ORPHAN, path.name, "temporary, and never finished", _MOVE)
        else:
            report.warn(Kind.FOREIGN, path.name, "is none of a node's", _MOVE)


def _stray(place: str, report: Report) -> None:
    if place.endswith(TEMPORARY):
        report.warn(Kind.ORPHAN, place, "a temporary file that was never finished", _STARTS)
    elif place.endswith(SET_ASIDE_SUFFIX):
        report.warn(Kind.ORPHAN, place, "retention was removing this cut and its files", _STARTS)
    else:
        report.warn(Kind.FOREIGN, place, "is none of a node's", _MOVE)
