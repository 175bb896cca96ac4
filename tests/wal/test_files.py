"""Only regular files are opened: whatever else lies in their place is refused at once, and so is what is far too long."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from wal.errors import Corrupt
from wal.files import open_binary, open_regular, read_regular


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
    with open_binary(path, "wb", buffering=1 << 20) as file:
        file.write(b"rows")
        assert file.name == str(path)
    assert read_regular(path, bytes_max=4) == b"rows"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing")
