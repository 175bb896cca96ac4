"""Files are private whatever the umask says, and open to the group only where that was asked for."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from wal.files import create_file, make_directory, set_group_access, write_durably, write_file


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
    assert make_directory(top, for_group=for_group)
    assert not make_directory(top, for_group=for_group)
    with create_file(top / "created", for_group=for_group) as created:
        created.write(b"new")
    write_file(top / "written", b"new", for_group=for_group)
    write_durably(top / "replaced", b"new")
    assert mode(top) == directory
    assert {(path.name, mode(path)) for path in top.iterdir()} == {
        ("created", file),
        ("written", file),
        ("replaced", file),
    }
    assert (top / "created").read_bytes() == b"new"


def test_an_exclusive_file_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "here", exclusive=True)
    assert (tmp_path / "here").read_bytes() == b"theirs"


def test_access_of_the_group_is_given_and_taken_below_a_directory_and_not_through_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    outside.chmod(0o604)
    top = tmp_path / "top"
    make_directory(top)
    make_directory(top / "below")
    write_file(top / "below" / "file", b"")
    (top / "link").symlink_to(outside)
    assert set_group_access(top, for_group=True)
    assert [mode(path) for path in (top, top / "below", top / "below" / "file")] == [0o750, 0o750, 0o640]
    assert not set_group_access(top, for_group=True)
    assert set_group_access(top, for_group=False)
    assert [mode(path) for path in (top, top / "below", top / "below" / "file")] == [0o700, 0o700, 0o600]
    assert mode(outside) == 0o604
