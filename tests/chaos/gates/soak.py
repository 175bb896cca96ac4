"""A node under steady load for hours: memory, descriptors and the time of an insert must stay what
they were.

One run is one node. What a run was too short to say gets a figure and no verdict; the lengths that
a verdict takes are named below. The named reader's rows, each once and in order, get one always.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from tests.chaos.gate import Gate, LifeResult, Settings, make_report
from tests.chaos.nursery import PRINTED, Nursery
from tests.chaos.report import GateReport
from tests.chaos.soak import MISSED, Sample, read_samples
from tests.chaos.worker import Job

WARM_UP_S = 300.0
WARM_UP_SHARE_MAX = 1 / 3
"""Left out: imports, buffers and caches that fill once. Of a short run at most a third."""
SLOPE_MIB_PER_H_MAX = 1.0
SLOPE_S_MIN = 4 * 3600.0
"""Shorter runs cannot tell one MiB an hour from what the allocator takes and gives back; of what is
in use, they can.
"""
IN_USE_WARM_UP_S = 1200.0
IN_USE_S_MIN = 3600.0
"""What is kept up to a bound is there by then: a step of 2 MiB was seen after a quarter of an hour,
and none in the next 45 minutes."""
RESIDENT_GROWTH_MAX = 0.25
"""Between the thirds after that warm-up. Allocators keep what they were given once: 297 to 346 MiB
were seen within half an hour in which what is in use did not grow."""
BUCKET_S = 30.0
"""Buffers fill up and are written within seconds: the mean of so long is taken for one point of the
line.
"""
DESCRIPTORS_S_MIN = 600.0
DRIFT_MAX = 0.10
DRIFT_S_MIN = 3600.0
"""A shared disk has slow minutes; an hour's third has enough of them for a median."""
ENDING_S_MAX = 60.0


def run(gate: Gate, settings: Settings) -> GateReport:
    """Soak one node for the minutes, or for `count` seconds."""
    seconds = (
        float(settings.count or gate.each_commit)
        if settings.minutes is None
        else 60 * settings.minutes
    )
    root = Path(tempfile.mkdtemp(prefix="chaos-soak-", dir=settings.scratch))
    begun_s = time.monotonic()
    out = root / "soak"
    with Nursery() as nursery:
        job = Job(do="soak", directory=str(root / "node"), out=str(out), seconds=seconds)
        code = nursery.run(job, seconds + ENDING_S_MAX)
    samples = read_samples(out)
    result = LifeResult(tried=int(samples[-1].at_s - samples[0].at_s) if samples else 0)
    if code != 0:
        ended = "does not end" if code is None else f"ended with {code}"
        result.findings.append(
            f"the node {ended}: {' | '.join((out / PRINTED).read_text('utf-8').splitlines()[-8:])}"
        )
    if (out / MISSED).exists():
        result.findings.append(f"the named reader: {(out / MISSED).read_text('utf-8')}")
    figures, broken, result.undecided = judge(samples)
    failed = len(broken) + len(result.findings)
    result.findings += [*broken, *figures]
    if failed:
        result.findings.append(f"what it left is in {root}")
    else:
        shutil.rmtree(root)
    return make_report(gate, settings, result, failed=failed, seconds=time.monotonic() - begun_s)


def judge(samples: Sequence[Sample]) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Return the figures of a run, the promises it broke, as far as its length permits to say, and
    what it leaves open.
    """
    kept = after_warm_up(samples)
    if len(kept) < 3:
        return ["too short for any figure"], [], tuple(_JUDGES)
    length_s = kept[-1].at_s - kept[0].at_s
    figures = [
        (
            f"{kept[-1].inserts:,} inserts, {kept[-1].read:,} of them read by name; "
            f"{length_s / 60:.1f} minutes after warm-up"
        ),
        (
            f"at most {_mib(kept, _disk):.1f} MiB of disk and {_mib(kept, _resident):.1f} MiB of "
            f"memory, {_course(samples)}"
        ),
    ]
    broken: list[str] = []
    undecided: list[str] = []
    for what, verdict_on in _JUDGES.items():
        text, breaks, needs_s = verdict_on(kept)
        if length_s < needs_s:
            figures.append(f"{text} (no verdict: that takes {needs_s / 60:.0f} minutes)")
            undecided.append(what)
        else:
            (broken if breaks else figures).append(text)
    return figures, broken, tuple(undecided)


def after_warm_up(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples after the warm-up."""
    if not samples:
        return samples
    length_s = samples[-1].at_s - samples[0].at_s
    begin_s = samples[0].at_s + min(WARM_UP_S, WARM_UP_SHARE_MAX * length_s)
    return [each for each in samples if each.at_s >= begin_s]


