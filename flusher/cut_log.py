"""The cuts of a node directory, as everybody reads them: dense in number, of one node, each named by the one after it.

A cut is believed when the cuts after it lead to it, from the newest one down: each manifest names the tick and the checksum
of the one before it. Only `cuts` writes a cut, only `retention` removes one. Blocks. Imported on a Spark executor.
"""

import itertools
import os
import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from flusher.directory import NodeDirectory
from flusher.manifest import CollectionEntry, CutManifest, decode_manifest, manifest_crc32c, manifest_name
from interceptors.errors import CollectionNotFound
from wal.errors import Corrupt, InvalidArgument, Truncated, UnsupportedFormat
from wal.rocks.floor import read_floor

CUTS = "cuts"
_NAME = re.compile(r"(\d{16})\.json")

KEPT_ENTRIES_MAX = 16_384
"""Files and collections in the manifests kept in memory: some MiB; what a snapshot just read the next one reads again."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut that is on disk, and the checksum by which its successor, the checkpoint and the tables name it."""

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
        return sum(file.bytes for file in self.manifest.files)


class Mark(NamedTuple):
    """What is known of a cut without reading it."""

    crc32c: int
    tick: int


def manifest_path(number: int) -> str:
    """Return the path of a cut's manifest, relative to the node directory."""
    return f"{CUTS}/{manifest_name(number)}"


def cut_numbers(directory: NodeDirectory | Path) -> list[int]:
    """Return the numbers of all cuts on disk, ascending, whatever they hold."""
    root = directory if isinstance(directory, Path) else directory.root
    numbers = _listed(root)
    # Thousands of names are not read at once: of cuts that retention removes meanwhile, a later one may be missed already.
    while numbers and numbers[-1] - numbers[0] >= len(numbers) and (again := _listed(root)) != numbers:
        numbers = again
    return numbers


def _listed(root: Path) -> list[int]:
    try:
        names = os.listdir(root / CUTS)  # noqa: PTH208 - names are all we need of thousands of files
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def read_cut(directory: NodeDirectory, number: int) -> Cut:
    """Return a cut as it is on disk, whatever comes after it.

    Raises `Truncated` when retention took it, `Corrupt` when it is missing though no later one is the earliest kept, or is
    not what was written.
    """
    path = manifest_path(number)
    try:
        content = directory.read(path)
    except FileNotFoundError:
        numbers = cut_numbers(directory)
        if not numbers or number > numbers[0]:  # retention takes the earliest ones, and never the newest
            missing = path if numbers else f"{directory.root / CUTS} holds no cut any more: {path}"
            raise Corrupt(f"{missing} is missing — restore the cuts from a backup") from None
        earliest = f"cut {numbers[0]}"
        raise Truncated(f"cut {number}", earliest, f"ask for {earliest} or later") from None
    manifest = decode_manifest(content, name=path)
    if manifest.number != number:
        raise Corrupt(f"{path} holds cut {manifest.number} — restore the cuts from a backup")
    return Cut(manifest, manifest_crc32c(content))


def file_paths(manifest: CutManifest) -> list[str]:
    """Return the paths of the files a cut names."""
    return [file.path for file in manifest.files]


