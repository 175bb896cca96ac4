"""The disk that forgets, as a model: what is synced stays, what is not goes, names as well as
bytes.
"""

import errno
import stat
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.forgetful.disk import PAGE_BYTES, ROOT_INODE, Directory, File, ForgetfulDisk


def make_file(
    disk: ForgetfulDisk, name: bytes, data: bytes = b"", directory: int = ROOT_INODE
) -> int:
    number = disk.make(directory, name, File(stat.S_IFREG | 0o644))
    disk.write(number, 0, data)
    return number


def cut(disk: ForgetfulDisk) -> None:
    disk.lose_power(Random(0))


def test_bytes_that_were_not_synced_are_gone_after_a_cut() -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f", b"kept")
    disk.sync(file)
    disk.sync(ROOT_INODE)
    disk.write(file, 0, b"lost and longer")
    cut(disk)
    assert disk.read(file, 0, 100) == b"kept"


def test_name_that_was_not_synced_is_gone_although_its_bytes_were_synced() -> None:
    disk = ForgetfulDisk()
    disk.sync(make_file(disk, b"f", b"bytes"))
    cut(disk)
    with pytest.raises(OSError, match="no such name"):
        disk.lookup(ROOT_INODE, b"f")


def test_file_whose_name_alone_was_synced_is_empty() -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f", b"bytes")
    disk.sync(ROOT_INODE)
    cut(disk)
    assert disk.read(file, 0, 100) == b""


@pytest.mark.parametrize("synced", [True, False])
def test_rename_is_whole_or_not_at_all(synced: bool) -> None:
    disk = ForgetfulDisk()
    old = make_file(disk, b"old", b"1")
    new = make_file(disk, b"new", b"2")
    for number in (old, new, ROOT_INODE):
        disk.sync(number)
    disk.rename(ROOT_INODE, b"old", ROOT_INODE, b"new")
    if synced:
        disk.sync(ROOT_INODE)
    cut(disk)
    expected = {b"new": old} if synced else {b"old": old, b"new": new}
    assert disk.directory(ROOT_INODE).names == expected


def test_rename_between_directories_is_durable_in_both_once_either_is_synced() -> None:
    disk = ForgetfulDisk()
    there = disk.make(ROOT_INODE, b"there", Directory(stat.S_IFDIR | 0o755))
    file = make_file(disk, b"f")
    disk.sync(ROOT_INODE)
    disk.rename(ROOT_INODE, b"f", there, b"f")
    disk.sync(there)
    cut(disk)
    assert disk.directory(there).names == {b"f": file}
    assert b"f" not in disk.directory(ROOT_INODE).names


def test_file_that_was_unlinked_without_a_sync_comes_back() -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f", b"bytes")
    disk.sync(file)
    disk.sync(ROOT_INODE)
    disk.remove(ROOT_INODE, b"f")
    cut(disk)
    assert disk.read(disk.lookup(ROOT_INODE, b"f"), 0, 100) == b"bytes"


def test_disk_that_keeps_no_sync_forgets_everything() -> None:
    disk = ForgetfulDisk(keeps_fsync=False)
    disk.sync(make_file(disk, b"f", b"bytes"))
    disk.sync(ROOT_INODE)
    cut(disk)
    assert disk.directory(ROOT_INODE).names == {}


def test_directory_with_names_is_not_removed() -> None:
    disk = ForgetfulDisk()
    directory = disk.make(ROOT_INODE, b"d", Directory(stat.S_IFDIR | 0o755))
    make_file(disk, b"f", directory=directory)
    with pytest.raises(OSError, match="not empty") as refused:
        disk.remove(ROOT_INODE, b"d")
    assert refused.value.errno == errno.ENOTEMPTY


WRITES = st.lists(
    st.tuples(st.integers(0, 3 * PAGE_BYTES), st.binary(min_size=1, max_size=PAGE_BYTES)),
    max_size=6,
)


@given(before=WRITES, after=WRITES, seed=st.integers(0, 2**16))
def test_partly_kept_file_has_each_sector_old_new_or_empty(
    before: list[tuple[int, bytes]], after: list[tuple[int, bytes]], seed: int
) -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f")
    for offset, data in before:
        disk.write(file, offset, data)
    disk.sync(file)
    disk.sync(ROOT_INODE)
    old = disk.read(file, 0, 1 << 20)
    for offset, data in after:
        disk.write(file, offset, data)
    new = disk.read(file, 0, 1 << 20)
    disk.lose_power(Random(seed), "some")
    kept = disk.read(file, 0, 1 << 20)
    assert len(old) <= len(kept) <= len(new)
    for at in range(0, len(kept), 512):
        piece = slice(at, min(at + 512, len(kept)))
        size = piece.stop - at
        assert kept[piece] in (old[piece].ljust(size, b"\0"), new[piece], bytes(size))


@given(writes=WRITES, size=st.integers(0, 3 * PAGE_BYTES))
def test_what_is_synced_survives_exactly(writes: list[tuple[int, bytes]], size: int) -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f")
    for offset, data in writes:
        disk.write(file, offset, data)
    disk.truncate(file, size)
    disk.sync(file)
    disk.sync(ROOT_INODE)
    seen = disk.read(file, 0, 1 << 20)
    cut(disk)
    assert disk.read(file, 0, 1 << 20) == seen
    assert len(seen) == size


def test_an_inode_has_as_many_links_as_names_through_links_renames_removals_and_a_cut() -> None:
    disk = ForgetfulDisk()
    file = make_file(disk, b"f")
    other = make_file(disk, b"g")
    disk.sync(ROOT_INODE)
    disk.link(file, ROOT_INODE, b"again")
    assert disk.links[file] == 2
    disk.rename(ROOT_INODE, b"again", ROOT_INODE, b"g")
    assert (disk.links[file], disk.links[other]) == (2, 0)
    disk.remove(ROOT_INODE, b"f")
    assert disk.links[file] == 1
    cut(disk)
    assert (disk.links[file], disk.links[other]) == (1, 1)
