"""Order in time, and order at all: whoever began later is later, and no two orders contradict each
other.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.judge.anomaly import Anomaly, Kind
from tests.chaos.judge.cycles import Edge, Node, Reason, find_cycles
from tests.chaos.judge.history import History


def judge_time(history: History) -> Iterator[Anomaly]:
    """What had ended when another began has the lower tick; a read holds what was acknowledged
    before it was asked for.
    """
    moments: list[tuple[int, int, int, str]] = []
    """(time, 0 for an end and 1 for a begin, tick, who)."""
    for op, tick in history.tick_of.items():
        moments.append((history.asked[op].at_ns, 1, tick - 1, f"call {op}"))
        if history.outcome(op) == "ok":
            moments.append((history.told[op].at_ns, 0, tick, f"call {op}"))
    reads = [
        (scan.asked_ns, scan.told_ns, scan.until_tick, scan.collection) for scan in history.scans
    ]
    reads += [
        (state.asked_ns, state.told_ns, state.tick, state.collection) for state in history.states
    ]
    for asked_ns, told_ns, tick, name in reads:
        moments.append((asked_ns, 1, tick, f"a read of {name}"))
        moments.append((told_ns, 0, tick, f"a read of {name}"))
    moments.sort(key=lambda moment: moment[:2])
    reached = 0
    reached_from = "nothing"
    for _, begins, tick, who in moments:
        if begins and tick < reached:
            yield Anomaly(
                Kind.ORDER,
                f"{who} at tick {tick} began after {reached_from} had ended at {reached}",
            )
        elif not begins and tick > reached:
            reached = tick
            reached_from = who


def judge_cycles(history: History) -> Iterator[Anomaly]:
    """Whatever the ticks say: the order in which rows were delivered and seen must be the order of
    something.
    """
    for cycle in find_cycles(_edges(history)):
        yield Anomaly(Kind.CYCLE, f"{cycle.name}: {' -> '.join(map(str, cycle.nodes[:8]))}")


def _edges(history: History) -> Iterator[Edge]:
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


def _version_orders(history: History) -> dict[str, list[int]]:
    """Return by collection the calls in the order in which their rows were first delivered to its
    longest reader.
    """
    delivered: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
    for scan in history.scans:
        ops = delivered[scan.collection, scan.reader]
        ops.update(
            dict.fromkeys(
                op for row in scan.rows if (op := history.writer.get(row.value)) is not None
            )
        )
    longest: dict[str, list[int]] = {}
    for (name, _), ops in delivered.items():
        if len(ops) > len(longest.get(name, [])):
            longest[name] = list(ops)
    return longest