class CutLog:
    """The cuts in one node directory, of node `node_id`, which is empty while nothing has told; any thread.

    Given a path, as by who does not own the node, the node's id is what its floor file says, if that can be read. Raises
    `InvalidArgument` for a path where there is no directory.
    """

    def __init__(self, node: NodeDirectory | Path, *, node_id: str = "") -> None:
        if isinstance(node, Path):
            if not node.is_dir():
                raise InvalidArgument(f"{node} is no node directory — name the one the node was opened with")
            node_id = node_id or _node_id_at(node)
            node = NodeDirectory(node)
        self.directory = node
        self.node = node.root
        self.node_id = node_id
        self._numbers: list[int] | None = None
        self._lock = Lock()  # held for no read of a file: the event loop takes it, too
        self._marks: dict[int, Mark] = {}  # of cuts that are believed
        self._kept: OrderedDict[int, Cut] = OrderedDict()
        self._kept_entries = 0

    # --- which cuts there are

    @property
    def numbers(self) -> list[int]:
        """The numbers of the cuts, as listed first or by `look`. Raises `Corrupt` when one between two is missing."""
        return self.look() if self._numbers is None else self._numbers

    def look(self) -> list[int]:
        """List the cuts that are there now. Raises `Corrupt` when one between two is missing."""
        numbers = cut_numbers(self.directory)
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                raise Corrupt(f"cut {before + 1} is missing in {self.node / CUTS} — restore it from a backup")
        self._numbers = numbers
        return numbers

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

    # --- what they hold

    def anchor(self, number: int, *, crc32c: int, tick: int) -> None:
        """Let what is read lead to the cut `number` that had this checksum and tick when it was made; 0 stands for none.

        The node has these in its checkpoint, an ingest in its tables and in what the node answered when it asked for a cut.
        Without an anchor the newest manifest is taken as it is, and the one after it tells whether that was right. Raises
        `Corrupt` when the cut that is there is another one.
        """
        mark = Mark(crc32c, tick)
        with self._lock:
            if number and not self._marks:
                self._marks[number] = mark
        if number and self.mark_of(number) != mark:
            raise _not_ours(number)

    def append(self, cut: Cut) -> None:
        """Take in a cut that was made, or adopted, to follow the newest one. Does no I/O."""
        mark = Mark(cut.crc32c, cut.tick)
        with self._lock:
            assert self._marks.setdefault(cut.number, mark) == mark, "a cut on disk is never written again"

    def forget_below(self, number: int) -> None:
        """Forget the cuts that retention took."""
        with self._lock:
            for gone in [known for known in self._marks if known < number]:
                del self._marks[gone]
                self._drop(gone)

    def read(self, number: int) -> Cut:
        """Return one cut. Raises `Truncated` when it is no longer kept, `Corrupt` when it is not what was written."""
        return self._load(number, self.mark_of(number))

    def read_alone(self, number: int) -> Cut:
        """Return one cut of this node by its own checksum, whatever the cuts after it say. Raises `Corrupt`, `OSError`."""
        return self._of_this_node(read_cut(self.directory, number))

    def span(self, first: int, last: int) -> list[Cut]:
        """Return the cuts from `first` to `last`, both included."""
        return [self.read(number) for number in range(first, last + 1)]

    def crc32c_of(self, number: int) -> int | None:
        """Return the checksum of cut `number`, as its successor tells it; None when neither is kept."""
        if number in self:
            return self.mark_of(number).crc32c
        return self.read(number + 1).manifest.previous_crc32c if number + 1 in self else None

    def first_after(self, tick: int) -> tuple[int, bool]:
        """Return the first cut kept that can hold something of `tick`, and whether cuts that are gone can, too."""
        number = self.newest
        while number > self.first and self.read(number).manifest.previous_tick >= tick:
            number -= 1
        return number, number > 1 and self.read(number).manifest.previous_tick >= tick

    def first_with(self, created_tick: int) -> int:
        """Return the number of the first cut that can hold rows of something created at `created_tick`.

        Raises `Truncated` when that cut is no longer kept.
        """
        number, is_gone = self.first_after(created_tick)
        if is_gone:
            raise Truncated(f"cut {number - 1}", f"cut {number}", "read a table that has taken it, or copy that table")
        return number

    # --- how they lead to one another

    def mark_of(self, number: int) -> Mark:
        """Return what the cuts after this one, or `anchor`, say that it is. Raises `Corrupt` when one of those is not."""
        with self._lock:
            if number in self._marks:
                return self._marks[number]
            above = min((known for known in self._marks if known > number), default=0)
            mark, top = self._marks.get(above), max(self._marks, default=number)
        if mark is not None:
            found = self._descend(self._load(above, mark), number)
        else:
            newest = self._of_this_node(read_cut(self.directory, max([number, *cut_numbers(self.directory)[-1:]])))
            found = self._descend(newest, top)
            if self._marks.get(top, found[top]) != found[top]:
                raise Corrupt(f"cut {top + 1} does not follow cut {top} — restore the cuts from a backup")
            self._keep(newest)
        with self._lock:
            self._marks.update(found)
        return found[number]

    def _descend(self, cut: Cut, to: int) -> dict[int, Mark]:
        """Return what is known of the cuts from `to` up to `cut`, each by the one after it; `to` itself is not read."""
        found = {cut.number: Mark(cut.crc32c, cut.tick)}
        while cut.number > to:
            before = Mark(cut.manifest.previous_crc32c, cut.manifest.previous_tick)
            found[cut.number - 1] = before
            if cut.number - 1 == to:
                break
            cut = self._load(cut.number - 1, before)
        return found

    def _of_this_node(self, cut: Cut) -> Cut:
        self.node_id = self.node_id or cut.manifest.node_id
        if cut.manifest.node_id != self.node_id:
            raise Corrupt(
                f"{manifest_path(cut.number)} is of node {cut.manifest.node_id}, not of {self.node_id} like what is beside "
                "it — put log, floor and cuts of one backup together"
            )
        return cut

    def _load(self, number: int, mark: Mark) -> Cut:
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None:
                self._kept.move_to_end(number)
        cut = kept or read_cut(self.directory, number)
        if Mark(cut.crc32c, cut.tick) != mark:
            raise _not_ours(number)
        if kept is None:
            self._keep(self._of_this_node(cut))
        return cut

    def _keep(self, cut: Cut) -> None:
        with self._lock:
            self._drop(cut.number)
            self._kept[cut.number] = cut
            self._kept_entries += _entries(cut)
            while self._kept_entries > KEPT_ENTRIES_MAX and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        if (cut := self._kept.pop(number, None)) is not None:
            self._kept_entries -= _entries(cut)


