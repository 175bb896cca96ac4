"""Where a demo works: it replaces what a demo made, and nothing else in the world."""

from pathlib import Path

import pytest

from streamingnode.demo.place import MARKER, claim
from wal.errors import AlreadyOwned, InvalidArgument
from wal.files import DirectoryLock


def test_missing_directory_is_made_and_marked(tmp_path: Path) -> None:
    place = claim(tmp_path / "a" / "demo")
    assert (place.directory / MARKER).is_file()
    assert not place.node.exists()


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    assert claim(tmp_path).directory == tmp_path


def test_earlier_demo_is_cleared_but_a_note_beside_it_stays(tmp_path: Path) -> None:
    place = claim(tmp_path / "demo")
    for part in (place.node, place.tables):
        part.mkdir()
        (part / "old").touch()
    place.picture.touch()
    (place.directory / "note.txt").touch()
    again = claim(tmp_path / "demo")
    assert {path.name for path in again.directory.iterdir()} == {MARKER, "note.txt"}


def test_directory_of_somebody_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "rows").touch()
    with pytest.raises(InvalidArgument, match="--dir"):
        claim(tmp_path)
    assert (tmp_path / "node" / "rows").exists()
    assert not (tmp_path / MARKER).exists()


def test_file_of_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").touch()
    with pytest.raises(InvalidArgument):
        claim(tmp_path / "demo")


def test_node_that_somebody_has_open_is_not_removed(tmp_path: Path) -> None:
    place = claim(tmp_path / "demo")
    place.node.mkdir()
    lock = DirectoryLock(place.node)
    try:
        with pytest.raises(AlreadyOwned):
            claim(tmp_path / "demo")
        assert place.node.exists()
    finally:
        lock.release()
