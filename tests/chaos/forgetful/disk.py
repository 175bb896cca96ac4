"""A disk with two states: what programs see, and what a power cut leaves. Pure: no I/O, no clock,
randomness comes in.

In: file system operations. Out: the same disk after `lose_power`. What is durable, and when:

- the bytes and the length of a file at its `sync`;
- a name (made, renamed, removed) at the sync of its directory, together with every earlier change
  of a name there. A rename between two directories is one change that either sync makes durable. A
  file whose name is durable and whose bytes never were is empty.

That is what POSIX promises and less than ext4 keeps: a missing sync that ext4 forgives is found
here.
"""

import errno
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

PAGE_BYTES = 4096
SECTOR_BYTES = 512
ROOT_INODE = 1

Loss = Literal["all", "some"]
"""Everything unsynced is gone; or any of its pages, and the later changes of names, as a real disk
may have it.
"""


@dataclass(slots=True)
class File:
    """A regular file: `data` as seen, `durable` as kept, and the pages that differ."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Directory:
    """Names to inode numbers, as seen and as kept."""

    mode: int
    names: dict[bytes, int] = field(default_factory=dict)
    durable: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class Special:
    """A socket, a pipe or a symbolic link; it has no bytes to lose."""

    mode: int
    target: bytes = b""


Inode = File | Directory | Special


@dataclass(frozen=True, slots=True)
class _NameChange:
    """One change of names: `(directory, name, inode)`, None for a name that is gone."""

    entries: tuple[tuple[int, bytes, int | None], ...]

    def touches(self, directory: int) -> bool:
        return any(entry[0] == directory for entry in self.entries)


class ForgetfulDisk:
    """Inodes by number; the root directory is number 1. Errors are `OSError`s with the number the
    kernel wants.

    `keeps_fsync=False` makes it lie: a sync returns and keeps nothing, which is what a test of
    durability must notice.
    """

    def __init__(self, *, keeps_fsync: bool = True) -> None:
        self.inodes: dict[int, Inode] = {ROOT_INODE: Directory(stat.S_IFDIR | 0o755)}
        self.keeps_fsync = keeps_fsync
        self.links: Counter[int] = Counter()
        """How many names each inode has, as programs see them: the kernel gives no further name to
        one without any.
        """
        self._changes: list[_NameChange] = []
        self._last_inode = ROOT_INODE

    # --- names ------------------------------------------------------------------------------------

    def lookup(self, directory: int, name: bytes) -> int:
        """Return the inode of a name. Raises ENOENT."""
        try:
            return self.directory(directory).names[name]
        except KeyError:
            raise OSError(errno.ENOENT, "no such name") from None

    def make(self, directory: int, name: bytes, inode: Inode) -> int:
        """Give a new inode a name. Raises EEXIST."""
        if name in self.directory(directory).names:
            raise OSError(errno.EEXIST, "the name is taken")
        self._last_inode += 1
        self.inodes[self._last_inode] = inode
        self._change((directory, name, self._last_inode))
        return self._last_inode

    def link(self, inode: int, directory: int, name: bytes) -> None:
        """Give an inode one more name. Raises EEXIST."""
        if name in self.directory(directory).names:
            raise OSError(errno.EEXIST, "the name is taken")
        self._change((directory, name, inode))

    def remove(self, directory: int, name: bytes) -> None:
        """Take a name away. Raises ENOENT, ENOTEMPTY."""
        inode = self.inodes[self.lookup(directory, name)]
        if isinstance(inode, Directory) and inode.names:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty")
        self._change((directory, name, None))

    def rename(self, directory: int, name: bytes, new_directory: int, new_name: bytes) -> None:
        """Move a name, in one step, over what has the new one. Raises ENOENT, ENOTEMPTY."""
        moved = self.lookup(directory, name)
        replaced = self.inodes.get(self.directory(new_directory).names.get(new_name, 0))
        if isinstance(replaced, Directory) and replaced.names:
            raise OSError(errno.ENOTEMPTY, "the directory is not empty")
        self._change((directory, name, None), (new_directory, new_name, moved))

    def directory(self, number: int) -> Directory:
        """Return a directory. Raises ENOTDIR."""
        found = self.inodes[number]
        if not isinstance(found, Directory):
            raise OSError(errno.ENOTDIR, "no directory")
        return found

    # --- bytes ------------------------------------------------------------------------------------

    def file(self, number: int) -> File:
        """Return a file. Raises EINVAL for anything else."""
        found = self.inodes[number]
        if not isinstance(found, File):
            raise OSError(errno.EINVAL, "no file")
        return found

    def read(self, number: int, offset: int, size: int) -> bytes:
        """Return bytes as programs see them."""
        return bytes(memoryview(self.file(number).data)[offset : offset + size])

    def write(self, number: int, offset: int, data: bytes) -> None:
        """Change bytes as programs see them; a gap before them reads as zeros."""
        file = self.file(number)
        if offset > len(file.data):
            self.truncate(number, offset)
        file.data[offset : offset + len(data)] = data
        file.dirty.update(_pages(offset, offset + len(data)))

    def truncate(self, number: int, size: int) -> None:
        """Change the length as programs see it."""
        file = self.file(number)
        before = len(file.data)
        if size < before:
            del file.data[size:]
        else:
            file.data.extend(bytes(size - before))
        file.dirty.update(_pages(min(before, size), max(before, size)))

    # --- durability -------------------------------------------------------------------------------

    def sync(self, number: int) -> None:
        """Make the bytes of a file, or the names of a directory, survive."""
        if not self.keeps_fsync:
            return
        match self.inodes[number]:
            case File() as file:
                _keep(file, file.dirty)
                _resize(file.durable, len(file.data))
                file.dirty.clear()
            case Directory():
                self._make_durable([change for change in self._changes if change.touches(number)])
            case Special():
                pass

    def lose_power(self, random: Random, loss: Loss = "all") -> None:
        """Forget what was not synced: all of it, or with `some` a random choice; programs then see
        what is durable.
        """
        if loss == "some":
            self._make_durable(self._changes[: random.randint(0, len(self._changes))])
            for inode in self.inodes.values():
                if isinstance(inode, File):
                    _keep_some(inode, random)
        self._changes.clear()
        self.inodes = {number: self.inodes[number] for number in self._reached()}
        for inode in self.inodes.values():
            match inode:
                case File():
                    inode.data = bytearray(inode.durable)
                    inode.dirty.clear()
                case Directory():
                    inode.names = dict(inode.durable)
                case Special():
                    pass
        directories = [inode for inode in self.inodes.values() if isinstance(inode, Directory)]
        self.links = Counter(
            number for directory in directories for number in directory.names.values()
        )

    def unsynced_bytes(self) -> int:
        """Return how many bytes of pages a power cut would forget now."""
        return PAGE_BYTES * sum(
            len(inode.dirty) for inode in self.inodes.values() if isinstance(inode, File)
        )

    def _change(self, *entries: tuple[int, bytes, int | None]) -> None:
        change = _NameChange(entries)
        for directory, name, inode in entries:
            names = self.directory(directory).names
            self.links.subtract({names[name]} if name in names else ())
            self.links.update(() if inode is None else {inode})
            _set_name(names, name, inode)
        self._changes.append(change)

    def _make_durable(self, changes: list[_NameChange]) -> None:
        for change in changes:
            for directory, name, inode in change.entries:
                _set_name(self.directory(directory).durable, name, inode)
        kept = set(map(id, changes))
        self._changes = [change for change in self._changes if id(change) not in kept]

    def _reached(self) -> set[int]:
        """Return the inodes that durable names lead to."""
        reached = {ROOT_INODE}
        open_ends = [ROOT_INODE]
        while open_ends:
            inode = self.inodes[open_ends.pop()]
            if isinstance(inode, Directory):
                new = set(inode.durable.values()) - reached
                reached |= new
                open_ends += new
        return reached


def _set_name(names: dict[bytes, int], name: bytes, inode: int | None) -> None:
    if inode is None:
        names.pop(name, None)
    else:
        names[name] = inode


def _pages(begin: int, end: int) -> Iterator[int]:
    return iter(range(begin // PAGE_BYTES, (end + PAGE_BYTES - 1) // PAGE_BYTES))


def _resize(data: bytearray, size: int) -> None:
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def _keep(file: File, pages: set[int]) -> None:
    for page in pages:
        _keep_range(file, page * PAGE_BYTES, (page + 1) * PAGE_BYTES)


def _keep_range(file: File, begin: int, end: int) -> None:
    """Copy a range as seen to what is kept, which grows to hold it; the length is settled by the
    caller.
    """
    piece = memoryview(file.data)[begin:end]
    if len(file.durable) < begin + len(piece):
        _resize(file.durable, begin + len(piece))
    file.durable[begin : begin + len(piece)] = piece


def _keep_some(file: File, random: Random) -> None:
    """Keep a random choice of unsynced pages, one of them torn between two sectors, and one of the
    possible lengths.
    """
    if not file.dirty:
        return
    pages = sorted(file.dirty)
    share = random.random()
    kept = {page for page in pages if random.random() < share}
    _keep(file, kept)
    torn = random.choice(pages)
    begin = torn * PAGE_BYTES
    _keep_range(file, begin, begin + SECTOR_BYTES * random.randrange(PAGE_BYTES // SECTOR_BYTES))
    # the length reached the disk, the pages in it perhaps not: they read as zeros
    if random.random() < 0.5:
        _resize(file.durable, len(file.data))
