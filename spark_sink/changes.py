"""What a run of cuts changes in one collection, and which files of its table that touches. Pure: no Spark, no disk.

Rules kept here: a row goes when a delete of its key has a larger offset; everything of a partition dropped at or before the
cut goes, also when a partition of the same name was created again; files that no delete can reach stay as they are.
Names of partitions are unique among the living at any tick, so a drop in these cuts ends all the table holds under the name.
Rows that came since the cut before and were dropped with their partition or collection are in no file, so states between
that cut and the drop are in none either.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flusher.cut_log import Cut, CutLog, living
from flusher.manifest import CollectionEntry, DataFile, DeleteFile, SegmentFile
from wal.codec import crc32c
from wal.errors import Corrupt, Truncated
from wal.files import open_binary, place_beneath

if TYPE_CHECKING:
    from spark_sink.table import TableFile  # an executor that imports this has no need of deltalake


@dataclass(frozen=True, slots=True)
class Changes:
    """What the cuts `first` to `last` change in a collection."""

    entry: CollectionEntry
    cuts: tuple[Cut, ...]
    segments: tuple[SegmentFile, ...]
    deletes: tuple[DeleteFile, ...]
    partition_names: dict[int, str]
    dropped_names: frozenset[str]
    changed: tuple[int, int]
    """The ticks of the first and the last change; the last cut's own when nothing changed."""

    @property
    def last(self) -> Cut:
        """The cut the table is at afterwards."""
        return self.cuts[-1]

    @property
    def files(self) -> tuple[DataFile, ...]:
        """Every file of the node that has to be read."""
        return (*self.segments, *self.deletes)

    def of_partition(self, segments: Iterable[SegmentFile]) -> dict[str, list[SegmentFile]]:
        """Return segments by partition name. Raises `Corrupt` for one of a partition no manifest names."""
        grouped: dict[str, list[SegmentFile]] = {}
        for segment in segments:
            if segment.partition_id not in self.partition_names:
                raise Corrupt(f"segment {segment.path} is of partition {segment.partition_id}, which no cut names")
            grouped.setdefault(self.partition_names[segment.partition_id], []).append(segment)
        return grouped


def changes_of(
    entry: CollectionEntry, cuts: Sequence[Cut], *, after_tick: int, until_tick: int | None = None
) -> Changes:
    """Return what `cuts` (at least one) change in a table that is the collection's state at `after_tick`.

    Partitions dropped after `until_tick` (the last cut's tick for None) live; whoever gives one leaves out rows after it.
    Raises `Truncated` when rows that lived at `until_tick` were dropped before a cut took them.
    """
    until = cuts[-1].tick if until_tick is None else until_tick
    collection_id = entry.collection_id
    _check_state_kept(entry, cuts[-1], until)
    entries = [found for cut in cuts for found in cut.manifest.collections if found.collection_id == collection_id]
    partitions = {partition.partition_id: partition for found in (entry, *entries) for partition in found.partitions}
    dropped = {
        partition.partition_id: partition.name
        for partition in partitions.values()
        if after_tick < partition.dropped_tick <= until
    }
    return Changes(
        entry=entries[-1] if entries else entry,
        cuts=tuple(cuts),
        segments=tuple(
            file
            for cut in cuts
            for file in cut.manifest.segments
            if file.collection_id == collection_id and file.partition_id not in dropped
        ),
        deletes=tuple(file for cut in cuts for file in cut.manifest.deletes if file.collection_id == collection_id),
        partition_names={number: partition.name for number, partition in partitions.items()},
        dropped_names=frozenset(dropped.values()),
        changed=_changed(collection_id, cuts),
    )


def split_by_delete(
    segments: Iterable[SegmentFile], deletes: Sequence[DeleteFile]
) -> tuple[list[SegmentFile], list[SegmentFile]]:
    """Return the segments that some delete can reach, and the others."""
    reached: list[SegmentFile] = []
    others: list[SegmentFile] = []
    for segment in segments:
        hit = any(
            delete.vchannel == segment.vchannel
            and segment.offset_min < delete.offset_max
            and _ranges_meet(_key_range(delete), _key_range(segment))
            for delete in deletes
        )
        (reached if hit else others).append(segment)
    return reached, others


def reachable(files: "Iterable[TableFile]", deletes: Sequence[DeleteFile]) -> "list[TableFile]":
    """Return the table's files that may hold a row some delete removes; a file without ranges may hold anything."""
    return [file for file in files if any(_reaches(delete, file) for delete in deletes)]


def batches(cuts: Sequence[Cut], *, bytes_max: int, every_cut: bool = False) -> list[list[Cut]]:
    """Split cuts into runs for one commit each: in order, at least one cut, then at most `bytes_max` of files.

    With `every_cut` each cut is a run of its own.
    """
    if every_cut:
        return [[cut] for cut in cuts]
    runs: list[list[Cut]] = []
    size = 0
    for cut in cuts:
        if not runs or size + cut.data_bytes > bytes_max:
            runs.append([])
            size = 0
        runs[-1].append(cut)
        size += cut.data_bytes
    return runs


