"""Every kind of file of a node, cut short, swapped, doubled, older or a stranger's: found and
named, and no row is missing.

A node on such a directory has every row it ever acknowledged, or says that it cannot; it never goes
on with fewer.
"""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.care.findings import Severity
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import SETTINGS, Sample, copy_of, flip, rows_of, swap
from wal.errors import StreamingNodeError

PATTERNS = {
    "table of the log": "log/*.sst",
    "RocksDB's log": "log/*.log",
    "RocksDB's manifest": "log/MANIFEST-*",
    "CURRENT": "log/CURRENT",
    "segment": "segments/*/*.parquet",
    "delete file": "deletes/*/*.parquet",
    "cut manifest": "cuts/*.json",
    "floor": "floor",
}


def files_like(path: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern that hold something, by size: the last one holds the most."""
    return sorted(
        (each for each in path.glob(pattern) if each.stat().st_size),
        key=lambda each: each.stat().st_size,
    )


Fault = Callable[[Path, str, Path, Path], bool]
"""Does something to a file of a pattern; told the node, an older copy of it, and a stranger.
Returns whether it did.
"""


def cut_to(share: float) -> Fault:
    def cut(path: Path, pattern: str, _older: Path, _stranger: Path) -> bool:
        file = files_like(path, pattern)[-1]
        os.truncate(file, int(file.stat().st_size * share))
        return True

    return cut


def cut_last_byte(path: Path, pattern: str, _older: Path, _stranger: Path) -> bool:
    file = files_like(path, pattern)[-1]
    # what RocksDB made ready and has not written is nothing
    content = file.read_bytes().rstrip(b"\0")
    os.truncate(file, len(content) - 1)
    return True


def swapped(path: Path, pattern: str, _older: Path, _stranger: Path) -> bool:
    files = files_like(path, pattern)
    for one, other in itertools.combinations(reversed(files), 2):
        if one.read_bytes() != other.read_bytes():
            swap(one, other)
            return True
    return False


def doubled(path: Path, pattern: str, _older: Path, _stranger: Path) -> bool:
    files = files_like(path, pattern)
    return len(files) > 1 and bool(shutil.copy(files[0], files[-1]))


def doubled_under_a_new_name(path: Path, pattern: str, _older: Path, _stranger: Path) -> bool:
    file = files_like(path, pattern)[-1]
    if not file.stem.isdecimal():
        return False
    shutil.copy(file, file.with_stem(f"{int(file.stem) + 1_000_000:0{len(file.stem)}d}"))
    return True


def older(path: Path, pattern: str, older: Path, _stranger: Path) -> bool:
    return taken_from(path, pattern, older)


def strangers(path: Path, pattern: str, _older: Path, stranger: Path) -> bool:
    return taken_from(path, pattern, stranger)


def taken_from(path: Path, pattern: str, other: Path) -> bool:
    """Put a file of another directory in the place of the one of that name, or else of the
    largest.
    """
    for file in reversed(files_like(path, pattern)):
        source = other / file.relative_to(path)
        if source.is_file() and source.read_bytes() != file.read_bytes():
            return bool(shutil.copy(source, file))
    return False


FAULTS: dict[str, Fault] = {
    "empty": cut_to(0),
    "half": cut_to(0.5),
    "without its last byte": cut_last_byte,
    "swapped": swapped,
    "doubled over another": doubled,
    "doubled under a new name": doubled_under_a_new_name,
    "older": older,
    "a stranger's": strangers,
}


@pytest.fixture(scope="module")
def nodes(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sample, closed and killed, with more in it since: so that the sample itself is an older
    copy.
    """
    place = tmp_path_factory.mktemp("nodes")
    path = copy_of(sample.closed, place / "closed")

    async def go_on() -> None:
        async with sn.open_node(path, **SETTINGS) as node:
            for key in range(-20, 0):
                await node.insert("orders", [{"id": key, "item": "later"}])
            await node.flush()
            await node.insert("orders", [{"id": -21, "item": "last"}])
            shutil.copytree(path, place / "killed", ignore=shutil.ignore_patterns("node.sock"))

    anyio.run(go_on)
    return {"closed": path, "killed": place / "killed"}


def cases() -> Iterator[tuple[str, str, str]]:
    yield from itertools.product(("closed", "killed"), PATTERNS, FAULTS)


@pytest.mark.parametrize("state, part, fault", list(cases()))
def test_bad_file_is_found_and_no_row_is_missing(
    nodes: dict[str, Path],
    sample: Sample,
    stranger: Path,
    tmp_path: Path,
    state: str,
    part: str,
    fault: str,
) -> None:
    path = copy_of(nodes[state], tmp_path / "node")
    if not files_like(path, PATTERNS[part]) or not FAULTS[fault](
        path, PATTERNS[part], sample.closed, stranger
    ):
        return  # there is no such file, or no other one of its kind
    report = verify_directory(path)
    expected = sample.rows | {key: "last" if key == -21 else "later" for key in range(-21, 0)}
    try:
        rows = rows_of(path)
    except StreamingNodeError as refused:
        print("refused", refused)
        assert report.worst is Severity.DAMAGE
    else:
        assert rows == expected
    print([(f.severity.value, f.place, f.detail) for f in report.findings])
    assert report.findings


def test_flipped_bit_in_any_table_of_the_database_is_found_and_ends_no_walk(
    nodes: dict[str, Path], tmp_path: Path
) -> None:
    for table in (nodes["closed"] / "log").glob("*.sst"):
        path = copy_of(nodes["closed"], tmp_path / "node")
        flip(path / "log" / table.name, table.stat().st_size // 10)
        assert verify_directory(path).worst is Severity.DAMAGE, table.name
