"""What a run of cuts changes in one collection, which files of its table that touches, and whether
they are whole.

A row goes when a delete of its key has a larger offset; everything of a partition dropped at or
before the cut goes, also when one of the same name was created again: names are unique among the
living at any tick, so a drop ends all the table holds under the name. Rows that came since the cut
before and were dropped with their partition or collection are in no file, so states between that
cut and the drop are in none either.
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
"""Each has a file open, and a machine may have more processors than a process may open files beside
its others.
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
    """The ticks of the first and the last change; the last cut's own when nothing changed."""

    @property
    def last(self) -> Cut:
        """The cut the table is at afterwards."""
        return self.cuts[-1]

    def of_partition(self, segments: Iterable[SegmentFile]) -> dict[str, list[SegmentFile]]:
        """Return segments by partition name. Raises `Corrupt` for one of a partition no manifest
        names.
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
    """Return what `cuts` (at least one) change in a table that is the collection's state at
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
    """Return what a cut says about a collection: one entry, or none."""
    return [each for each in cut.manifest.collections if each.collection_id == collection_id]


def split_by_delete(files: Iterable[F], deletes: Sequence[DeleteFile]) -> tuple[list[F], list[F]]:
    """Return the files that may hold a row some delete removes, and the others; one without ranges
    may hold anything.
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
    """Split cuts or files into runs, in order: each of one, or of more with together at most
    `bytes_max`.
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
    """Return the ticks of the first and the last change; rows of a partition that is dropped again
    count, too.
    """
    ticks: list[int] = []
    for cut in cuts:
        for file in cut.manifest.files:
            if file.collection_id == collection_id:
                ticks += (file.tick_min, file.tick_max)
        for entry in entries_of(cut, collection_id):
            last_drop = max([entry.dropped_tick, *(each.dropped_tick for each in entry.partitions)])
            if last_drop > cut.manifest.previous_tick:
                # rows may have come at once, and be in no file
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
    """Whether two ranges can share a value: one that is unknown, or of another type, can."""
    if one is None or other is None or len({type(end) for end in (*one, *other)}) > 1:
        return True
    # all numbers, or all text
    return one[0] <= other[1] and other[0] <= one[1]  # type: ignore[operator]


def live_collection(cut: Cut, name: str) -> CollectionEntry:
    """Return the collection that has `name` at a cut. Raises `CollectionNotFound`."""
    live = {each.name: each for each in cut.manifest.collections if lives(each, cut.tick)}
    if name not in live:
        known = ", ".join(sorted(live)) or "none"
        raise CollectionNotFound(f"no collection {name!r} at cut {cut.number} — there are: {known}")
    return live[name]


def first_with(cuts: CutLog, created_tick: int) -> int:
    """Return the number of the first cut that can hold rows of something created at `created_tick`.

    Raises `Truncated` when that cut is no longer kept.
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
    """Return when every file is whole, by length and CRC32C; reading it leaves it in the page cache
    for the executors.

    Raises `Corrupt` naming the first one that is not, or that is missing though a cut names it;
    `Truncated` naming one that retention took with its cut.
    """
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, THREADS_MAX)) as threads:
        list(threads.map(lambda file: verify_file(node, file), files))


def verify_file(node: Path, file: DataFile) -> None:
    """Return when one file is whole. Raises as `verify_files`."""
    path = place_beneath(node, file.path)
    try:
        length, checksum = measure_file(path, expected_bytes=file.bytes)
    except FileNotFoundError:
        raise _gone(node, file) from None
    check_file(path, file, length, checksum)


def _gone(node: Path, file: DataFile) -> Corrupt | Truncated:
    """Return why a file is not there: retention removes a cut's manifest before its files, so one
    that is kept tells.

    But files of a dropped collection, for which no table waits, go by themselves.
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
        f"file {file.path}", f"cut {cuts.first}", "read again: every table has taken it meanwhile"
    )
