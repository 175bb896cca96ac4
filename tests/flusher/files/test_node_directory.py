"""The files of a node change only while the node owns them."""

from pathlib import Path

import pytest

from flusher.files.node_directory import NodeDirectory
from wal.errors import ChannelFenced


def fenced() -> None:
    raise ChannelFenced("taken over by another owner")


def test_a_directory_with_another_owner_is_read_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "cuts").mkdir()
    (tmp_path / "cuts" / "1.json").write_bytes(b"theirs")
    (tmp_path / "cuts" / "1.json.tmp").write_bytes(b"ours")
    directory = NodeDirectory(tmp_path, check_owned=fenced)
    for change in (
        lambda: directory.create("cuts/1.json.tmp"),
        lambda: directory.rename("cuts/1.json.tmp", "cuts/1.json"),
        lambda: directory.remove("cuts/1.json"),
    ):
        with pytest.raises(ChannelFenced):
            change()
    assert directory.read("cuts/1.json") == b"theirs"
    assert directory.files("cuts") == ["cuts/1.json", "cuts/1.json.tmp"]
