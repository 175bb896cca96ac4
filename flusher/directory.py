"""A node's directory and the cuts in it as everybody reads them: dense in number, each named by the
one after it.

A cut is believed when the cuts after it lead to it, from the newest one down: each manifest names
the tick and the checksum of the one before it. Only `cuts` writes a cut, only `retention` removes
one. All of it blocks; paths are relative to the node directory, with `/`. Imported on a Spark
executor.
"""

import itertools
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from flusher.manifest import (
    Checkpoint,
    CollectionEntry,
    CutManifest,
    DataFile,
    decode_manifest,
    manifest_crc32c,
)
from wal.codec import crc32c
from wal.errors import Corrupt, InvalidArgument, StreamingNodeError, Truncated, UnsupportedFormat
from wal.files import (
    READ_BYTES_MAX,
    WRITE_BUFFER_BYTES,
    create_file,
    make_directory,
    open_binary,
    open_regular,
    place_beneath,
    read_regular,
    set_group_access,
    sync_directory,
)
from wal.rocks.floor import read_floor

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is still being written; whatever carries it at start is rubbish."""

CUTS = "cuts"
TOGETHER = "put log, floor and cuts of one backup together"
_NAME = re.compile(r"(\d{16})\.json")

KEPT_ENTRIES_MAX = 16_384
"""Files and collections in the manifests kept in memory: some MiB; what a snapshot just read the
next one reads again.
"""

CHUNK_BYTES = 1 << 20
"""Read at a time where a file is read through; large enough to cost nothing per call, small enough
to forget.
"""


class NodeDirectory:
    """Files of one node, under `root`; `for_group` lets the group read what is made here.

    All methods block, and raise `OSError`, and `Corrupt` for what is no regular file and for a link
    in place of a directory.
    """

    def __init__(self, root: Path, *, for_group: bool = False) -> None:
        self.root = root
        self._for_group = for_group

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing, replacing one of that name; directories on the way are made
        durable.
        """
        place = place_beneath(self.root, path)
        self._make_parents(place.parent)
        return create_file(place, for_group=self._for_group)

    def set_access(self, tops: Iterable[str]) -> None:
        """Let the group read the directories `tops`, or nobody but the owner, whatever an earlier
        opening was told.
        """
        mode = self.root.stat().st_mode
        if self._for_group and not mode & 0o010:
            self.root.chmod(stat.S_IMODE(mode) | 0o010)
        for top in tops:
            set_group_access(place_beneath(self.root, f"{top}/"), for_group=self._for_group)

    def append(self, path: str) -> BinaryIO:
        """Open a file that `create` made, to go on at its end; one that is gone is not made
        anew.
        """
        return open(
            place_beneath(self.root, path),
            "ab",
            buffering=WRITE_BUFFER_BYTES,
            opener=lambda name, flags: open_regular(Path(name), flags & ~os.O_CREAT),
        )

    def sync(self, file: BinaryIO) -> None:
        """Return when the file's bytes are on disk; its name is not, until `sync_parents`."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        """Give a file its final name, replacing what had it."""
        place_beneath(self.root, source).replace(place_beneath(self.root, target))

    def sync_parents(self, paths: list[str]) -> None:
        """Return when the names of `paths` are on disk; one sync for each directory."""
        for parent in sorted({(self.root / path).parent for path in paths}):
            sync_directory(parent)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        place_beneath(self.root, path).unlink(missing_ok=True)

    def read(self, path: str, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Return a file's content; one that is longer is `Corrupt`, and not read."""
        return read_regular(place_beneath(self.root, path), bytes_max=bytes_max)

    def free_bytes(self) -> int:
        """Return how much this user may still write on the disk."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def files(self, under: str) -> list[str]:
        """Return all names below the directory `under` but directories, sorted; none when it does
        not exist.
        """
        top = place_beneath(self.root, f"{under}/")
        if not top.is_dir():
            return []
        return sorted(
            path.relative_to(self.root).as_posix() for path in top.rglob("*") if not path.is_dir()
        )

    def _make_parents(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_parents(directory.parent)
        make_directory(directory, for_group=self._for_group)


def read_through(stream: BinaryIO, take: Callable[[bytes], object]) -> tuple[int, int]:
    """Give all of a file to `take`, piece by piece, and return its length and CRC32C."""
    length = checksum = 0
    while chunk := stream.read(CHUNK_BYTES):
        take(chunk)
        length += len(chunk)
        checksum = crc32c(chunk, checksum)
    return length, checksum


def measure_file(
    path: Path, *, expected_bytes: int, take: Callable[[bytes], object] = len
) -> tuple[int, int]:
    """Return length and CRC32C of a file; of one with another length than expected, perhaps of
    holes, nothing is read.
    """
    with open_binary(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        return read_through(stream, take) if size_bytes == expected_bytes else (size_bytes, 0)


def check_file(path: Path | str, file: DataFile, length: int, checksum: int) -> None:
    """Return if a file of this length and CRC32C is the one that its cut names. Raises
    `Corrupt`.
    """
    if length != file.bytes:
        raise Corrupt(
            f"{path} has {length} bytes, its cut says {file.bytes} — restore it from a backup"
        )
    if checksum != file.crc32c:
        raise Corrupt(f"{path} fails its checksum — restore it from a backup")


class Mark(NamedTuple):
    """What is known of a cut without reading it."""

    crc32c: int
    tick: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut that is on disk, and the checksum by which its successor, the checkpoint and the
    tables name it.
    """

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
    def mark(self) -> Mark:
        """What the cut after it says of it."""
        return Mark(self.crc32c, self.tick)

    @property
    def previous(self) -> Mark:
        """What it says of the cut before it."""
        return Mark(self.manifest.previous_crc32c, self.manifest.previous_tick)


