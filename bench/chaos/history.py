"""The judge of a journal: is there an order of the calls that explains everything that was told and read?

In: the events of any number of clients and processes, on one machine's monotonic clock. Out: anomalies, none when all is
well. Linear in the history, but for sorting. What makes that possible: every value is written once, so a row names its
writer, and a log has one order, so two reads of the same range can be compared with one list.

A call that failed never happened, one that is open happened once or not at all, one that was acknowledged happened once.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from bench.chaos.cycles import Edge, Node, Reason, find_cycles
from bench.chaos.journal import Asked, Event, Scanned, Seen, State, Told


class Kind(Enum):
    """What is wrong."""

    LOST = "lost write"
    DUPLICATE = "duplicate"
    ABORTED = "aborted read"
    INVENTED = "read of what nobody wrote"
    POSITION = "inconsistent position"
    SKIPPED = "skipped read"
    BACKWARDS = "backwards read"
    TORN = "torn transaction"
    STATE = "wrong state"
    ORDER = "real-time order"
    CYCLE = "cycle"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One thing that must not be, with the values, ticks and calls to look at."""

    kind: Kind
    text: str


@dataclass(slots=True)
class _History:
    asked: dict[int, Asked] = field(default_factory=dict)
    told: dict[int, Told] = field(default_factory=dict)
    writer: dict[int, int] = field(default_factory=dict)
    collection_of: dict[int, str] = field(default_factory=dict)
    scans: list[Scanned] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    place: dict[int, Seen] = field(default_factory=dict)
    tick_of: dict[int, int] = field(default_factory=dict)
    """By call: the tick it was told, or was seen at."""
    order: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By collection: (tick, value) of everything that is known to be in the log, ascending."""

    def outcome(self, op: int) -> str:
        told = self.told.get(op)
        return told.outcome if told else "open"


def check(events: Iterable[Event]) -> list[Anomaly]:
    """Return everything that is wrong with a history, by kind."""
    history = _gather(events)
    found = [*_placed(history)]
    _settle_order(history)
    for part in (_readers, _ranges, _whole, _states, _real_time, _cycles):
        found += part(history)
    return found


def _gather(events: Iterable[Event]) -> _History:
    history = _History()
    for event in events:
        match event:
            case Asked():
                history.asked[event.op] = event
                for put in event.puts:
                    assert put.value not in history.writer, "a value is written by one call"
                    history.writer[put.value] = event.op
                    history.collection_of[put.value] = put.collection
            case Told():
                history.told[event.op] = event
            case Scanned():
                history.scans.append(event)
            case State():
                history.states.append(event)
    return history


# --- what each row says by itself --------------------------------------------------------------------------------------


def _placed(history: _History) -> Iterator[Anomaly]:
    """Give each value read its place in the log."""
    tick_at: dict[int, int] = {}
    for scan in history.scans:
        for row in scan.rows:
            yield from _row(history, scan, row)
            if tick_at.setdefault(row.position, row.tick) != row.tick:
                yield Anomaly(
                    Kind.POSITION, f"position {row.position} has ticks {tick_at[row.position]} and {row.tick}"
                )
    ascending = sorted(tick_at.items())
    for (position, tick), (later_position, later_tick) in pairwise(ascending):
        if tick >= later_tick:
            yield Anomaly(
                Kind.POSITION, f"position {later_position} has tick {later_tick}, {position} before it {tick}"
            )


def _row(history: _History, scan: Scanned, row: Seen) -> Iterator[Anomaly]:
    op = history.writer.get(row.value)
    if op is None or history.collection_of[row.value] != scan.collection:
        yield Anomaly(Kind.INVENTED, f"value {row.value} in {scan.collection} at tick {row.tick}")
        return
    before = history.place.setdefault(row.value, row)
    if (before.tick, before.position) != (row.tick, row.position):
        yield Anomaly(Kind.POSITION, f"value {row.value} is at {before} and at {row}, read by {scan.reader}")
    told = history.told.get(op)
    if told is not None and told.outcome == "failed" and before is row:
        yield Anomaly(Kind.ABORTED, f"value {row.value} at tick {row.tick}: call {op} was told that it failed")
    if told is not None and told.outcome == "ok" and told.tick not in {0, row.tick}:
        yield Anomaly(Kind.POSITION, f"value {row.value} is at tick {row.tick}, call {op} was told {told.tick}")
    if told is not None and told.outcome == "ok" and told.tick:
        history.tick_of.setdefault(op, told.tick)
    history.tick_of.setdefault(op, row.tick)


def _settle_order(history: _History) -> None:
    """List what is known to be in each collection's log: what was read by anybody, and what was acknowledged."""
    for op, told in history.told.items():
        if told.outcome == "ok" and told.tick:
            history.tick_of.setdefault(op, told.tick)
    for op, asked in history.asked.items():
        tick = history.tick_of.get(op)
        if tick is None or history.outcome(op) == "failed":
            continue
        for put in asked.puts:
            if put.value in history.place or history.outcome(op) == "ok":
                place = history.place.get(put.value)
                history.order.setdefault(put.collection, []).append((place.tick if place else tick, put.value))
    for listed in history.order.values():
        listed.sort()


