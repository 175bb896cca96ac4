"""Only regular files are opened, and files are private whatever the umask says."""

import gc
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wal.errors import Corrupt
from wal.files import (
    create_file,
    make_directory,
    open_regular,
    read_regular,
    set_group_access,
    write_file,
)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


def make_link(path: Path) -> None:
    path.with_name("target").write_bytes(b"elsewhere")
    path.symlink_to("target")


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "link": make_link,
    "loop": lambda path: path.symlink_to(path.name),
    "socket": make_socket,
    "device": lambda path: os.mknod(path, 0o20600, os.makedev(1, 5)),  # /dev/zero never ends
}


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], flags: int
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("file")
    try:
        make(path)
    except PermissionError:
        pytest.skip("making a device takes a right that not everybody has")
    gc.collect()  # descriptors of earlier tests may be closed meanwhile
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(Corrupt, match="file is no regular file — "):
        open_regular(path, flags)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_terabyte_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(Corrupt, match=f"has {1 << 40} bytes, at most 100 were written"):
        read_regular(path, bytes_max=100)


def test_a_file_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with create_file(path) as file:
        file.write(b"rows")
        assert file.name == str(path)
    assert read_regular(path, bytes_max=4) == b"rows"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("for_group,directory,file", [(False, 0o700, 0o600), (True, 0o750, 0o640)])
def test_the_umask_neither_opens_nor_closes_anything(
    tmp_path: Path, umask: int, for_group: bool, directory: int, file: int
) -> None:
    top = tmp_path / "top"
    make_directory(top, for_group=for_group)
    make_directory(top, for_group=for_group)
    with create_file(top / "created", for_group=for_group) as created:
        created.write(b"new")
    write_file(top / "written", b"new", for_group=for_group)
    assert mode(top) == directory
    assert {(path.name, mode(path)) for path in top.iterdir()} == {
        ("created", file),
        ("written", file),
    }
    assert (top / "created").read_bytes() == b"new"


def test_an_exclusive_file_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "here", exclusive=True)
    assert (tmp_path / "here").read_bytes() == b"theirs"


def test_access_of_the_group_is_given_and_taken_below_a_directory_and_not_through_links(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    outside.chmod(0o604)
    top = tmp_path / "top"
    make_directory(top)
    make_directory(top / "below")
    write_file(top / "below" / "file", b"")
    (top / "link").symlink_to(outside)
    set_group_access(top, for_group=True)
    assert [mode(path) for path in (top, top / "below", top / "below" / "file")] == [
        0o750,
        0o750,
        0o640,
    ]
    set_group_access(top, for_group=False)
    assert [mode(path) for path in (top, top / "below", top / "below" / "file")] == [
        0o700,
        0o700,
        0o600,
    ]
    assert mode(outside) == 0o604
