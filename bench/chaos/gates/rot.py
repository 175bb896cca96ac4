"""Bit rot: one bit of one file is flipped, the node is opened and everything is read.

A life makes one killed directory and flips one bit of a fresh copy, again and again, in files of one kind. Kept: the node
names the damage (refuses to open, or a read raises `Corrupt`), or shows exactly what was there, but for a last batch that
nobody was told of. Showing anything else is a failure, and so is dying of it.
"""

import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.checker import check
from bench.chaos.gate import Gate, LifeResult, Settings, run_lives
from bench.chaos.life import Life
from bench.chaos.nursery import PRINTED, Nursery
from bench.chaos.operations import Operation, read_operations
from bench.chaos.read_back import ReadBack
from bench.chaos.report import GateReport
from bench.chaos.worker import EXIT_REFUSED, JOURNAL, Job, load_read_back
from bench.chaos.workload import Load

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
LOAD_S, LOAD_S_MAX = 0.1, 20.0
CUTS_MIN = 3
NAMED = frozenset({"CORRUPT", "UNSUPPORTED_FORMAT"})
SETTINGS: dict[str, object] = {"cut_interval_s": None, "log.memtable_bytes": 1 << 18, "log.free_bytes_min": 1 << 20}


def run(gate: Gate, settings: Settings) -> GateReport:
    """Run the gate; lives take the kinds of files in turn."""
    return run_lives(gate, settings, live, tries_in_a_life=FLIPS_IN_A_LIFE)


def live(nursery: Nursery, root: Path, seed: int, flips: int) -> LifeResult:
    """Flip so many bits of one directory, each in a copy of its own."""
    choose, kind = random.Random(seed), list(KINDS)[seed % len(KINDS)]
    result = LifeResult()
    intact = _killed_directory(nursery, root, seed)
    for number in range(flips):
        copy = root / f"copy-{number}"
        shutil.copytree(intact.directory, copy)
        place = flip_one(copy, kind, choose)
        verdict = _judge(nursery, root / f"read-{number}", copy, intact)
        result.tried += 1
        result.counts[f"{kind}: {verdict.partition(':')[0]}"] += 1
        if verdict.startswith("wrong"):
            result.findings.append(f"{kind}, {place}: {verdict}")
        else:
            shutil.rmtree(copy)
    return result


def flip_one(directory: Path, kind: str, choose: random.Random) -> str:
    """Flip one bit of one file of a kind, each byte as likely as any other; return where."""
    paths = _files(directory, kind)
    path = choose.choices(paths, [path.stat().st_size for path in paths])[0]
    content = bytearray(path.read_bytes())
    at, bit = choose.randrange(len(content)), choose.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"{path.relative_to(directory)} byte {at} of {len(content)} bit {bit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Intact:
    """A directory nothing was done to, what it shows, and what its process was told."""

    directory: Path
    truth: ReadBack
    operations: list[Operation]


def _killed_directory(nursery: Nursery, root: Path, seed: int) -> _Intact:
    """Make a directory with logs, tables and cuts whose process was killed."""
    life = Life(nursery, root, seed=seed, settings=SETTINGS)
    pid = life.start(Load(cut_pause_s=0.1))
    end_s = time.monotonic() + LOAD_S_MAX
    while not _has_all_kinds(life.directory) and time.monotonic() < end_s:
        assert nursery.wait(pid, LOAD_S) is None, "the load has no end"
    nursery.kill(pid)
    assert _has_all_kinds(life.directory), "the load leaves files of all kinds"
    copy = root / "truth"
    shutil.copytree(life.directory, copy)
    job = Job(do="read", directory=str(copy), out=str(root / "read"), settings=SETTINGS)
    assert nursery.run(job) == 0, "what was killed opens again"
    truth = load_read_back(root / "read")
    assert truth is not None
    return _Intact(directory=life.directory, truth=truth, operations=read_operations(life.out / JOURNAL))


def _has_all_kinds(directory: Path) -> bool:
    return all(_files(directory, kind) for kind in KINDS) and len(_files(directory, "cut manifest")) >= CUTS_MIN


def _files(directory: Path, kind: str) -> list[Path]:
    found = {path for pattern in KINDS[kind] for path in directory.glob(pattern)}
    return sorted(path for path in found if path.exists() and path.stat().st_size)


def _judge(nursery: Nursery, out: Path, directory: Path, intact: _Intact) -> str:
    code = nursery.run(Job(do="read", directory=str(directory), out=str(out), settings=SETTINGS))
    seen = load_read_back(out)
    if code == 0 and seen is not None:
        return _compare(seen, intact)
    if code == EXIT_REFUSED and seen is not None:
        return "named" if seen.code in NAMED else f"wrong: refused with {seen.code}: {seen.error}"
    lines = (out / PRINTED).read_text("utf-8").splitlines()
    return f"wrong: ended with {code}: {' | '.join(lines[-4:])}"


def _compare(seen: ReadBack, intact: _Intact) -> str:
    """Judge what is shown without an error: the last batch, if nobody was told of it, may be taken for a torn tail."""
    if seen.collections == intact.truth.collections:
        return "read as it was"
    findings = list(check(intact.operations, seen).findings)
    for name, whole in intact.truth.collections.items():
        shown = seen.collections[name].log
        if whole.log[: len(shown)] != shown:
            findings.append(f"{name} is not a part of what it was")
    return f"wrong: shows other data, without an error: {'; '.join(findings)}" if findings else "dropped, never told of"
