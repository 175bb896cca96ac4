"""The baselines, under the name the benchmarks here import them by; they live where the installed program finds them."""

from streamingnode.benchmark.baseline import (
    BareGroupCommit,
    Load,
    Measured,
    measure_appends,
    measure_bare_appends,
    measure_plain_scan,
    open_database,
    plain_scan,
    scratch,
)

__all__ = [
    "BareGroupCommit",
    "Load",
    "Measured",
    "measure_appends",
    "measure_bare_appends",
    "measure_plain_scan",
    "open_database",
    "plain_scan",
    "scratch",
]