def manifest_path(number: int) -> str:
    """Return the path of a cut's manifest, relative to the node directory; they sort in cut
    order.
    """
    return f"{CUTS}/{number:016d}.json"


def cut_numbers(directory: NodeDirectory | Path) -> list[int]:
    """Return the numbers of all cuts on disk, ascending, whatever they hold."""
    cuts = (directory if isinstance(directory, Path) else directory.root) / CUTS
    before: list[int] = []
    while True:
        try:
            names = os.listdir(cuts)  # noqa: PTH208 - names are all we need of thousands of files
        except FileNotFoundError:
            return []
        numbers = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        # Thousands of names are not read at once: of cuts that retention removes meanwhile, a later
        # one may be missed.
        if not numbers or numbers == before or numbers[-1] - numbers[0] < len(numbers):
            return numbers
        before = numbers


def read_cut(directory: NodeDirectory, number: int) -> Cut:
    """Return a cut as it is on disk, whatever comes after it.

    Raises `Truncated` when retention took it, `Corrupt` when it is missing though no later one is
    the earliest kept, or is not what was written.
    """
    path = manifest_path(number)
    try:
        content = directory.read(path)
    except FileNotFoundError:
        numbers = cut_numbers(directory)
        # retention takes the earliest ones, and never the newest
        if not numbers or number > numbers[0]:
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


def refuse_mixed(directory: Path, checkpoint: Checkpoint, node_id: str, last_tick: int) -> None:
    """Return if a log that ends at `last_tick` may go on beside the cuts here. Raises `Corrupt`,
    having changed nothing.

    A log that is older than the cuts beside it would make those cuts again, with other rows: tables
    that took the first ones could never be told from those that took the second. A damaged or
    missing file is met by who reads it, and stops nobody.
    """
    newest = max(cut_numbers(directory), default=0)
    manifest = None
    with suppress(OSError, StreamingNodeError):
        manifest = read_cut(NodeDirectory(directory), newest).manifest if newest else None
    if manifest is not None and manifest.node_id != node_id:
        raise Corrupt(
            f"{directory / CUTS} holds cuts of node {manifest.node_id} and the log is of node "
            f"{node_id} — {TOGETHER}"
        )
    if newest > checkpoint.cut_number + 1 or (manifest is not None and manifest.tick > last_tick):
        raise Corrupt(
            f"{directory / CUTS} has cut {newest} and the log does not know it: the log is older "
            "than the cuts "
            f"beside it — {TOGETHER}"
        )


