"""What a damaged copy of a node directory shows: the damage is named, or the data is what it was,
or it is silently wrong.

In: a directory nothing was done to, and what it shows; a place to damage. Out: a verdict. Where
everything reads as it was, `verify` is asked too, on a copy nobody opened: it names the damage, or
the bytes mean nothing to anybody.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.events import findings_in
from tests.chaos.nursery import PRINTED, Nursery
from tests.chaos.operations import Operation
from tests.chaos.read_back import ReadBack
from tests.chaos.worker import EXIT_REFUSED, VERIFIED, Job, load_read_back
from tests.copying import without_socket

NAMED = "named"
VERIFY_NAMED = "read as it was, verify names it"
MEANINGLESS = "read as it was, means nothing"
DROPPED = "dropped, never told of"
WRONG = "wrong"
NAMES = frozenset({"CORRUPT", "UNSUPPORTED_FORMAT"})
"""Codes that name damage."""
SETTINGS: dict[str, object] = {
    "cut_interval_s": None,
    "log.memtable_bytes": 1 << 18,
    "log.free_bytes_min": 1 << 20,
}

Damage = Callable[[Path], str]
"""Damage a directory, the same way every time, and say where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intact:
    """A directory nothing was done to, what it shows, and what its process was told."""

    directory: Path
    truth: ReadBack
    operations: list[Operation] = field(default_factory=list)


def intact_of(nursery: Nursery, root: Path, directory: Path, operations: list[Operation]) -> Intact:
    """Return a directory, which its process left killed, with what a copy of it shows."""
    copy = root / "truth"
    shutil.copytree(directory, copy, ignore=without_socket)
    assert nursery.run(_read(copy, root / "read")) == 0, "what was killed opens again"
    truth = load_read_back(root / "read")
    assert truth is not None
    shutil.rmtree(copy)
    return Intact(directory=directory, truth=truth, operations=operations)


def judge(nursery: Nursery, root: Path, intact: Intact, damage: Damage) -> tuple[str, str]:
    """Damage a copy below `root` and return where, and the verdict; `root` stays only if that is
    `wrong: ...`.
    """
    copy = root / "node"
    shutil.copytree(intact.directory, copy, ignore=without_socket)
    place = damage(copy)
    verdict = _shown(nursery, root / "read", copy, intact)
    if verdict == MEANINGLESS:
        shutil.copytree(intact.directory, root / "again", ignore=without_socket)
        damage(root / "again")
        verdict = _verified(nursery, root / "verify", root / "again")
    if not verdict.startswith(WRONG):
        shutil.rmtree(root)
    return place, verdict


def _read(directory: Path, out: Path) -> Job:
    return Job(do="read", directory=str(directory), out=str(out), settings=SETTINGS)


def _shown(nursery: Nursery, out: Path, directory: Path, intact: Intact) -> str:
    code = nursery.run(_read(directory, out))
    seen = load_read_back(out)
    if code == 0 and seen is not None:
        return _compared(seen, intact)
    if code == EXIT_REFUSED and seen is not None:
        return NAMED if seen.code in NAMES else f"{WRONG}: refused with {seen.code}: {seen.error}"
    return f"{WRONG}: ended with {code}: {_printed(out)}"


def _verified(nursery: Nursery, out: Path, directory: Path) -> str:
    code = nursery.run(Job(do="verify", directory=str(directory), out=str(out)))
    if code != 0:
        return f"{WRONG}: verify ended with {code}: {_printed(out)}"
    return VERIFY_NAMED if (out / VERIFIED).read_bytes() else MEANINGLESS


def _compared(seen: ReadBack, intact: Intact) -> str:
    """Judge what is shown without an error: the last batch, if nobody was told of it, may be taken
    for a torn tail.
    """
    if seen.collections == intact.truth.collections:
        return MEANINGLESS
    findings = (
        list(findings_in(intact.operations, seen)) if intact.operations else ["it was acknowledged"]
    )
    for name, whole in intact.truth.collections.items():
        shown = seen.collections[name].log if name in seen.collections else ()
        if whole.log[: len(shown)] != shown:
            findings.append(f"{name} is not a part of what it was")
    return (
        f"{WRONG}: shows other data, without an error: {'; '.join(findings)}"
        if findings
        else DROPPED
    )


def _printed(out: Path) -> str:
    lines = (out / PRINTED).read_text("utf-8").splitlines()
    return " | ".join(lines[-4:])
