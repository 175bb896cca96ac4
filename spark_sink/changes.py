"""What a run of cuts changes in one collection, which files of its table are affected, and whether
files are whole.

A delete removes the rows of its key that have a smaller offset. A partition dropped at or before
the cut loses all of its rows, even if a new partition has its name: a name is unique among the
living partitions at any tick, so a drop removes everything that the table holds under it. Rows that
came after the previous cut and were dropped with their partition or collection are in no file. So
no version holds a state between the previous cut and such a drop.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flusher.directory import Cut, CutLog, check_file, file_paths, lives, living, measure_file
from flusher.manifest import CollectionEntry, DataFile, DeleteFile, SegmentFile
from interceptors.errors import CollectionNotFound
from spark_sink.columns import TableFile
from wal.errors import Corrupt, Truncated
from wal.files import place_beneath

_Range = tuple[int | str, int | str]
F = TypeVar("F", SegmentFile, TableFile)
T = TypeVar("T")

THREADS_MAX = 16
"""Each thread has a file open, and a machine may have more processors than a process has
descriptors to spare.
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """What some cuts change in a collection."""

    entry: CollectionEntry
    cuts: tuple[Cut, ...]
    segments: tuple[SegmentFile, ...]
    deletes: tuple[DeleteFile, ...]
    partition_names: dict[int, str]
    dropped_names: frozenset[str]
    changed: tuple[int, int]
    """The ticks of the first and the last change; both are the last cut's tick without a change."""

    @property
    def last(self) -> Cut:
        """The cut that the table has taken afterwards."""
        return self.cuts[-1]

    def of_partition(self, segments: Iterable[SegmentFile]) -> dict[str, list[SegmentFile]]:
        """Return segments by partition name. Raises `Corrupt` for a segment whose partition is in
        no manifest.
        """
        grouped: dict[str, list[SegmentFile]] = {}
        for segment in segments:
            if segment.partition_id not in self.partition_names:
                raise Corrupt(
                    f"segment {segment.path} is of partition {segment.partition_id}, which no cut "
                    "names"
                )
            grouped.setdefault(self.partition_names[segment.partition_id], []).append(segment)
        return grouped


def changes_of(entry: CollectionEntry, cuts: Sequence[Cut], *, after_tick: int) -> Changes:
    """Return the changes of `cuts` (at least one) to a table that has the collection's state at
    `after_tick`.
    """
    collection_id = entry.collection_id
    until = cuts[-1].tick
    entries = [found for cut in cuts for found in entries_of(cut, collection_id)]
    partitions = {
        partition.partition_id: partition
        for found in (entry, *entries)
        for partition in found.partitions
    }
    dropped = {
        number: each.name
        for number, each in partitions.items()
        if after_tick < each.dropped_tick <= until
    }
    segments = [
        file
        for cut in cuts
        for file in cut.manifest.segments
        if file.collection_id == collection_id
    ]
    return Changes(
        entry=entries[-1] if entries else entry,
        cuts=tuple(cuts),
        segments=tuple(file for file in segments if file.partition_id not in dropped),
        deletes=tuple(
            file
            for cut in cuts
            for file in cut.manifest.deletes
            if file.collection_id == collection_id
        ),
        partition_names={number: partition.name for number, partition in partitions.items()},
        dropped_names=frozenset(dropped.values()),
        changed=_changed(collection_id, cuts),
    )


def entries_of(cut: Cut, collection_id: int) -> list[CollectionEntry]:
    """Return the entries of a cut for a collection: one or none."""
    return [each for each in cut.manifest.collections if each.collection_id == collection_id]


def split_by_delete(files: Iterable[F], deletes: Sequence[DeleteFile]) -> tuple[list[F], list[F]]:
    """Return the files that may hold a row that a delete removes, and the others; files without
    ranges may.
    """
    reached: list[F] = []
    others: list[F] = []
    for file in files:
        (reached if any(_reaches(each, file) for each in deletes) else others).append(file)
    return reached, others


def batches(
    given: Iterable[T],
    bytes_of: Callable[[T], int],
    *,
    bytes_max: int,
    count_max: int | None = None,
) -> Iterator[list[T]]:
    """Split cuts or files into consecutive runs of at most `bytes_max` bytes; a larger one is a run
    alone.

    Runs have at most `count_max` items.
    """
    run: list[T] = []
    size_bytes = 0
    for each in given:
        if run and (len(run) == count_max or size_bytes + bytes_of(each) > bytes_max):
            yield run
            run = []
            size_bytes = 0
        run.append(each)
        size_bytes += bytes_of(each)
    if run:
        yield run


