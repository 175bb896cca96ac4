"""A history in the form in which it is judged: calls by number, rows by value, and what is known of
each.

In: events. Out: a `History`. Every value is written once, so a row names its writer, and a log has
one order, so two reads of the same range can be compared with one list. `settle_deaths` decides
what the death of a process leaves open: a call that nobody has met by the next look never happened;
with a suffix lost, acknowledged ones may be gone, if all later ones are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.chaos.journal import (
    Asked,
    Below,
    Died,
    Event,
    Listed,
    Made,
    Outcome,
    Put,
    Scanned,
    Seen,
    State,
    Told,
)
from tests.chaos.judge.anomaly import Anomaly, Kind

FOREVER_NS = 1 << 62


@dataclass(slots=True)
class History:
    """What was asked, told and read, and what follows from that."""

    asked: dict[int, Asked] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    """By value: the call that wrote it."""
    put_of: dict[int, Put] = field(default_factory=dict)
    scans: list[Scanned] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    deaths: list[Died] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    listed: list[Listed] = field(default_factory=list)
    below: list[Below] = field(default_factory=list)
    place: dict[int, Seen] = field(default_factory=dict)
    """By value: where a reader met it first."""
    tick_of: dict[int, int] = field(default_factory=dict)
    """By call: the tick it was told, or was seen at."""
    order: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By collection: (tick, value) of everything that is known to be in the log, ascending."""
    settled: dict[int, Outcome] = field(default_factory=dict)
    """By call: the outcome as it turned out, where that is not what was told."""
    lost: int = 0
    """Acknowledged calls that are gone, as they may be."""

    def outcome(self, op: int) -> Outcome:
        """Return what is known of a call."""
        if op in self.settled:
            return self.settled[op]
        return self.told[op].outcome if op in self.told else "open"

    def ended_ns(self, op: int) -> int:
        """Return when it was certain that a call would change nothing any more."""
        if op in self.told and self.told[op].outcome != "open":
            return self.told[op].at_ns
        return self.died_ns(op)

    def died_ns(self, op: int) -> int:
        """Return when the process that a call was asked of, or was tried again by, ended."""
        last_ns = max(self.asked[op].at_ns, self.told[op].at_ns if op in self.told else 0)
        at = bisect_left(self.deaths, last_ns, key=lambda died: died.at_ns)
        return self.deaths[at].at_ns if at < len(self.deaths) else FOREVER_NS

    def possible(self) -> Iterator[tuple[int, Asked]]:
        """Yield the calls that happened, or may have."""
        return ((op, asked) for op, asked in self.asked.items() if self.outcome(op) != "failed")


def gather(events: Iterable[Event]) -> History:
    """Return the history of these events."""
    history = History()
    for event in events:
        match event:
            case Asked():
                _add_call(history, event)
            case Told():
                history.told[event.op] = event
            case Scanned():
                history.scans.append(event)
            case State():
                history.states.append(event)
            case Died():
                history.deaths.append(event)
            case Made():
                history.made.append(event)
            case Listed():
                history.listed.append(event)
            case Below():
                history.below.append(event)
    return history


def _add_call(history: History, asked: Asked) -> None:
    history.asked[asked.op] = asked
    for put in asked.puts:
        assert put.value not in history.writer, "a value is written by one call"
        history.writer[put.value] = asked.op
        history.put_of[put.value] = put


def lasting_values(history: History) -> frozenset[int]:
    """Return the values that nothing can have removed again."""
    removed: dict[tuple[str, int], set[int]] = {}
    cleared: set[tuple[str, str]] = set()
    for op, asked in history.possible():
        for name, key in [(drop.collection, drop.key) for drop in asked.drops]:
            removed.setdefault((name, key), set()).add(op)
        for put in asked.puts:
            if put.replace:
                removed.setdefault((put.collection, put.key), set()).add(op)
        cleared |= {(clear.collection, clear.partition) for clear in asked.clears}
    return frozenset(
        value
        for value, put in history.put_of.items()
        if not removed.get((put.collection, put.key), set()) - {history.writer[value]}
        and not cleared & {(put.collection, ""), (put.collection, put.partition)}
    )


def settle_deaths(history: History) -> Iterator[Anomaly]:
    """Decide what each death left open; call once readers' rows have their places."""
    if not history.deaths:
        return
    lasting = lasting_values(history)
    seen = {*history.place, *(value for state in history.states for value in state.values)}
    for died in history.deaths:
        if died.suffix_lost:
            yield from _settle_losses(history, died, lasting, seen)
    _settle_open(history, lasting, seen)


def _settle_losses(
    history: History, died: Died, lasting: frozenset[int], seen: set[int]
) -> Iterator[Anomaly]:
    """A suffix of what was acknowledged may be gone: nothing that survived is above anything that
    is missing.
    """
    told = [
        op
        for op in history.asked
        if history.outcome(op) == "ok"
        and history.told[op].at_ns < died.at_ns
        and _writes(history, op)
    ]
    survivors = [op for op in told if any(put.value in seen for put in history.asked[op].puts)]
    survived = max((history.told[op].tick for op in survivors), default=0)
    for op in set(told) - set(survivors):
        tick = history.told[op].tick
        missing = _is_missed(history, op, lasting, died.at_ns)
        if missing and tick and tick < survived:
            yield Anomaly(
                Kind.LOST,
                f"call {op} at tick {tick} is gone, and what came after it, at {survived}, is not: "
                "a hole",
            )
        elif not tick or tick > survived:
            history.settled[op] = "failed" if missing else "open"
            history.lost += missing


def _writes(history: History, op: int) -> bool:
    asked = history.asked[op]
    return bool(asked.puts or asked.drops or asked.clears)


def _is_missed(history: History, op: int, lasting: frozenset[int], after_ns: int) -> bool:
    """Whether a look that began after a moment should have shown something that the call wrote for
    good.
    """
    names = {put.collection for put in history.asked[op].puts if put.value in lasting}
    return any(state.asked_ns > after_ns and state.collection in names for state in history.states)


def _settle_open(history: History, lasting: frozenset[int], seen: set[int]) -> None:
    """What nobody has met after the death of its process never happened; of deletes, what they
    removed is met.
    """
    whole = [scan for scan in history.scans if scan.after_tick == 0]
    for op, asked in history.asked.items():
        if history.outcome(op) != "open" or any(put.value in seen for put in asked.puts):
            continue
        died_ns = history.died_ns(op)
        shows = {put.collection: True for put in asked.puts} or {
            drop.collection: False for drop in asked.drops
        }
        read = any(
            scan.asked_ns > died_ns
            and scan.collection in shows
            and (shows[scan.collection] or scan.removed is not None)
            for scan in whole
        )
        if read or _is_missed(history, op, lasting, died_ns):
            history.settled[op] = "failed"
