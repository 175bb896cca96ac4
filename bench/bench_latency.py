"""From append to delivery over the fsync, and how long the event loop is ever held under a mixed load."""

import sys
from functools import partial

from bench.report import Settings, main, note
from streamingnode.benchmark.latency import measure_delivery, measure_loop_hold
from streamingnode.benchmark.measurement import Measurement
from streamingnode.opening import run_async


def run(settings: Settings) -> list[Measurement]:
    """Return both, in ms."""
    delivery = partial(measure_delivery, settings.directory, seconds=settings.seconds, progress=note)
    hold = partial(measure_loop_hold, settings.directory, seconds=settings.seconds, progress=note)
    return [*run_async(delivery), *run_async(hold)]


if __name__ == "__main__":
    sys.exit(main("append to delivery, and the event loop's longest hold", run))