def _check_state_kept(entry: CollectionEntry, last: Cut, until: int) -> None:
    before = last.manifest.previous_tick
    drops = [tick for tick in _drops(entry.collection_id, last) if tick > until]
    if until > before and drops:
        step = f"ask for {before}" + (f", or for {max(drops)} or later" if not _is_dropped(entry, last) else "")
        raise Truncated(f"the state of {entry.name!r} at {until}, before rows of it were dropped,", max(drops), step)


def _is_dropped(entry: CollectionEntry, cut: Cut) -> bool:
    return any(each.dropped_tick for each in cut.manifest.collections if each.collection_id == entry.collection_id)


def _drops(collection_id: int, cut: Cut) -> list[int]:
    """Return the ticks since the cut before at which the collection or a partition of it was dropped."""
    entries = [each for each in cut.manifest.collections if each.collection_id == collection_id]
    ticks = [each.dropped_tick for each in entries]
    ticks += [partition.dropped_tick for each in entries for partition in each.partitions]
    return [tick for tick in ticks if tick > cut.manifest.previous_tick]


def _changed(collection_id: int, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Return the ticks of the first and the last change; rows of a partition that is dropped again count, too."""
    ticks: list[int] = []
    for cut in cuts:
        for file in (*cut.manifest.segments, *cut.manifest.deletes):
            if file.collection_id == collection_id:
                ticks += (file.tick_min, file.tick_max)
        if drops := _drops(collection_id, cut):
            ticks += (cut.manifest.previous_tick + 1, max(drops))  # rows may have come at once, and be in no file
    return (min(ticks), max(ticks)) if ticks else (cuts[-1].tick, cuts[-1].tick)


def _reaches(delete: DeleteFile, file: "TableFile") -> bool:
    if file.offset_min is not None and file.offset_min >= delete.offset_max:
        return False
    if file.vchannel_range is not None and not file.vchannel_range[0] <= delete.vchannel <= file.vchannel_range[1]:
        return False
    return _ranges_meet(_key_range(delete), file.key_range)


def _key_range(file: DataFile) -> tuple[int | str, int | str] | None:
    return None if file.key_min is None or file.key_max is None else (file.key_min, file.key_max)


def _ranges_meet(one: tuple[int | str, int | str] | None, other: tuple[int | str, int | str] | None) -> bool:
    """Whether two inclusive ranges can share a key; an unknown range can. Numbers and text never share one."""
    if one is None or other is None:
        return True
    match one, other:
        case (int() as low, int() as high), (int() as other_low, int() as other_high):
            return low <= other_high and other_low <= high
        case (str() as low, str() as high), (str() as other_low, str() as other_high):
            return low <= other_high and other_low <= high
        case _:
            return True


# --- integrity ---
#
# Are the node's files what its manifests say? Length and CRC32C of each, in bounded memory, before a row is read.
#
# Runs in threads of the driver: the checksum releases the interpreter lock, and one pass at disk speed leaves the file in
# the page cache for the executors that read it next.


CHUNK_BYTES = 1 << 20
"""Read at a time by each thread; large enough to cost nothing per call, small enough to forget."""

THREADS_MAX = 16
"""Each has a file open, and a machine may have more processors than a process may open files beside its others."""


def verify_files(node: Path, files: Sequence[DataFile]) -> None:
    """Return when every file is whole.

    Raises `Corrupt` naming the first one that is not, or that is missing though a cut names it; `Truncated` naming one that
    retention took with its cut.
    """
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, THREADS_MAX)) as threads:
        for _ in threads.map(lambda file: verify_file(node, file), files):
            pass


def verify_file(node: Path, file: DataFile) -> None:
    """Return when one file is whole. Raises as `verify_files`."""
    path = place_beneath(node, file.path)
    try:
        length, checksum = _measure(path, file.bytes)
    except FileNotFoundError:
        raise _gone(node, file) from None
    if length != file.bytes:
        raise Corrupt(f"{path} has {length} bytes, its cut says {file.bytes} — restore it from a backup")
    if checksum != file.crc32c:
        raise Corrupt(f"{path} fails its checksum — restore it from a backup")


def _gone(node: Path, file: DataFile) -> Corrupt | Truncated:
    """Return why a file is not there: retention removes a cut's manifest before its files, so one that is kept tells.

    But files of a dropped collection, for which no table waits, go by themselves.
    """
    cuts = CutLog(node)
    if cuts.numbers and file.collection_id not in living(cuts.read(cuts.newest).manifest):
        return Truncated(
            f"file {file.path}, of a collection that was dropped,", f"cut {cuts.newest}", "its rows are gone"
        )
    for number in cuts.numbers:
        manifest = cuts.read(number).manifest
        if any(file.path == each.path for each in (*manifest.segments, *manifest.deletes)):
            return Corrupt(
                f"{node / file.path} is missing, and cut {number} names it — restore it from a backup that has it"
            )
    return Truncated(f"file {file.path}", f"cut {cuts.first}", "read again: every table has taken it meanwhile")


def _measure(path: Path, expected_bytes: int) -> tuple[int, int]:
    """Return length and CRC32C of a file; nothing is read of one with another length, which may be a terabyte of holes."""
    length = checksum = 0
    with open_binary(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes != expected_bytes:
            return size_bytes, 0
        while chunk := stream.read(CHUNK_BYTES):
            length += len(chunk)
            checksum = crc32c(chunk, checksum)
    return length, checksum