def slope_mib_per_h(
    samples: Sequence[Sample], size: Callable[[Sample], int]
) -> tuple[float, float]:
    """Return the slope of a size by least squares over means of `BUCKET_S`, and two standard errors
    of it.
    """
    points = _means(samples, size)
    mean_h, mean = (fmean(column) for column in zip(*points, strict=True))
    spread = sum((at - mean_h) ** 2 for at, _ in points)
    slope = sum((at - mean_h) * (each - mean) for at, each in points) / spread
    rest = sum((each - mean - slope * (at - mean_h)) ** 2 for at, each in points)
    return slope, 2 * math.sqrt(rest / max(len(points) - 2, 1) / spread)


def _means(samples: Sequence[Sample], size: Callable[[Sample], int]) -> list[tuple[float, float]]:
    """Return hours and MiB, bucket by bucket."""
    return [
        (fmean(each.at_s for each in bucket) / 3600, fmean(map(size, bucket)) / 2**20)
        for _, found in groupby(samples, lambda each: each.at_s // BUCKET_S)
        if (bucket := list(found))
    ]


_Verdict = tuple[str, bool, float]
"""What to say, whether that breaks the promise, and after how many seconds that may be said."""


def _slope(kept: Sequence[Sample]) -> _Verdict:
    slope, _ = slope_mib_per_h(kept, _resident)
    text = f"memory grows by {slope:.2f} MiB/h, allowed {SLOPE_MIB_PER_H_MAX:g}"
    return text, slope >= SLOPE_MIB_PER_H_MAX, SLOPE_S_MIN


def _resident_growth(kept: Sequence[Sample]) -> _Verdict:
    """An hour cannot tell a small slope of what allocators keep, but a large one: medians of its
    thirds are compared.
    """
    begin_s = kept[0].at_s + IN_USE_WARM_UP_S - WARM_UP_S
    first, last = _thirds([each for each in kept if each.at_s >= begin_s] or kept)
    before, after = (
        median(each.resident_bytes for each in third or kept) / 2**20 for third in (first, last)
    )
    text = (
        f"resident memory goes from {before:.0f} to {after:.0f} MiB, allowed "
        f"{RESIDENT_GROWTH_MAX:.0%} more"
    )
    return text, after > (1 + RESIDENT_GROWTH_MAX) * before, IN_USE_S_MIN


def _in_use_slope(kept: Sequence[Sample]) -> _Verdict:
    begin_s = kept[0].at_s + IN_USE_WARM_UP_S - WARM_UP_S
    slope, error = slope_mib_per_h([each for each in kept if each.at_s >= begin_s] or kept, _in_use)
    text = (
        f"memory in use grows by {slope:.2f} MiB/h, give or take {error:.2f}, allowed "
        f"{SLOPE_MIB_PER_H_MAX:g}"
    )
    return text, slope - error >= SLOPE_MIB_PER_H_MAX, IN_USE_S_MIN


def _growth(kept: Sequence[Sample]) -> _Verdict:
    """Tables and logs open and close files all the time, so the fewest of each third are
    compared.
    """
    first, last = _thirds(kept)
    growth = min(each.descriptors for each in last) - min(each.descriptors for each in first)
    return f"descriptors grow by {growth}, allowed 0", growth > 0, DESCRIPTORS_S_MIN


def _drift(kept: Sequence[Sample]) -> _Verdict:
    first, last = (median(each.p99_s for each in third) for third in _thirds(kept))
    text = (
        f"p99 of an insert goes from {first * 1e3:.2f} to {last * 1e3:.2f} ms, allowed "
        f"{DRIFT_MAX:.0%} more"
    )
    return text, last > (1 + DRIFT_MAX) * first, DRIFT_S_MIN


_JUDGES: dict[str, Callable[[Sequence[Sample]], _Verdict]] = {
    "the slope of resident memory": _slope,
    "resident memory": _resident_growth,
    "memory in use": _in_use_slope,
    "descriptors": _growth,
    "the time of an insert": _drift,
}
"""What is judged, by what the row of the page calls it."""


def _thirds(kept: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    third = len(kept) // 3
    return kept[:third], kept[-third:]


def _course(samples: Sequence[Sample]) -> str:
    """Return the memory of the whole run at its quarters: a straight line looks otherwise than one
    that bends.
    """
    at = [samples[(len(samples) - 1) * quarter // 4].resident_bytes / 2**20 for quarter in range(5)]
    return f"which was {', '.join(f'{each:.0f}' for each in at)} MiB at the quarters"


def _mib(kept: Sequence[Sample], size: Callable[[Sample], int]) -> float:
    return max(map(size, kept)) / 2**20


def _disk(sample: Sample) -> int:
    return sample.disk_bytes


def _resident(sample: Sample) -> int:
    return sample.resident_bytes


def _in_use(sample: Sample) -> int:
    return sample.in_use_bytes
