"""The verdict on a history.

A call that failed never happened, one that is open happened once or not at all, one that was acknowledged happened once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.chaos.journal import Event
from bench.chaos.judge.anomaly import Anomaly, Kind
from bench.chaos.judge.below import judge_below
from bench.chaos.judge.history import History, gather, settle_deaths
from bench.chaos.judge.order import judge_cycles, judge_time
from bench.chaos.judge.reads import judge_reads, place_rows, settle_order
from bench.chaos.judge.states import judge_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The anomalies; how many operations were judged; how many acknowledged ones are gone, as they may be."""

    anomalies: tuple[Anomaly, ...]
    operations: int
    lost: int


def check(events: Iterable[Event], *, gaps: bool = True) -> list[Anomaly]:
    """Return everything that is wrong with a history; `gaps`: failed appends may leave row offsets unused."""
    return list(judged(events, gaps=gaps).anomalies)


def judged(events: Iterable[Event], *, gaps: bool = True) -> Verdict:
    """Judge a history. An operation is a call that writes, a reader, or a look at a state, each counted once."""
    history = gather(events)
    anomalies = (
        *place_rows(history),
        *settle_deaths(history),
        *_judged(history, gaps=gaps),
    )
    return Verdict(anomalies=anomalies, operations=_operations(history), lost=history.lost)


def _judged(history: History, *, gaps: bool) -> Iterator[Anomaly]:
    settle_order(history)
    yield from _errors(history)
    yield from judge_reads(history, gaps=gaps)
    yield from judge_states(history)
    yield from judge_time(history)
    yield from judge_cycles(history)
    yield from judge_below(history)


def _errors(history: History) -> Iterator[Anomaly]:
    """Every error has a code, which is upper case; another one came from somewhere it should not."""
    for told in history.told.values():
        if told.error and not told.error.isupper():
            yield Anomaly(Kind.ERROR, f"call {told.op} raised {told.error}, which is no error of ours")


def _operations(history: History) -> int:
    readers = {(scan.collection, scan.reader) for scan in history.scans}
    return len(history.asked) + len(readers) + len(history.states)
