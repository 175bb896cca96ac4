"""The cuts of a node as an ingest sees them: dense, chained, of one node. Reads manifests, writes nothing.

In: a node directory. Out: `Cut`s in order, each checked against its own checksum and the one before it. What a table does
with them is `ingest_job`'s business.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flusher.manifest import CollectionEntry, CutManifest, decode_manifest, manifest_crc32c, manifest_name
from wal.errors import CollectionNotFound, Corrupt, InvalidArgument, Truncated

_MANIFEST_NAME = re.compile(r"\d{16}\.json")


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: its manifest, and the checksum by which the next manifest and the tables remember it."""

    manifest: CutManifest
    crc32c: int

    @property
    def number(self) -> int:
        """The dense number of the cut, from 1."""
        return self.manifest.number

    @property
    def tick(self) -> int:
        """The tick the cut fences: everything at or below it is in files."""
        return self.manifest.tick

    @property
    def data_bytes(self) -> int:
        """How many bytes of files the cut brings."""
        return sum(file.bytes for file in (*self.manifest.segments, *self.manifest.deletes))


class CutLog:
    """The cuts in one node directory as listed when this object was made.

    Raises `InvalidArgument` when the directory does not exist, `Corrupt` when a number between two cuts is missing.
    """

    def __init__(self, node: Path) -> None:
        if not node.is_dir():
            raise InvalidArgument(f"{node} is no node directory — name the one the node was opened with")
        self.node = node
        self.numbers: Sequence[int] = _numbers(node / "cuts")
        self._read: dict[int, Cut] = {}

    @property
    def first(self) -> int:
        """The number of the earliest cut still kept; 0 when there is none."""
        return self.numbers[0] if self.numbers else 0

    @property
    def newest(self) -> int:
        """The number of the newest cut; 0 when there is none."""
        return self.numbers[-1] if self.numbers else 0

    def __contains__(self, number: int) -> bool:
        return bool(self.numbers) and self.first <= number <= self.newest

    def read(self, number: int) -> Cut:
        """Return one cut. Raises `Truncated` when it is no longer kept, `Corrupt` when it is not what was written."""
        if number not in self._read:
            self._read[number] = self._load(number)
        return self._read[number]

    def span(self, first: int, last: int) -> list[Cut]:
        """Return the cuts from `first` to `last`, both included, each checked to follow the one before it."""
        cuts = [self.read(number) for number in range(first, last + 1)]
        for before, after in itertools.pairwise(cuts):
            if after.manifest.previous_crc32c != before.crc32c or after.manifest.node_id != before.manifest.node_id:
                raise Corrupt(
                    f"cut {after.number} does not follow cut {before.number} — restore the cuts from a backup"
                )
        return cuts

    def crc32c_of(self, number: int) -> int | None:
        """Return the checksum of cut `number`, from itself or its successor; None when neither is kept."""
        if number in self:
            return self.read(number).crc32c
        if number + 1 in self:
            return self.read(number + 1).manifest.previous_crc32c
        return None

    def first_with(self, created_tick: int) -> int:
        """Return the number of the first cut that can hold rows of something created at `created_tick`.

        Raises `Truncated` when that cut is no longer kept.
        """
        number = self.newest
        while number > self.first and self.read(number).manifest.previous_tick >= created_tick:
            number -= 1
        if number > 1 and self.read(number).manifest.previous_tick >= created_tick:
            raise Truncated(f"cut {number - 1}", f"cut {number}", "read a table that has taken it, or copy that table")
        return number

    def _load(self, number: int) -> Cut:
        path = self.node / "cuts" / manifest_name(number)
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # retention took it since we listed, or the caller wants an older one
            raise Truncated(f"cut {number}", f"cut {self.first}", f"ask for cut {self.first} or later") from None
        manifest = decode_manifest(content, name=str(path))
        if manifest.number != number:
            raise Corrupt(f"{path} holds cut {manifest.number} — restore the cuts from a backup")
        return Cut(manifest, manifest_crc32c(content))


def lives(entry: CollectionEntry, tick: int) -> bool:
    """Whether a collection exists at `tick`."""
    return entry.created_tick <= tick and not 0 < entry.dropped_tick <= tick


def live_collection(cut: Cut, name: str, *, tick: int | None = None) -> CollectionEntry:
    """Return the collection that has `name` at a cut, or at a tick since the cut before. Raises `CollectionNotFound`."""
    at = cut.tick if tick is None else tick
    for entry in cut.manifest.collections:
        if entry.name == name and lives(entry, at):
            return entry
    known = ", ".join(sorted(entry.name for entry in cut.manifest.collections if lives(entry, at))) or "none"
    raise CollectionNotFound(f"no collection {name!r} at cut {cut.number} — there are: {known}")


def cut_at(cuts: CutLog, *, number: int | None = None) -> int:
    """Return the newest cut at or before `number`, the newest of all for None.

    Raises `Truncated` when the cut asked for is no longer kept, `InvalidArgument` when the node has made none yet.
    """
    _check_any(cuts)
    chosen = min(cuts.newest, cuts.newest if number is None else number)
    if chosen not in cuts:
        raise Truncated(f"the cut at {number}", f"cut {cuts.first}", f"ask for cut {cuts.first} or later")
    return chosen


def cut_covering(cuts: CutLog, tick: int) -> int:
    """Return the first cut at or above a tick: with those before it, it holds everything up to the tick.

    Raises `InvalidArgument` for a tick past the newest cut, or when there is none, and `Truncated` for one that only cuts
    which are no longer kept cover.
    """
    _check_any(cuts)
    newest = cuts.read(cuts.newest).tick
    if tick > newest:
        raise InvalidArgument(f"tick {tick} is past the newest cut, at {newest} — run: streamingnode flush {cuts.node}")
    chosen = cuts.first + bisect_left(
        range(cuts.first, cuts.newest + 1), tick, key=lambda number: cuts.read(number).tick
    )
    if chosen > 1 and tick <= cuts.read(chosen).manifest.previous_tick:
        raise Truncated(f"the cut at {tick}", f"cut {cuts.first}", f"ask for cut {cuts.first} or later")
    return chosen


def _check_any(cuts: CutLog) -> None:
    if not cuts.numbers:
        raise InvalidArgument(f"{cuts.node} has no cut yet — run: streamingnode flush {cuts.node}")


def _numbers(directory: Path) -> list[int]:
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    numbers = sorted(int(name[:16]) for name in names if _MANIFEST_NAME.fullmatch(name))
    for before, after in itertools.pairwise(numbers):
        if after != before + 1:
            raise Corrupt(f"cut {before + 1} is missing in {directory} — restore it from a backup")
    return numbers
