"""Flipped bits and cut files at sampled places of every file: never silently wrong, neither in
verify nor in opening.

"Silently" means: verify finds no damage, or opening and reading raises nothing, and the rows are
not those written.
"""

import random
from pathlib import Path

import pytest

from streamingnode.care.findings import Severity
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import Sample, copy_of, files_of, kinds_of, rows_of
from wal.errors import StreamingNodeError

WITHOUT_ROWS = (
    "LOG",
    "OPTIONS-",
    "IDENTITY",
    "rocksdict-config.json",
    "node.lock",
    "LOCK",
    "reserve",
)
"""RocksDB's notes for people and itself, our lock, the disk's reserve: nothing in them is a row or
says where one is.
"""

PLACES_PER_FILE = 1


def places(file: Path, number: int, seed: str) -> list[tuple[str, int]]:
    """Return what to do at which byte, with both ends of the file among the places."""
    chosen = random.Random(seed)
    size = file.stat().st_size
    flips = [0, size - 1, *(chosen.randrange(size) for _ in range(number))]
    cuts = [0, size - 1, *(chosen.randrange(size) for _ in range(number // 3))]
    return [*(("flip", at) for at in flips), *(("cut", at) for at in cuts)]


def damage(file: Path, what: str, at: int) -> None:
    content = bytearray(file.read_bytes())
    if what == "flip":
        content[at] ^= 1 << at % 8
    else:
        del content[at:]
    file.write_bytes(content)


def outcome(path: Path, rows: dict[int, str]) -> str:
    """Return how opening and reading everything ends."""
    try:
        return "right" if rows_of(path) == rows else "wrong"
    except StreamingNodeError:
        return "refused"


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_verify_misses_no_damage_that_changes_what_is_read(
    sample: Sample, tmp_path: Path, state: str
) -> None:
    original: Path = getattr(sample, state)
    missed = []
    found = 0
    for name in files_of(original):
        if Path(name).name.startswith(WITHOUT_ROWS):
            continue
        for what, at in places(original / name, PLACES_PER_FILE, name):
            path = copy_of(original, tmp_path / "node")
            damage(path / name, what, at)
            if verify_directory(path).worst is Severity.DAMAGE:
                found += 1
            elif outcome(path, sample.rows) != "right":
                missed.append(f"{name}: {what} at {at}")
    assert missed == []
    assert found > 50


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_a_damaged_node_opens_with_the_right_rows_or_is_refused(
    sample: Sample, tmp_path: Path, state: str
) -> None:
    original: Path = getattr(sample, state)
    outcomes = {"right": 0, "refused": 0}
    for kind, name in kinds_of(original):
        for what, at in places(original / name, PLACES_PER_FILE, kind):
            path = copy_of(original, tmp_path / "node")
            damage(path / name, what, at)
            ended = outcome(path, sample.rows)
            assert ended != "wrong", f"{kind} {name}: {what} at {at}"
            outcomes[ended] += 1
    assert outcomes["refused"] > 20
