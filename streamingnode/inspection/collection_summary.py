"""How far each collection of a node is, and what holds its files, as cuts, leases and directories tell it. Blocks.

In: the cuts in a node directory. Out: a `CollectionSummary` for each collection that lives at the newest cut. A reader of
what came after that cut can bring a summary up to date with `counted`. And for each collection that has files a
`HeldFiles`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from flusher.cut_log import Cut, CutLog, lives
from flusher.manifest import CollectionEntry, arrow_schema, collection_info
from flusher.retention import UNREADABLE, TableLease, read_leases


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSummary:
    """One collection: what it is and how many rows were ever inserted.

    `next_offsets` has the next row offset of each shard, so their sum counts inserted rows; `last_tick` is that of the
    newest row or delete, 0 when there is none or its cut is no longer kept.
    """

    id: int
    name: str
    primary_key: str
    columns: Mapping[str, str]
    partitions: tuple[str, ...]
    next_offsets: Mapping[str, int]
    last_tick: int

    @property
    def inserted(self) -> int:
        """Rows inserted since the collection was created."""
        return sum(self.next_offsets.values())

    def counted(self, rows: Mapping[str, int], tick: int) -> "CollectionSummary":
        """Return the summary after `rows` more were inserted on each shard, at ticks up to `tick`."""
        offsets = {name: offset + rows.get(name, 0) for name, offset in self.next_offsets.items()}
        return replace(self, next_offsets=offsets, last_tick=max(self.last_tick, tick))


def summaries_at_newest(cuts: CutLog) -> dict[int, CollectionSummary]:
    """Return the living collections of the newest cut by id; none when no cut was made."""
    if not cuts.numbers:
        return {}
    newest = cuts.read(cuts.newest)
    offsets = {vchannel.name: vchannel.next_offset for vchannel in newest.manifest.vchannels}
    entries = {entry.collection_id: entry for entry in newest.manifest.collections if lives(entry, newest.tick)}
    ticks = _last_ticks(cuts, set(entries))
    return {number: _summary(entry, offsets, ticks.get(number, 0)) for number, entry in entries.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFiles:
    """The files of one collection: `name` is empty for one that was dropped, `held_by` says why they are still there."""

    id: int
    name: str
    files: int
    bytes: int
    held_by: tuple[str, ...]


def held_files(cuts: CutLog) -> list[HeldFiles]:
    """Return what holds the files of each collection, by id."""
    if not cuts.numbers:
        return []
    newest = cuts.read(cuts.newest).manifest
    living = {entry.collection_id: entry.name for entry in newest.collections if lives(entry, newest.tick)}
    leases = read_leases(cuts.directory, node_id=newest.node_id)
    sizes = _sizes(cuts)
    return [
        HeldFiles(
            id=number,
            name=living.get(number, ""),
            files=len(sizes[number]),
            bytes=sum(sizes[number]),
            held_by=_held_by(number, newest.number, living, leases),
        )
        for number in sorted(sizes)
    ]


def _held_by(
    collection_id: int, newest: int, living: Mapping[int, str], leases: Sequence[TableLease]
) -> tuple[str, ...]:
    """Return who holds a collection's files. Cuts go in order, so a live one's wait for every table that lags."""
    with_table = {lease.collection_id for lease in leases}
    unreadable = [f"{lease.table}, which is no lease" for lease in leases if lease.collection_id == UNREADABLE]
    if collection_id not in living:
        holders = [f"table {lease.table}" for lease in leases if lease.collection_id == collection_id]
        return (*unreadable, *holders) or ("minimum retention",)
    tableless = [] if collection_id in with_table else ["no table has its rows"]
    tableless += [
        f"collection {name}, which has no table"
        for number, name in living.items()
        if number not in with_table and number != collection_id
    ]
    lagging = [
        f"table {lease.table} at cut {lease.cut}"
        for lease in leases
        if lease.cut < newest and lease.collection_id != UNREADABLE
    ]
    return (*unreadable, *tableless, *lagging) or ("minimum retention",)


def _sizes(cuts: CutLog) -> dict[int, list[int]]:
    """Return the sizes of the files of each collection that has some."""
    sizes: dict[int, list[int]] = {}
    for top in ("segments", "deletes"):
        for path in cuts.directory.files(top):
            name = path.split("/")[1]
            if name.isdecimal() and path.endswith(".parquet"):
                with suppress(FileNotFoundError):  # a running node removes files
                    sizes.setdefault(int(name), []).append(cuts.directory.size_bytes(path))
    return sizes


def _summary(entry: CollectionEntry, offsets: Mapping[str, int], last_tick: int) -> CollectionSummary:
    return CollectionSummary(
        id=entry.collection_id,
        name=entry.name,
        primary_key=entry.primary_key,
        columns={field.name: str(field.type) for field in arrow_schema(collection_info(entry))},
        partitions=tuple(partition.name for partition in entry.partitions if not partition.dropped_tick),
        next_offsets={name: offsets.get(name, 0) for name in entry.vchannels},
        last_tick=last_tick,
    )


def _last_ticks(cuts: CutLog, wanted: set[int]) -> dict[int, int]:
    """Return the newest tick of each wanted collection, looking backwards only until all are found."""
    found: dict[int, int] = {}
    for number in reversed(cuts.numbers):
        for collection_id, tick in _ticks(cuts.read(number)).items():
            found.setdefault(collection_id, tick)
        if wanted <= found.keys():
            break
    return found


def _ticks(cut: Cut) -> dict[int, int]:
    ticks: dict[int, int] = {}
    for file in (*cut.manifest.segments, *cut.manifest.deletes):
        ticks[file.collection_id] = max(ticks.get(file.collection_id, 0), file.tick_max)
    return ticks
