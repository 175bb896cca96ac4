"""Every byte of one small file of each kind, in turn: one bit of it is flipped, the node is opened
and everything is read.

A life walks over one stretch of bytes; its seed is the number of the stretch, and a run without a
seed goes on with the stretches that the kept runs have walked least often. Checkpoint, producers'
window and reader positions are records of the state map: they lie in the log and tables that are
walked. Kept: as for `rot`, and `verify` is asked about every byte whose change changes nothing;
those it does not miss either are reported as meaningless, by range. They are padding, and not added
up; nor is another bit of a byte whose number is beyond the end of its file.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.damage import MEANINGLESS, SETTINGS, WRONG, Intact, intact_of, judge
from tests.chaos.gate import Gate, LifeResult, Settings, run_lives
from tests.chaos.nursery import KILLED, Nursery
from tests.chaos.report import GateReport, read_reports, totals
from tests.chaos.worker import Job

STRETCH_BYTES = 128
PROCESSES = 2
ROOM_BYTES = {
    "floor": 12 << 10,
    "log/*.log": 5 << 10,
    "log/*.sst": 10 << 10,
    "log/MANIFEST-*": 1 << 10,
    "log/CURRENT": STRETCH_BYTES,
    "cuts/*.json": 3 << 10,
    "segments/*/*.parquet": 3 << 10,
    "deletes/*/*.parquet": 2 << 10,
}
"""The newest file of each pattern (of tables all, end to end) has its bytes at fixed numbers, with
room to the next.

So a number means the same byte in every run, though no two runs write files of quite the same
length. Numbers beyond the last byte start over at the first, each time with the next bit of it.
"""
STRETCHES = sum(ROOM_BYTES.values()) // STRETCH_BYTES
STRETCH = "stretch of bytes: {} +{}"


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate from the stretch that the seed names."""
    report = run_lives(gate, settings, live, tries_in_a_life=STRETCH_BYTES)
    covered = {name: report.covered.get(name, 0) for name in map(stretch_name, range(STRETCHES))}
    return dataclasses.replace(report, covered=covered)


def first_seed() -> int:
    """Return the first of the stretches that were walked least often."""
    kept = next((each.covered for each in totals(read_reports()) if each.gate == "bytes"), {})
    return min(range(STRETCHES), key=lambda stretch: kept.get(stretch_name(stretch), 0))


def stretch_name(stretch: int) -> str:
    """Return pattern and offset of a stretch."""
    return STRETCH.format(*_place_of(stretch * STRETCH_BYTES))


def live(nursery: Nursery, root: Path, seed: int, flips: int) -> LifeResult:
    """Walk over the bytes of one stretch, or the first `flips` of them; beyond the end of a file
    with other bits of it.
    """
    stretch = seed % STRETCHES
    result = LifeResult()
    intact = _small_directory(nursery, root)
    pattern, first = _place_of(stretch * STRETCH_BYTES)
    size = _size(intact.directory, pattern)
    meaningless = []
    for number in range(first, first + flips):
        at = number % size
        lap = number // size
        bit = (random.Random(f"{pattern} {at}").randrange(8) + lap) % 8

        def flip(directory: Path, at: int = at, bit: int = bit) -> str:
            return _flip(directory, pattern, at, 1 << bit)

        place, verdict = judge(nursery, root / f"byte-{number}", intact, flip)
        result.tried += 1
        result.padding += verdict == MEANINGLESS or lap > 0
        result.counts[f"{pattern}: {verdict.partition(':')[0]}"] += 1
        if verdict == MEANINGLESS:
            meaningless.append(at)
        if verdict.startswith(WRONG):
            result.findings.append(f"{place}: {verdict}")
    result.covered[stretch_name(stretch)] += 1
    for begin, end in _ranges(sorted(set(meaningless))):
        result.counts[f"of {pattern} bytes {begin} to {end} mean nothing"] += 1
    return result


def _small_directory(nursery: Nursery, root: Path) -> Intact:
    node = root / "node"
    for process in range(PROCESSES):
        out = root / f"process-{process}"
        job = Job(do="small", directory=str(node), out=str(out), first=process, settings=SETTINGS)
        assert nursery.run(job) == KILLED, "each process kills itself at the end"
    for pattern, room_bytes in ROOM_BYTES.items():
        assert 0 < _size(node, pattern) <= room_bytes, f"{pattern} has {_size(node, pattern)} bytes"
    return intact_of(nursery, root, node, [])


def _place_of(number: int) -> tuple[str, int]:
    """Return the pattern and the offset of a byte by its number."""
    for pattern, room_bytes in ROOM_BYTES.items():
        if number < room_bytes:
            return pattern, number
        number -= room_bytes
    raise AssertionError("a number beyond the last byte")


def _files(directory: Path, pattern: str) -> list[Path]:
    files = sorted(directory.glob(pattern), key=lambda path: (len(path.name), path.name))
    return files if pattern.endswith(".sst") else files[-1:]


def _size(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in _files(directory, pattern))


def _flip(directory: Path, pattern: str, at: int, mask: int) -> str:
    for path in _files(directory, pattern):
        content = bytearray(path.read_bytes())
        if at < len(content):
            content[at] ^= mask
            path.write_bytes(content)
            return f"{path.relative_to(directory)} byte {at} of {len(content)} mask {mask:#04x}"
        at -= len(content)
    raise AssertionError("a place beyond the end of its files")


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of numbers, which ascend."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda at: at[1] - at[0]):
        found = [number for _, number in run]
        yield found[0], found[-1]
