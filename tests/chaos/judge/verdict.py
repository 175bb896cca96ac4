"""The verdict on a history: is there an order of the calls that explains everything that was told
and read?

In: the events of a `journal`, of any number of clients and lives of a node. Out: anomalies, none
when all is well. `history` is what the others here look at; each of the rest judges one thing.
Pure, and linear but for sorting.

A call that failed never happened, one that is open happened once or not at all, one that was
acknowledged happened once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.chaos.journal import Event
from tests.chaos.judge.anomaly import Anomaly, Kind
from tests.chaos.judge.below import judge_below
from tests.chaos.judge.history import History, gather, settle_deaths
from tests.chaos.judge.order import judge_cycles, judge_time
from tests.chaos.judge.reads import judge_reads, place_rows, settle_order
from tests.chaos.judge.states import judge_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The anomalies; how many operations were judged; how many acknowledged ones are gone, as they
    may be.
    """

    anomalies: tuple[Anomaly, ...]
    operations: int
    lost: int


def check(events: Iterable[Event], *, gaps: bool = True) -> list[Anomaly]:
    """Return everything that is wrong with a history; `gaps`: failed appends may leave row offsets
    unused.
    """
    return list(judged(events, gaps=gaps).anomalies)


def judged(events: Iterable[Event], *, gaps: bool = True) -> Verdict:
    """Judge a history. An operation is a call that writes, a reader, or a look at a state, each
    counted once.
    """
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
    """Every error has a code, which is upper case; another one came from somewhere it should
    not.
    """
    for told in history.told.values():
        if told.error and not told.error.isupper():
            yield Anomaly(
                Kind.ERROR, f"call {told.op} raised {told.error}, which is no error of ours"
            )


def _operations(history: History) -> int:
    readers = {(scan.collection, scan.reader) for scan in history.scans}
    return len(history.asked) + len(readers) + len(history.states)