# --- what readers were given -------------------------------------------------------------------------------------------


def _readers(history: _History) -> Iterator[Anomaly]:
    """Within a reader ticks ascend, and nothing comes twice."""
    reached: dict[tuple[str, str], int] = {}
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    for scan in history.scans:
        key = (scan.collection, scan.reader)
        tick = max(scan.after_tick, reached.get(key, 0))
        floor = tick
        for row in scan.rows:
            if row.tick < tick or row.tick <= floor:
                yield Anomaly(Kind.BACKWARDS, f"{scan.reader} saw tick {row.tick} of {scan.collection} after {tick}")
            if row.value in seen[key]:
                yield Anomaly(Kind.DUPLICATE, f"{scan.reader} saw value {row.value} of {scan.collection} twice")
            seen[key].add(row.value)
            tick = max(tick, row.tick)
        if tick > scan.until_tick:
            yield Anomaly(Kind.BACKWARDS, f"{scan.reader} was at tick {tick}, past the {scan.until_tick} it asked for")
        reached[key] = max(tick, scan.until_tick)


def _ranges(history: _History) -> Iterator[Anomaly]:
    """Every read of a range holds all that is known to be in it."""
    for scan in history.scans:
        listed = history.order.get(scan.collection, [])
        start = bisect_right(listed, scan.after_tick, key=lambda item: item[0])
        end = bisect_right(listed, scan.until_tick, key=lambda item: item[0])
        have = {row.value for row in scan.rows}
        for tick, value in listed[start:end]:
            if value not in have:
                lost = value not in history.place
                what = f"value {value} at tick {tick} of {scan.collection} is not in ({scan.after_tick}, {scan.until_tick}]"
                yield Anomaly(Kind.LOST if lost else Kind.SKIPPED, f"{what}, read by {scan.reader}")
    yield from _never_seen(history)


def _never_seen(history: _History) -> Iterator[Anomaly]:
    """An acknowledged write whose tick nobody knows must be in a whole read that came later."""
    whole: dict[str, int] = defaultdict(int)
    for scan in history.scans:
        if scan.after_tick == 0:
            whole[scan.collection] = max(whole[scan.collection], scan.asked_ns)
    for op, told in history.told.items():
        if told.outcome == "ok" and not told.tick:
            for put in history.asked[op].puts:
                if put.value not in history.place and whole[put.collection] > told.at_ns:
                    yield Anomaly(Kind.LOST, f"value {put.value} of {put.collection}, acknowledged to call {op}")


def _whole(history: _History) -> Iterator[Anomaly]:
    """A call's rows are all there, at one tick, or none is."""
    covered = _covered(history)
    for op, asked in history.asked.items():
        places = [history.place.get(put.value) for put in asked.puts]
        ticks = {place.tick for place in places if place is not None}
        if not ticks:
            continue
        if len(ticks) > 1:
            yield Anomaly(Kind.TORN, f"call {op} is at ticks {sorted(ticks)}")
        tick = min(ticks)
        for put, place in zip(asked.puts, places, strict=True):
            if place is None and _is_covered(covered.get(put.collection, []), tick):
                yield Anomaly(
                    Kind.TORN, f"call {op} is at tick {tick} without its value {put.value} of {put.collection}"
                )