def _changed(collection_id: int, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Return the ticks of the first and the last change, including rows of partitions that were
    dropped again.
    """
    ticks: list[int] = []
    for cut in cuts:
        for file in cut.manifest.files:
            if file.collection_id == collection_id:
                ticks += (file.tick_min, file.tick_max)
        for entry in entries_of(cut, collection_id):
            last_drop = max([entry.dropped_tick, *(each.dropped_tick for each in entry.partitions)])
            if last_drop > cut.manifest.previous_tick:
                # rows from right after the previous cut may have been dropped before any file had
                # them
                ticks += (cut.manifest.previous_tick + 1, last_drop)
    return (min(ticks), max(ticks)) if ticks else (cuts[-1].tick, cuts[-1].tick)


def _reaches(delete: DeleteFile, file: SegmentFile | TableFile) -> bool:
    if isinstance(file, SegmentFile):
        vchannels: _Range | None = (file.vchannel, file.vchannel)
        keys = _key_range(file)
    else:
        vchannels = file.vchannel_range
        keys = file.key_range
    older = file.offset_min is None or file.offset_min < delete.offset_max
    return (
        older
        and _meet((delete.vchannel, delete.vchannel), vchannels)
        and _meet(_key_range(delete), keys)
    )


def _key_range(file: DataFile) -> _Range | None:
    return None if file.key_min is None or file.key_max is None else (file.key_min, file.key_max)


def _meet(one: _Range | None, other: _Range | None) -> bool:
    """Return whether two ranges may share a value; an unknown or differently typed range may."""
    if one is None or other is None or len({type(end) for end in (*one, *other)}) > 1:
        return True
    # all ends have one type
    return one[0] <= other[1] and other[0] <= one[1]  # type: ignore[operator]


def live_collection(cut: Cut, name: str) -> CollectionEntry:
    """Return the collection with this name that exists at a cut. Raises `CollectionNotFound`."""
    live = {each.name: each for each in cut.manifest.collections if lives(each, cut.tick)}
    if name not in live:
        known = ", ".join(sorted(live)) or "none"
        raise CollectionNotFound(f"no collection {name!r} at cut {cut.number} — there are: {known}")
    return live[name]


def first_with(cuts: CutLog, created_tick: int) -> int:
    """Return the number of the first cut that can hold rows of a collection created at
    `created_tick`.
    """
    number = cuts.newest
    while number > cuts.first and cuts.read(number).manifest.previous_tick >= created_tick:
        number -= 1
    if number > 1 and cuts.read(number).manifest.previous_tick >= created_tick:
        raise Truncated(
            f"cut {number - 1}",
            f"cut {number}",
            "read a table that has taken it, or copy that table",
        )
    return number


def verify_files(node: Path, files: Sequence[DataFile]) -> None:
    """Check every file against its manifest by length and CRC32C; this leaves the files in the page
    cache for the executors.

    Raises `Corrupt` for the first file that is damaged, or that is missing although a cut names it;
    `Truncated` for a file that retention removed with its cut.
    """
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, THREADS_MAX)) as threads:
        list(threads.map(lambda file: verify_file(node, file), files))


def verify_file(node: Path, file: DataFile) -> None:
    """Check one file. Raises as `verify_files`."""
    path = place_beneath(node, file.path)
    try:
        length, checksum = measure_file(path, expected_bytes=file.bytes)
    except FileNotFoundError:
        raise _gone(node, file) from None
    check_file(path, file, length, checksum)


def _gone(node: Path, file: DataFile) -> Corrupt | Truncated:
    """Return why a file is missing: `Corrupt` if a cut names it, else `Truncated`.

    Retention removes a cut's manifest before its files. Only the files of a dropped collection,
    which no table needs, go while their cuts stay.
    """
    cuts = CutLog(node)
    if cuts.numbers and file.collection_id not in living(cuts.read(cuts.newest).manifest):
        return Truncated(
            f"file {file.path}, of a collection that was dropped,",
            f"cut {cuts.newest}",
            "its rows are gone",
        )
    for number in cuts.numbers:
        if file.path in file_paths(cuts.read(number).manifest):
            return Corrupt(
                f"{node / file.path} is missing, and cut {number} names it — restore it from a "
                "backup that has it"
            )
    return Truncated(
        f"file {file.path}", f"cut {cuts.first}", "read again: every table has taken it by now"
    )
