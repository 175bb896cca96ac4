"""A node's directory and the readers of its cuts; the numbers of cuts are dense.

A cut is trusted through the cuts after it, from the newest one down: each manifest names the tick
and the checksum of the manifest before it. Only `cuts` writes a cut; only `retention` removes one.
All functions block. Paths are relative to the node directory, with `/`. Spark executors import this
module.
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
"""The suffix of a file that is still being written; a start removes every file that has it."""

CUTS = "cuts"
TOGETHER = "put log, floor and cuts of one backup together"
_NAME = re.compile(r"(\d{16})\.json")

KEPT_ENTRIES_MAX = 16_384
"""Files and collections in cached manifests, some MiB: the next snapshot reads the same manifests
from memory.
"""

CHUNK_BYTES = 1 << 20
"""Bytes per read of a whole file: large enough to make calls cheap, small enough for memory."""


class NodeDirectory:
    """The files of one node under `root`; with `for_group` the group can read what is created here.

    All methods block. They raise `OSError`, and `Corrupt` for a file that is not regular and for a
    link in place of a directory.
    """

    def __init__(self, root: Path, *, for_group: bool = False) -> None:
        self.root = root
        self._for_group = for_group

    def create(self, path: str) -> BinaryIO:
        """Open a new file for writing, replacing an existing one. Missing parent directories are
        created durably.
        """
        place = place_beneath(self.root, path)
        self._make_parents(place.parent)
        return create_file(place, for_group=self._for_group)

    def set_access(self, tops: Iterable[str]) -> None:
        """Give or remove the group's access to the directories `tops`, replacing what an earlier
        opening set.
        """
        mode = self.root.stat().st_mode
        if self._for_group and not mode & 0o010:
            self.root.chmod(stat.S_IMODE(mode) | 0o010)
        for top in tops:
            set_group_access(place_beneath(self.root, f"{top}/"), for_group=self._for_group)

    def append(self, path: str) -> BinaryIO:
        """Open a file that `create` made, to append. Raises `FileNotFoundError` if it is gone."""
        return open(
            place_beneath(self.root, path),
            "ab",
            buffering=WRITE_BUFFER_BYTES,
            opener=lambda name, flags: open_regular(Path(name), flags & ~os.O_CREAT),
        )

    def sync(self, file: BinaryIO) -> None:
        """Make the file's bytes durable. `sync_parents` makes its name durable."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: str, target: str) -> None:
        """Rename a file, replacing an existing target."""
        place_beneath(self.root, source).replace(place_beneath(self.root, target))

    def sync_parents(self, paths: list[str]) -> None:
        """Make the names of `paths` durable, with one sync for each directory."""
        for parent in sorted({(self.root / path).parent for path in paths}):
            sync_directory(parent)

    def remove(self, path: str) -> None:
        """Remove a file if it is there."""
        place_beneath(self.root, path).unlink(missing_ok=True)

    def read(self, path: str, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Return a file's content. Raises `Corrupt`, without reading it, when it is longer than
        `bytes_max`.
        """
        return read_regular(place_beneath(self.root, path), bytes_max=bytes_max)

    def free_bytes(self) -> int:
        """Return how many bytes this user can still write to the disk."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    def files(self, under: str) -> list[str]:
        """Return the paths of all files below the directory `under`, sorted; none when it does not
        exist.
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
    """Pass all of a file to `take`, chunk by chunk, and return its length and CRC32C."""
    length = checksum = 0
    while chunk := stream.read(CHUNK_BYTES):
        take(chunk)
        length += len(chunk)
        checksum = crc32c(chunk, checksum)
    return length, checksum


def measure_file(
    path: Path, *, expected_bytes: int, take: Callable[[bytes], object] = len
) -> tuple[int, int]:
    """Return length and CRC32C of a file, and pass its chunks to `take`.

    A file whose length is not `expected_bytes` is not read, as it may be a huge sparse file: its
    CRC32C is then 0.
    """
    with open_binary(path) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        return read_through(stream, take) if size_bytes == expected_bytes else (size_bytes, 0)


def check_file(path: Path | str, file: DataFile, length: int, checksum: int) -> None:
    """Check length and CRC32C of a file against its entry in a cut. Raises `Corrupt`."""
    if length != file.bytes:
        raise Corrupt(
            f"{path} has {length} bytes, its cut says {file.bytes} — restore it from a backup"
        )
    if checksum != file.crc32c:
        raise Corrupt(f"{path} fails its checksum — restore it from a backup")


class Mark(NamedTuple):
    """The checksum and tick that identify a cut."""

    crc32c: int
    tick: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut on disk, and the checksum by which its successor, the checkpoint and the tables refer
    to it.
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
        """The mark by which the next cut names this one."""
        return Mark(self.crc32c, self.tick)

    @property
    def previous(self) -> Mark:
        """The mark that this cut has for the one before it."""
        return Mark(self.manifest.previous_crc32c, self.manifest.previous_tick)


def manifest_path(number: int) -> str:
    """Return the path of a cut's manifest, relative to the node directory; paths sort by number."""
    return f"{CUTS}/{number:016d}.json"


def cut_numbers(directory: NodeDirectory | Path) -> list[int]:
    """Return the numbers of all cuts on disk, ascending, without reading the cuts."""
    cuts = (directory if isinstance(directory, Path) else directory.root) / CUTS
    before: list[int] = []
    while True:
        try:
            names = os.listdir(cuts)  # noqa: PTH208 - of thousands of files only names are needed
        except FileNotFoundError:
            return []
        numbers = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        # A listing of thousands of names is not atomic: while retention removes cuts, it may miss a
        # later one. So a listing with gaps is repeated until it is stable.
        if not numbers or numbers == before or numbers[-1] - numbers[0] < len(numbers):
            return numbers
        before = numbers


def read_cut(directory: NodeDirectory, number: int) -> Cut:
    """Return a cut as it is on disk, without comparing it to the cuts after it.

    Raises `Truncated` when retention removed it. Raises `Corrupt` when it is missing although an
    earlier cut is kept, or when it has been changed.
    """
    path = manifest_path(number)
    try:
        content = directory.read(path)
    except FileNotFoundError:
        numbers = cut_numbers(directory)
        # retention removes the earliest cuts, and never the newest
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
    """Check that a log that ends at `last_tick` belongs to the cuts in this directory. Raises
    `Corrupt`; changes nothing.

    A log that is older than its cuts would make those cuts again with other rows, and tables that
    took the first ones could not be distinguished from tables that took the second. A damaged or
    missing file is ignored here; its reader reports it.
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
            f"{directory / CUTS} has cut {newest}, which is not in the log: the log is older "
            "than the cuts "
            f"beside it — {TOGETHER}"
        )


class CutLog:
    """The cuts in one node directory, for any thread. `node_id` is empty until it is known.

    A process that does not own the node passes a path: the node's id then comes from the floor
    file, if that can be read. Raises `InvalidArgument` for a path that is not a directory.
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
        # Threads share these without a lock: each use is one atomic step of a dict, and a lost
        # entry is read again.
        self._marks: dict[int, Mark] = {}  # of trusted cuts
        self._kept: dict[int, Cut] = {}
        self._kept_entries = 0  # an upper bound: cuts that retention removed still count

    # --- which cuts exist

    @property
    def numbers(self) -> list[int]:
        """The numbers of the cuts at the last `look`, which the first use makes. Raises `Corrupt`
        for a gap.
        """
        return self.look() if self._numbers is None else self._numbers

    def look(self) -> list[int]:
        """List the present cuts again. Raises `Corrupt` when one between two others is missing."""
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

    # --- content

    def anchor(self, number: int, *, crc32c: int, tick: int) -> None:
        """Trust cut `number` by the checksum and tick that it had when it was made; 0 means no cut.

        Without an anchor the newest manifest is trusted as it is, and the next one confirms it or
        not. Raises `Corrupt` when the cut on disk is another one.
        """
        mark = Mark(crc32c, tick)
        if number and not self._marks:
            self._marks[number] = mark
        elif number and self.mark_of(number) != mark:
            raise _not_ours(number)

    def append(self, cut: Cut) -> None:
        """Add a cut that was just made or adopted after the newest one. No I/O."""
        assert self._marks.setdefault(cut.number, cut.mark) == cut.mark, (
            "a cut on disk is never written again"
        )

    def forget_below(self, number: int) -> None:
        """Drop cached data of cuts below `number`, which retention removed."""
        for known in list(self._marks):
            if known < number:
                self._marks.pop(known, None)
                self._kept.pop(known, None)

    def read(self, number: int) -> Cut:
        """Return one cut. Raises `Truncated` when it is no longer kept, `Corrupt` when it has been
        changed.
        """
        return self._load(number, self.mark_of(number))

    def read_alone(self, number: int) -> Cut:
        """Return one cut of this node, checked by its own checksum only. Raises `Corrupt`,
        `OSError`.
        """
        return self._of_this_node(read_cut(self.directory, number))

    def _of_this_node(self, cut: Cut) -> Cut:
        self.node_id = self.node_id or cut.manifest.node_id
        if cut.manifest.node_id != self.node_id:
            raise Corrupt(
                f"{manifest_path(cut.number)} is of node {cut.manifest.node_id}, but the files "
                f"beside it are of {self.node_id} — {TOGETHER}"
            )
        return cut

    def span(self, first: int, last: int) -> list[Cut]:
        """Return the cuts from `first` to `last`, both included."""
        return [self.read(number) for number in range(first, last + 1)]

    def is_known(self, number: int) -> bool:
        """Whether the mark of cut `number` is known, from a later cut that was read or from
        `anchor`.
        """
        return number in self._marks

    def crc32c_of(self, number: int) -> int | None:
        """Return the checksum of cut `number` from its successor or `anchor`; None when both are
        absent.
        """
        told = number in self._marks or (
            bool(self.numbers) and self.first - 1 <= number <= self.newest
        )
        return self.mark_of(number).crc32c if told else None

    # --- the chain of marks

    def mark_of(self, number: int) -> Mark:
        """Return the mark of a cut from the cuts after it or from `anchor`. Raises `Corrupt` for a
        broken chain.
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
        # only now: a foreign cut must not set `node_id`
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
    """Return whether a collection exists at `tick`."""
    return entry.created_tick <= tick and not 0 < entry.dropped_tick <= tick


def living(manifest: CutManifest) -> frozenset[int]:
    """Return the ids of the collections that exist at a cut.

    Files of collections that do not exist at the newest cut may be gone.
    """
    return frozenset(
        entry.collection_id for entry in manifest.collections if lives(entry, manifest.tick)
    )