def _covered(history: _History) -> dict[str, list[tuple[int, int]]]:
    """Return by collection the ranges of ticks that were read, merged and ascending."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for scan in history.scans:
        ranges[scan.collection].append((scan.after_tick, scan.until_tick))
    return {name: _merged(sorted(found)) for name, found in ranges.items()}


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for after, until in ranges:
        if merged and after <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(until, merged[-1][1]))
        else:
            merged.append((after, until))
    return merged


def _is_covered(ranges: list[tuple[int, int]], tick: int) -> bool:
    at = bisect_right(ranges, tick - 1, key=lambda item: item[0]) - 1
    return at >= 0 and ranges[at][0] < tick <= ranges[at][1]


# --- states ------------------------------------------------------------------------------------------------------------


def _states(history: _History) -> Iterator[Anomaly]:
    """A state is what the writes up to its tick leave.

    An open call that no reader has met may have happened at any tick: its rows, and keys it may have cleared, say nothing.
    """
    changes: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    unknown: set[int] = set()
    uncertain: set[tuple[str, int]] = set()
    for op, asked in history.asked.items():
        tick = history.tick_of.get(op)
        if tick is None:
            if history.outcome(op) != "failed":
                unknown |= {put.value for put in asked.puts}
                uncertain |= {(put.collection, put.key) for put in asked.puts if put.replace}
                uncertain |= {(drop.collection, drop.key) for drop in asked.drops}
            continue
        position = min(
            (history.place[put.value].position for put in asked.puts if put.value in history.place), default=0
        )
        for name in {put.collection for put in asked.puts} | {drop.collection for drop in asked.drops}:
            changes[name].append((tick, position, op))
    for name in {state.collection for state in history.states}:
        wanted = sorted((state for state in history.states if state.collection == name), key=lambda state: state.tick)
        yield from _replayed(history, name, sorted(changes[name]), wanted, uncertain, unknown)


def _replayed(
    history: _History,
    name: str,
    changes: list[tuple[int, int, int]],
    wanted: list[State],
    uncertain: set[tuple[str, int]],
    unknown: set[int],
) -> Iterator[Anomaly]:
    rows: dict[int, set[int]] = defaultdict(set)
    key_of: dict[int, int] = {}
    at = 0
    for state in wanted:
        while at < len(changes) and changes[at][0] <= state.tick:
            asked = history.asked[changes[at][2]]
            for drop in asked.drops:
                if drop.collection == name:
                    rows.pop(drop.key, None)
            for put in asked.puts:
                if put.collection == name:
                    key_of[put.value] = put.key
                    if put.replace:
                        rows.pop(put.key, None)
                    rows[put.key].add(put.value)
            at += 1
        expected = {value for key, values in rows.items() if (name, key) not in uncertain for value in values}
        found = [
            value for value in state.values if (name, key_of.get(value, -1)) not in uncertain and value not in unknown
        ]
        if sorted(expected) != sorted(found):
            missing, extra = expected - set(found), set(found) - expected
            text = f"{name} at tick {state.tick}: missing {sorted(missing)[:5]}, too many {sorted(extra)[:5]}"
            yield Anomaly(Kind.STATE, text if missing or extra else f"{name} at tick {state.tick} has rows twice")


# --- time --------------------------------------------------------------------------------------------------------------


def _real_time(history: _History) -> Iterator[Anomaly]:
    """What had ended when another began has the lower tick; a read holds what was acknowledged before it was asked for."""
    moments: list[tuple[int, int, int, str]] = []
    """(time, 0 for an end and 1 for a begin, tick, who)."""
    for op, tick in history.tick_of.items():
        moments.append((history.asked[op].at_ns, 1, tick - 1, f"call {op}"))
        if history.outcome(op) == "ok":
            moments.append((history.told[op].at_ns, 0, tick, f"call {op}"))
    reads = [(scan.asked_ns, scan.told_ns, scan.until_tick, scan.collection) for scan in history.scans]
    reads += [(state.asked_ns, state.told_ns, state.tick, state.collection) for state in history.states]
    for asked_ns, told_ns, tick, name in reads:
        moments.append((asked_ns, 1, tick, f"a read of {name}"))
        moments.append((told_ns, 0, tick, f"a read of {name}"))
    moments.sort(key=lambda moment: moment[:2])
    reached, reached_from = 0, "nothing"
    for _, begins, tick, who in moments:
        if begins and tick < reached:
            yield Anomaly(Kind.ORDER, f"{who} at tick {tick} began after {reached_from} had ended at {reached}")
        elif not begins and tick > reached:
            reached, reached_from = tick, who


# --- cycles ------------------------------------------------------------------------------------------------------------


def _cycles(history: _History) -> Iterator[Anomaly]:
    """Whatever the ticks say: the order in which rows were delivered and seen must be the order of something."""
    for cycle in find_cycles(_edges(history)):
        yield Anomaly(Kind.CYCLE, f"{cycle.name}: {' -> '.join(map(str, cycle.nodes[:8]))}")


def _edges(history: _History) -> Iterator[Edge]:
    versions = _version_orders(history)
    for order in versions.values():
        for before, after in pairwise(order):
            yield Edge(before, after, Reason.WRITE_WRITE)
    index = {name: {op: at for at, op in enumerate(order)} for name, order in versions.items()}
    last: dict[tuple[str, str], int] = {}
    for scan in history.scans:
        reader = (scan.collection, scan.reader)
        known = index.get(scan.collection, {})
        ops = [known[op] for row in scan.rows if (op := history.writer.get(row.value)) in known]
        if not ops and reader not in last and scan.after_tick:
            continue  # nothing says where in the order this reader is
        at = last[reader] = max([*ops, last.get(reader, -1)])
        yield from _read_edges(("read", scan.until_tick), versions.get(scan.collection, []), at)


def _read_edges(read: Node, order: list[int], at: int) -> Iterator[Edge]:
    if at >= 0:
        yield Edge(order[at], read, Reason.WRITE_READ)
    if at + 1 < len(order):
        yield Edge(read, order[at + 1], Reason.READ_WRITE)


def _version_orders(history: _History) -> dict[str, list[int]]:
    """Return by collection the calls in the order in which their rows were first delivered to its longest reader."""
    delivered: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
    for scan in history.scans:
        ops = delivered[scan.collection, scan.reader]
        ops.update(dict.fromkeys(op for row in scan.rows if (op := history.writer.get(row.value)) is not None))
    longest: dict[str, list[int]] = {}
    for (name, _), ops in delivered.items():
        if len(ops) > len(longest.get(name, [])):
            longest[name] = list(ops)
    return longest
