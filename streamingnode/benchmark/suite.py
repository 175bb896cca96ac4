"""The benchmarks that `streamingnode bench` runs, by name."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from streamingnode.benchmark.appends import measure_append_grid
from streamingnode.benchmark.cuts import measure_cut
from streamingnode.benchmark.latency import measure_delivery, measure_loop_hold
from streamingnode.benchmark.measurement import Measurement
from streamingnode.benchmark.reads import measure_scan


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """On which disk, how long each load runs, and how many runs a median is of."""

    directory: Path
    seconds: float
    repeats: int
    progress: Callable[[str], None]


Benchmark = Callable[[SuiteOptions], Awaitable[list[Measurement]]]


async def _append(options: SuiteOptions) -> list[Measurement]:
    return await measure_append_grid(
        options.directory, seconds=options.seconds, repeats=options.repeats, progress=options.progress
    )


async def _delivery(options: SuiteOptions) -> list[Measurement]:
    return await measure_delivery(options.directory, seconds=options.seconds, progress=options.progress)


async def _event_loop(options: SuiteOptions) -> list[Measurement]:
    return await measure_loop_hold(options.directory, seconds=options.seconds, progress=options.progress)


async def _scan(options: SuiteOptions) -> list[Measurement]:
    return await measure_scan(options.directory, repeats=options.repeats, progress=options.progress)


async def _cut(options: SuiteOptions) -> list[Measurement]:
    return await measure_cut(options.directory, repeats=options.repeats, progress=options.progress)


BENCHMARKS: dict[str, Benchmark] = {
    "append": _append,
    "delivery": _delivery,
    "loop": _event_loop,
    "scan": _scan,
    "cut": _cut,
}


async def run_suite(names: list[str], options: SuiteOptions) -> list[Measurement]:
    """Run the named benchmarks in order, one after the other."""
    return [measured for name in names for measured in await BENCHMARKS[name](options)]