def _entries(cut: Cut) -> int:
    """Return how much a cut weighs in memory."""
    return 1 + len(cut.manifest.collections) + len(cut.manifest.files)


def _node_id_at(root: Path) -> str:
    """Return whose directory this is, for who was not told; nothing when its floor file does not say."""
    with suppress(OSError, Corrupt, UnsupportedFormat):
        floor = read_floor(root)
        return "" if floor is None else floor.node_id
    return ""


def _not_ours(number: int) -> Corrupt:
    return Corrupt(f"{manifest_path(number)} is not the cut {number} that this node made — restore it from a backup")


# --- questions to cuts ------------------------------------------------------------------------------------------------


def lives(entry: CollectionEntry, tick: int) -> bool:
    """Whether a collection exists at `tick`."""
    return entry.created_tick <= tick and not 0 < entry.dropped_tick <= tick


def living(manifest: CutManifest) -> frozenset[int]:
    """Return the ids of the collections that live at a cut: of those that do not at the newest one, files may be gone."""
    return frozenset(entry.collection_id for entry in manifest.collections if lives(entry, manifest.tick))


def live_collection(cut: Cut, name: str, *, tick: int | None = None) -> CollectionEntry:
    """Return the collection that has `name` at a cut, or at a tick since the cut before. Raises `CollectionNotFound`."""
    live = {each.name: each for each in cut.manifest.collections if lives(each, cut.tick if tick is None else tick)}
    if name not in live:
        known = ", ".join(sorted(live)) or "none"
        raise CollectionNotFound(f"no collection {name!r} at cut {cut.number} — there are: {known}")
    return live[name]


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
    number, is_gone = cuts.first_after(tick)
    if is_gone:
        raise Truncated(f"the cut at {tick}", f"cut {cuts.first}", f"ask for cut {cuts.first} or later")
    return number


def _check_any(cuts: CutLog) -> None:
    if not cuts.numbers:
        raise InvalidArgument(f"{cuts.node} has no cut yet — run: streamingnode flush {cuts.node}")
