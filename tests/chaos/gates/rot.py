"""Bit rot: one bit of one file is flipped, the node is opened and everything is read.

A life makes one killed directory and flips one bit of a fresh copy, again and again, in files of
one kind. Kept: the node names the damage (refuses to open, or a read raises `Corrupt`), or shows
exactly what was there, but for a last batch that nobody was told of. Showing anything else is a
failure, and so is dying of it. Every byte of a small directory: `bytes`.
"""

import random
import time
from pathlib import Path

from tests.chaos.damage import SETTINGS, WRONG, Intact, intact_of, judge
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.life import Life
from tests.chaos.nursery import Nursery
from tests.chaos.operations import Operation, read_operations
from tests.chaos.report import GateReport
from tests.chaos.worker import JOURNAL
from tests.chaos.workload import Load

KINDS = {
    "log": ("log/*.log",),
    "table": ("log/*.sst",),
    "database manifest": ("log/MANIFEST-*", "log/CURRENT"),
    "cut manifest": ("cuts/*.json",),
    "parquet": ("**/*.parquet",),
    "floor": ("floor",),
}
"""Files by kind, as patterns below the node directory."""
FLIPS_IN_A_LIFE = 64
LOAD_S = 0.1
LOAD_S_MAX = 120.0
"""Ends a load that stands still; files of all kinds are there after 1 s, or 3 s on a busy disk."""
FILES_MIN = {"cut manifest": 3}
"""How many files of a kind there are at least; 1 of the others."""


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate; lives take the kinds of files in turn."""
    return run_lives(gate, settings, live, tries_in_a_life=FLIPS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, flips: int) -> LifeResult:
    """Flip so many bits of one directory, each in a copy of its own."""
    kind = list(KINDS)[seed % len(KINDS)]
    result = LifeResult()
    intact = _killed_directory(nursery, root, seed)
    for number in range(flips):

        def flip(directory: Path, flip_seed: str = f"{seed}-{number}") -> str:
            return flip_one(directory, kind, random.Random(flip_seed))

        place, verdict = judge(nursery, root / f"flip-{number}", intact, flip)
        result.tried += 1
        result.counts[f"{kind}: {verdict.partition(':')[0]}"] += 1
        if verdict.startswith(WRONG):
            result.findings.append(f"{kind}, {place}: {verdict}")
    return result


def flip_one(directory: Path, kind: str, choose: random.Random) -> str:
    """Flip one bit of one file of a kind, each byte as likely as any other; return where."""
    paths = _files(directory, kind)
    path = choose.choices(paths, [path.stat().st_size for path in paths])[0]
    content = bytearray(path.read_bytes())
    at = choose.randrange(len(content))
    bit = choose.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.relative_to(directory)} byte {at} of {len(content)} bit {bit}"


def _killed_directory(nursery: Nursery, root: Path, seed: int) -> Intact:
    """Return a directory with files of all kinds whose process was killed.

    Files are counted once the process is dead. While it runs, RocksDB removes a log file whose
    records are in tables, and the new one may still be empty when the kill comes: such a directory
    gets another process.
    """
    life = Life(nursery, root, seed=seed, settings=SETTINGS)
    operations: list[Operation] = []
    end_s = time.monotonic() + LOAD_S_MAX
    while lacking := _lacking_kinds(life.directory):
        assert time.monotonic() < end_s, f"the load leaves too few files of {lacking}"
        pid = life.start(Load(cut_pause_s=0.1))
        while _lacking_kinds(life.directory) and time.monotonic() < end_s:
            assert nursery.wait(pid, LOAD_S) is None, "the load has no end"
        nursery.kill(pid)
        operations += read_operations(life.out / JOURNAL)
    return intact_of(nursery, root, life.directory, operations)


def _lacking_kinds(directory: Path) -> list[str]:
    return [kind for kind in KINDS if len(_files(directory, kind)) < FILES_MIN.get(kind, 1)]


def _files(directory: Path, kind: str) -> list[Path]:
    found = {path for pattern in KINDS[kind] for path in directory.glob(pattern)}
    return sorted(filter(_holds_something, found))


def _holds_something(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # a running node has removed it since it was listed
        return False
