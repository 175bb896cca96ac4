"""Current rows and what there is: a state is what the writes up to its tick leave, and what exists
is listed.

A call without a known tick may have happened at any: the keys it touches are uncertain, and hold
what is known, or what that call left. What drops of partitions remove is decided by time: rows
written before one was asked for are gone from every state asked for after it was told; what
overlaps with it may be there or not.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.chaos.journal import Put, Removed, Scanned, State
from tests.chaos.judge.anomaly import Anomaly, Kind
from tests.chaos.judge.history import FOREVER_NS, History, lasting_values

SHOWN_MAX = 5
NOBODYS = -1


@dataclass(slots=True)
class _Collection:
    """What the calls do to one collection."""

    changes: list[tuple[int, int, int]] = field(default_factory=list)
    """Tick, position and call, of what is known to have happened; no call for removals that readers
    met and nobody answers for."""
    removals: dict[int, Removed] = field(default_factory=dict)
    """By tick: these."""
    unknown: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By key: values that calls without a known tick may have put there."""
    uncertain: set[int] = field(default_factory=set)
    """Keys whose rows such a call may have removed."""
    droppable: set[int] = field(default_factory=set)
    """Keys among these that may have been left empty."""
    added: set[int] = field(default_factory=set)
    """Keys to which rows were added without replacing."""
    clears: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By partition, "" for all: (asked, told or for ever) of what may have dropped it."""
    clears_over: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """For each of these: when it was certain to change nothing any more."""


def judge_states(history: History) -> Iterator[Anomaly]:
    """Judge every state."""
    collections = _collections(history)
    yield from _removals(history, collections)
    for name in {state.collection for state in history.states}:
        states = sorted(
            (state for state in history.states if state.collection == name),
            key=lambda state: state.tick,
        )
        yield from _replayed(history, name, collections[name], states)
    yield from _settled_rows(history, collections)
    yield from _existence(history)


def _collections(history: History) -> dict[str, _Collection]:
    collections: dict[str, _Collection] = defaultdict(_Collection)
    for op, asked in history.possible():
        places = (
            history.place[put.value].position for put in asked.puts if put.value in history.place
        )
        tick = history.tick_of.get(op)
        position = min(places, default=0)
        names = {put.collection for put in asked.puts} | {drop.collection for drop in asked.drops}
        for name in names if tick else ():
            collections[name].changes.append((tick or 0, position, op))
        for put in asked.puts:
            of = collections[put.collection]
            if not put.replace:
                of.added.add(put.key)
            if not tick:
                of.unknown[put.key].add(put.value)
                of.uncertain |= {put.key} if put.replace else set()
        for drop in asked.drops if not tick else ():
            collections[drop.collection].uncertain.add(drop.key)
            collections[drop.collection].droppable.add(drop.key)
        for clear in asked.clears:
            told_ns = history.told[op].at_ns if history.outcome(op) == "ok" else FOREVER_NS
            collections[clear.collection].clears[clear.partition].append((asked.at_ns, told_ns))
            collections[clear.collection].clears_over[clear.partition].append(history.ended_ns(op))
    return collections


def _removals(history: History, collections: dict[str, _Collection]) -> Iterator[Anomaly]:
    """Take in what readers were told is removed, by calls whose tick is not known."""
    ticks = {history.tick_of[op] for op, _ in history.possible() if op in history.tick_of}
    asked = {
        (drop.collection, drop.key)
        for op, call in history.asked.items()
        for drop in call.drops
        if not _has_failed(history, op)
    }
    for scan in history.scans:
        of = collections[scan.collection]
        for removed in scan.removed or ():
            if removed.tick in ticks or removed.tick in of.removals:
                continue
            of.removals[removed.tick] = removed
            of.changes.append((removed.tick, removed.position, NOBODYS))
            for key in removed.keys:
                if (scan.collection, key) not in asked:
                    text = (
                        f"key {key} of {scan.collection} is removed at tick {removed.tick}, "
                        "which nobody asked for"
                    )
                    yield Anomaly(Kind.INVENTED, text)


def _has_failed(history: History, op: int) -> bool:
    return op in history.told and history.told[op].outcome == "failed"


def _replayed(
    history: History, name: str, of: _Collection, states: Sequence[State]
) -> Iterator[Anomaly]:
    changes = sorted(of.changes)
    rows: dict[int, set[int]] = defaultdict(set)
    at = 0
    for state in states:
        while at < len(changes) and changes[at][0] <= state.tick:
            tick, _, op = changes[at]
            if op == NOBODYS:
                for key in of.removals[tick].keys:
                    rows.pop(key, None)
            else:
                _apply(history, name, op, rows)
            at += 1
        expected = {key: set(values) for key, values in rows.items() if values}
        found: dict[int, set[int]] = defaultdict(set)
        for value in state.values:
            put = history.put_of.get(value)
            found[put.key if put and put.collection == name else -1].add(value)
        doubtful = _clear(history, of, state, expected)
        if len(set(state.values)) < len(state.values):
            yield Anomaly(Kind.STATE, f"{name} at tick {state.tick} has rows twice")
        for key in sorted({*expected, *found}):
            wrong = _wrong(of, key, expected.get(key, set()) - doubtful, found[key] - doubtful)
            if wrong:
                yield Anomaly(Kind.STATE, f"{name} at tick {state.tick}, key {key}: {wrong}")


def _apply(history: History, name: str, op: int, rows: dict[int, set[int]]) -> None:
    asked = history.asked[op]
    for drop in asked.drops:
        if drop.collection == name:
            rows.pop(drop.key, None)
    for put in asked.puts:
        if put.collection == name:
            if put.replace:
                rows.pop(put.key, None)
            rows[put.key].add(put.value)


def _wrong(of: _Collection, key: int, expected: set[int], found: set[int]) -> str:
    """Return what is wrong with the rows of a key, "" when nothing is."""
    unknown = of.unknown.get(key, set())
    missing = sorted(expected - found)
    extra = sorted(found - expected - unknown)
    if key in of.uncertain:
        missing = missing if not found and key not in of.droppable and key not in of.added else []
        if key not in of.added and len(found) > 1:
            return f"has rows {sorted(found)[:SHOWN_MAX]}, and each upsert replaces"
    return (
        f"missing {missing[:SHOWN_MAX]}, too many {extra[:SHOWN_MAX]}" if missing or extra else ""
    )


def _clear(
    history: History, of: _Collection, state: State, expected: dict[int, set[int]]
) -> set[int]:
    """Take out what drops have removed, and return the values of which that cannot be told."""
    doubtful: set[int] = set()
    if not of.clears:
        return doubtful
    for value in {value for values in expected.values() for value in values} | set(state.values):
        put = history.put_of.get(value)
        if put is None or put.collection != state.collection:
            continue
        gone = _is_cleared(history, of, put, state)
        if gone is None:
            doubtful.add(value)
        elif gone:
            expected.get(put.key, set()).discard(value)
    return doubtful


def _is_cleared(history: History, of: _Collection, put: Put, state: State) -> bool | None:
    """Whether a row is gone with its partition or collection; None when that may be or not."""
    op = history.writer[put.value]
    asked_ns = history.asked[op].at_ns
    ended_ns = history.ended_ns(op)
    gone: bool | None = False
    for partition in {"", put.partition}:
        for (clear_asked, clear_told), over in zip(
            of.clears[partition], of.clears_over[partition], strict=True
        ):
            if clear_asked > state.told_ns or over < asked_ns:
                continue
            if ended_ns < clear_asked and clear_told < state.asked_ns:
                return True
            gone = None
    return gone


def _settled_rows(history: History, collections: dict[str, _Collection]) -> Iterator[Anomaly]:
    """A call whose process died happened or not: what it wrote for good is in every later state, or
    in none.
    """
    lasting = lasting_values(history) - _met_removed(history, collections)
    for op, asked in history.asked.items():
        values = [put for put in asked.puts if put.value in lasting]
        died_ns = history.died_ns(op)
        if history.outcome(op) != "open" or not values or died_ns == FOREVER_NS:
            continue
        shown = [
            put.value in state.values
            for state in history.states
            if state.asked_ns > died_ns
            for put in values
            if put.collection == state.collection
        ]
        if any(shown) and not all(shown):
            yield Anomaly(Kind.TORN, f"call {op} is there in part, or only some of the time")


def _met_removed(history: History, collections: dict[str, _Collection]) -> set[int]:
    """Return the values of keys that readers met as removed by a delete that died unanswered:
    nobody's, yet it happened.
    """
    keys = {
        (name, key)
        for name, of in collections.items()
        for removed in of.removals.values()
        for key in removed.keys
    }
    return {value for value, put in history.put_of.items() if (put.collection, put.key) in keys}


def _existence(history: History) -> Iterator[Anomaly]:
    """What was made and not dropped is listed; what was dropped is neither listed nor read."""
    asked_ns, told_ns = _drops(history)
    losses = max((died.at_ns for died in history.deaths if died.suffix_lost), default=0)
    for listed in history.listed:
        due = {made.collection for made in history.made if losses < made.at_ns < listed.asked_ns}
        due |= {put.collection for put in _acknowledged(history, listed.asked_ns)}
        for name in sorted(due - {*listed.collections}):
            if asked_ns.get(name, FOREVER_NS) > listed.asked_ns:
                yield Anomaly(Kind.LOST, f"collection {name} was made and is not there")
        for name in listed.collections:
            if told_ns.get(name, FOREVER_NS) < listed.asked_ns:
                yield Anomaly(Kind.STATE, f"collection {name} was dropped and is there")
    reads: list[Scanned | State] = [*history.scans, *history.states]
    for read in reads:
        if told_ns.get(read.collection, FOREVER_NS) < read.asked_ns:
            yield Anomaly(
                Kind.STATE, f"collection {read.collection} was dropped, and could be read"
            )


def _acknowledged(history: History, before_ns: int) -> Iterator[Put]:
    for op, told in history.told.items():
        if history.outcome(op) == "ok" and told.at_ns < before_ns:
            yield from history.asked[op].puts


def _drops(history: History) -> tuple[dict[str, int], dict[str, int]]:
    """Return when drops of collections were first asked for, and when first told, by collection."""
    asked_ns: dict[str, int] = {}
    told_ns: dict[str, int] = {}
    for op, asked in history.possible():
        for name in [clear.collection for clear in asked.clears if not clear.partition]:
            asked_ns[name] = min(asked_ns.get(name, FOREVER_NS), asked.at_ns)
            if history.outcome(op) == "ok":
                told_ns[name] = min(told_ns.get(name, FOREVER_NS), history.told[op].at_ns)
    return asked_ns, told_ns