class CutLog:
    """The cuts in one node directory, of node `node_id`, which is empty while nothing has told; any
    thread.

    Given a path, as by who does not own the node, the node's id is what its floor file says, if
    that can be read. Raises `InvalidArgument` for a path where there is no directory.
    """

    def __init__(self, node: NodeDirectory | Path, *, node_id: str = "") -> None:
        if isinstance(node, Path):
            if not node.is_dir():
                raise InvalidArgument(
                    f"{node} is no node directory — name the one the node was opened with"
                )
            with suppress(OSError, Corrupt, UnsupportedFormat):
                floor = read_floor(node)
                node_id = node_id or (floor.node_id if floor else "")
            node = NodeDirectory(node)
        self.directory = node
        self.node_id = node_id
        self._numbers: list[int] | None = None
        # Threads share these without a lock: each use is one step of a dict, and what is lost is
        # read again.
        self._marks: dict[int, Mark] = {}  # of cuts that are believed
        self._kept: dict[int, Cut] = {}
        self._kept_entries = 0  # at most: what retention took still counts

    # --- which cuts there are

    @property
    def numbers(self) -> list[int]:
        """The numbers of the cuts, as listed first or by `look`. Raises `Corrupt` when one between
        two is missing.
        """
        return self.look() if self._numbers is None else self._numbers

    def look(self) -> list[int]:
        """List the cuts that are there now. Raises `Corrupt` when one between two is missing."""
        numbers = cut_numbers(self.directory)
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                raise Corrupt(
                    f"cut {before + 1} is missing in {self.directory.root / CUTS} — restore it "
                    "from a backup"
                )
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

    # --- what they hold

    def anchor(self, number: int, *, crc32c: int, tick: int) -> None:
        """Let what is read lead to the cut `number` that had this checksum and tick when it was
        made; 0 stands for none.

        Without an anchor the newest manifest is taken as it is, and the one after it tells whether
        that was right. Raises `Corrupt` when the cut that is there is another one.
        """
        mark = Mark(crc32c, tick)
        if number and not self._marks:
            self._marks[number] = mark
        elif number and self.mark_of(number) != mark:
            raise _not_ours(number)

    def append(self, cut: Cut) -> None:
        """Take in a cut that was made, or adopted, to follow the newest one. Does no I/O."""
        assert self._marks.setdefault(cut.number, cut.mark) == cut.mark, (
            "a cut on disk is never written again"
        )

    def forget_below(self, number: int) -> None:
        """Forget the cuts that retention took."""
        for known in list(self._marks):
            if known < number:
                self._marks.pop(known, None)
                self._kept.pop(known, None)

    def read(self, number: int) -> Cut:
        """Return one cut. Raises `Truncated` when it is no longer kept, `Corrupt` when it is not
        what was written.
        """
        return self._load(number, self.mark_of(number))

    def read_alone(self, number: int) -> Cut:
        """Return one cut of this node by its own checksum, whatever the cuts after it say. Raises
        `Corrupt`, `OSError`.
        """
        return self._of_this_node(read_cut(self.directory, number))

    def _of_this_node(self, cut: Cut) -> Cut:
        self.node_id = self.node_id or cut.manifest.node_id
        if cut.manifest.node_id != self.node_id:
            raise Corrupt(
                f"{manifest_path(cut.number)} is of node {cut.manifest.node_id}, not of "
                f"{self.node_id} like what is beside "
                "it — put log, floor and cuts of one backup together"
            )
        return cut

    def span(self, first: int, last: int) -> list[Cut]:
        """Return the cuts from `first` to `last`, both included."""
        return [self.read(number) for number in range(first, last + 1)]

    def is_known(self, number: int) -> bool:
        """Whether cut `number` is told by a cut after it that was read, or by `anchor`."""
        return number in self._marks

    def crc32c_of(self, number: int) -> int | None:
        """Return the checksum of cut `number`, as its successor or `anchor` tells it; None when
        nothing does.
        """
        told = number in self._marks or (
            bool(self.numbers) and self.first - 1 <= number <= self.newest
        )
        return self.mark_of(number).crc32c if told else None

    # --- how they lead to one another

    def mark_of(self, number: int) -> Mark:
        """Return what the cuts after this one, or `anchor`, say that it is. Raises `Corrupt` when
        one of those is not.
        """
        if (mark := self._marks.get(number)) is not None:
            return mark
        known = self._marks.copy()
        above = [each for each in known if each > number]
        if above:
            to = number
            newest = self._load(min(above), known[min(above)])
        else:
            to = max(known, default=number)
            newest = self.read_alone(max([number, *cut_numbers(self.directory)[-1:]]))
        found = {newest.number: newest.mark, newest.number - 1: newest.previous}
        for each in range(newest.number - 1, to, -1):
            found[each - 1] = self._load(each, found[each]).previous
        if known.get(to, found[to]) != found[to]:
            raise Corrupt(f"cut {to + 1} does not follow cut {to} — restore the cuts from a backup")
        self._keep(newest)
        self._marks.update(found)
        return found[number]

    def _load(self, number: int, mark: Mark) -> Cut:
        cut = self._kept.get(number) or read_cut(self.directory, number)
        if cut.mark != mark:
            raise _not_ours(number)
        # after that: another's cut does not say whose these are
        self._keep(self._of_this_node(cut))
        return cut

    def _keep(self, cut: Cut) -> None:
        entries = 1 + len(cut.manifest.collections) + len(cut.manifest.files)
        if cut.number not in self._kept:
            self._kept_entries += entries
        if self._kept_entries > KEPT_ENTRIES_MAX:
            self._kept.clear()
            self._kept_entries = entries
        self._kept[cut.number] = cut


def _not_ours(number: int) -> Corrupt:
    return Corrupt(
        f"{manifest_path(number)} is not the cut {number} that this node made — restore it from a "
        "backup"
    )


def lives(entry: CollectionEntry, tick: int) -> bool:
    """Whether a collection exists at `tick`."""
    return entry.created_tick <= tick and not 0 < entry.dropped_tick <= tick


def living(manifest: CutManifest) -> frozenset[int]:
    """Return the ids of the collections that live at a cut: of those that do not at the newest one,
    files may be gone.
    """
    return frozenset(
        entry.collection_id for entry in manifest.collections if lives(entry, manifest.tick)
    )
