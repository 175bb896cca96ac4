"""Durable appends through the public interface and the full chain, against a bare group commit in the same run.

The loop is `streamingnode.benchmark.appends`, which `streamingnode bench` runs as well.
"""

import sys
from functools import partial

from bench.report import Settings, main, note
from streamingnode.benchmark.appends import measure_append_grid
from streamingnode.benchmark.measurement import Measurement
from streamingnode.opening import run_async


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second for each number of outstanding inserts and rows in each."""
    return run_async(
        partial(
            measure_append_grid,
            settings.directory,
            seconds=settings.seconds,
            repeats=settings.repeats,
            progress=note,
        )
    )


if __name__ == "__main__":
    sys.exit(main("durable appends against a bare group commit", run))
