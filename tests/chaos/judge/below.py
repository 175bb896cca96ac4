"""What lies below a closed node: a log without a gap, and files that hold every row before their
cut once.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.journal import Below
from tests.chaos.judge.anomaly import Anomaly, Kind
from tests.chaos.judge.history import History


def judge_below(history: History) -> Iterator[Anomaly]:
    """Judge each look below."""
    for below in history.below:
        yield from (
            Anomaly(Kind.BELOW, finding)
            for finding in (*below.findings, *_log(below), *_files(history, below))
        )


def _log(below: Below) -> Iterator[str]:
    for (_, last, tick), (first, _, next_tick) in pairwise(below.entries):
        if first != last + 1:
            yield f"positions {last + 1} to {first - 1} are missing in the log"
        if next_tick <= tick:
            yield f"tick {next_tick} at position {first} is not above {tick}"


def _files(history: History, below: Below) -> Iterator[str]:
    for name, values in below.files.items():
        yield from (
            f"value {value} is {count} times in files"
            for value, count in Counter(values).items()
            if count > 1
        )
        states = [state for state in history.states if state.collection == name]
        shown = set(states[-1].values) if states else set()
        yield from (
            f"value {value} of {name} is in a file and nowhere else"
            for value in sorted({*values} - shown)
        )
        due = {value for tick, value in history.order.get(name, ()) if tick <= below.cut_tick}
        yield from (
            f"value {value} of {name} is before a cut and in no file"
            for value in sorted(due - {*values})
        )
