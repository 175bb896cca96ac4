"""What readers were given: each row in its place, everything in its range, nothing twice, calls
whole, offsets in order.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tests.chaos.journal import NO_VALUE, Scanned, Seen, Span, State
from tests.chaos.judge.anomaly import Anomaly, Kind
from tests.chaos.judge.history import History


def place_rows(history: History) -> Iterator[Anomaly]:
    """Give each value read its place in the log."""
    tick_at: dict[int, int] = {}
    for scan in history.scans:
        for row in scan.rows:
            if row.value != NO_VALUE:
                yield from _place(history, scan, row)
            if tick_at.setdefault(row.position, row.tick) != row.tick:
                yield Anomaly(
                    Kind.POSITION,
                    f"position {row.position} has ticks {tick_at[row.position]} and {row.tick}",
                )
    ascending = sorted(tick_at.items())
    for (position, tick), (later_position, later_tick) in pairwise(ascending):
        if tick >= later_tick:
            yield Anomaly(
                Kind.POSITION,
                f"position {later_position} has tick {later_tick}, {position} before it {tick}",
            )


def _place(history: History, scan: Scanned, row: Seen) -> Iterator[Anomaly]:
    op = history.writer.get(row.value)
    if op is None or history.put_of[row.value].collection != scan.collection:
        yield Anomaly(Kind.INVENTED, f"value {row.value} in {scan.collection} at tick {row.tick}")
        return
    before = history.place.setdefault(row.value, row)
    if (before.tick, before.position) != (row.tick, row.position):
        yield Anomaly(
            Kind.POSITION, f"value {row.value} is at {before} and at {row}, read by {scan.reader}"
        )
    told = history.told.get(op)
    if told is not None and told.outcome == "failed" and before is row:
        yield Anomaly(
            Kind.ABORTED, f"value {row.value} at tick {row.tick}: call {op} was told that it failed"
        )
    if told is not None and told.outcome == "ok" and told.tick not in {0, row.tick}:
        yield Anomaly(
            Kind.POSITION,
            f"value {row.value} is at tick {row.tick}, call {op} was told {told.tick}",
        )
    if told is not None and told.position not in {0, row.position}:
        yield Anomaly(
            Kind.POSITION,
            f"value {row.value} is at {row.position}, call {op} was told {told.position}",
        )
    if told is not None and told.outcome == "ok" and told.tick:
        history.tick_of.setdefault(op, told.tick)
    history.tick_of.setdefault(op, row.tick)


def settle_order(history: History) -> None:
    """List what is known to be in each collection's log: what was read by anybody, and what was
    acknowledged.
    """
    for op, told in history.told.items():
        if history.outcome(op) == "ok" and told.tick:
            history.tick_of.setdefault(op, told.tick)
    for op, asked in history.possible():
        tick = history.tick_of.get(op)
        if tick is None:
            continue
        for put in asked.puts:
            if put.value in history.place or history.outcome(op) == "ok":
                place = history.place.get(put.value)
                history.order.setdefault(put.collection, []).append(
                    (place.tick if place else tick, put.value)
                )
    for listed in history.order.values():
        listed.sort()


def judge_reads(history: History, *, gaps: bool) -> Iterator[Anomaly]:
    """Judge everything that was delivered; `gaps`: failed appends may leave row offsets unused."""
    yield from _readers(history)
    yield from _ranges(history)
    yield from _never_seen(history)
    yield from _removals_met(history)
    yield from _whole(history)
    yield from _offsets(history, gaps=gaps)
    yield from _told_offsets(history)
    reads: list[Scanned | State] = [*history.scans, *history.states]
    for read in reads:
        yield from (
            Anomaly(Kind.CHANGED, f"value {value} in {read.collection}") for value in read.wrong
        )


def _readers(history: History) -> Iterator[Anomaly]:
    """Within a reader ticks ascend, and nothing comes twice."""
    reached: dict[tuple[str, str], int] = {}
    seen: dict[tuple[str, str], set[int]] = defaultdict(set)
    for scan in history.scans:
        key = (scan.collection, scan.reader)
        tick = max(scan.after_tick, reached.get(key, 0))
        floor = tick
        for row in scan.rows:
            if row.tick < tick or row.tick <= floor:
                yield Anomaly(
                    Kind.BACKWARDS,
                    f"{scan.reader} saw tick {row.tick} of {scan.collection} after {tick}",
                )
            if row.value in seen[key] and row.value != NO_VALUE:
                yield Anomaly(
                    Kind.DUPLICATE,
                    f"{scan.reader} saw value {row.value} of {scan.collection} twice",
                )
            seen[key].add(row.value)
            tick = max(tick, row.tick)
        if tick > scan.until_tick:
            yield Anomaly(
                Kind.BACKWARDS,
                f"{scan.reader} was at tick {tick}, past the {scan.until_tick} it asked for",
            )
        reached[key] = max(tick, scan.until_tick)


def _ranges(history: History) -> Iterator[Anomaly]:
    """Every read of a range holds all that is known to be in it."""
    for scan in history.scans:
        listed = history.order.get(scan.collection, [])
        start = bisect_right(listed, scan.after_tick, key=lambda item: item[0])
        end = bisect_right(listed, scan.until_tick, key=lambda item: item[0])
        have = {row.value for row in scan.rows}
        for tick, value in listed[start:end]:
            if value not in have:
                lost = value not in history.place
                what = (
                    f"value {value} at tick {tick} of {scan.collection} is not in "
                    f"({scan.after_tick}, {scan.until_tick}]"
                )
                yield Anomaly(Kind.LOST if lost else Kind.SKIPPED, f"{what}, read by {scan.reader}")


def _never_seen(history: History) -> Iterator[Anomaly]:
    """An acknowledged write whose tick nobody knows must be in a whole read that came later."""
    whole: dict[str, int] = defaultdict(int)
    for scan in history.scans:
        if scan.after_tick == 0:
            whole[scan.collection] = max(whole[scan.collection], scan.asked_ns)
    for op, told in history.told.items():
        if history.outcome(op) == "ok" and not told.tick:
            for put in history.asked[op].puts:
                if put.value not in history.place and whole[put.collection] > told.at_ns:
                    yield Anomaly(
                        Kind.LOST,
                        f"value {put.value} of {put.collection}, acknowledged to call {op}",
                    )


def _removals_met(history: History) -> Iterator[Anomaly]:
    """Every read of a range that notes removals has those of acknowledged calls in it."""
    due: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    """By collection: tick, key and call."""
    for op, told in history.told.items():
        if history.outcome(op) == "ok" and told.tick:
            asked = history.asked[op]
            removed = {(drop.collection, drop.key) for drop in asked.drops}
            removed |= {(put.collection, put.key) for put in asked.puts if put.replace}
            for name, key in removed:
                due[name].append((told.tick, key, op))
    for listed in due.values():
        listed.sort()
    for scan in history.scans:
        if scan.removed is not None and scan.collection in due:
            have = {(removed.tick, key) for removed in scan.removed for key in removed.keys}
            listed = due[scan.collection]
            start = bisect_right(listed, scan.after_tick, key=lambda item: item[0])
            end = bisect_right(listed, scan.until_tick, key=lambda item: item[0])
            for tick, key, op in listed[start:end]:
                if (tick, key) not in have:
                    text = (
                        f"{scan.reader} of {scan.collection} was not told at tick {tick} that "
                        f"call {op} removed key {key}"
                    )
                    yield Anomaly(Kind.SKIPPED, text)


def _whole(history: History) -> Iterator[Anomaly]:
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
                    Kind.TORN,
                    f"call {op} is at tick {tick} without its value {put.value} of "
                    f"{put.collection}",
                )


def _covered(history: History) -> dict[str, list[tuple[int, int]]]:
    """Return by collection the ranges of ticks that were read, merged and ascending."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for scan in history.scans:
        ranges[scan.collection].append((scan.after_tick, scan.until_tick))
    return {name: _merged(sorted(found)) for name, found in ranges.items()}


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
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


def _offsets(history: History, *, gaps: bool) -> Iterator[Anomaly]:
    """Row offsets of a vchannel ascend with the ticks, none is used twice, and they leave no
    gap.
    """
    everywhere: dict[str, set[Span]] = defaultdict(set)
    for scan in history.scans:
        due: dict[str, int] = defaultdict(int) if scan.after_tick == 0 else {}
        for span in scan.spans:
            everywhere[span.vchannel].add(span)
            end = due[span.vchannel] if scan.after_tick == 0 else due.get(span.vchannel, span.first)
            if span.first > end and not gaps:
                yield Anomaly(
                    Kind.OFFSET,
                    f"{span.vchannel} goes on at {span.first} where {end} was due, at {span.tick}",
                )
            due[span.vchannel] = span.first + span.count
    for vchannel, spans in everywhere.items():
        for before, after in pairwise(sorted(spans, key=lambda span: (span.tick, span.first))):
            if after.first < before.first + before.count:
                yield Anomaly(Kind.OFFSET, f"{vchannel} has {before} and {after}, which overlap")


def _told_offsets(history: History) -> Iterator[Anomaly]:
    """What a call was told of its row offsets is what readers find at its tick."""
    found: dict[tuple[int, str], set[Span]] = defaultdict(set)
    for scan in history.scans:
        for span in scan.spans:
            found[span.tick, span.vchannel].add(span)
    for op, told in history.told.items():
        for span in told.spans:
            spans = found.get((span.tick, span.vchannel))
            if spans is None:
                continue  # what nobody has read is not judged here
            whole = Span(
                span.tick,
                span.vchannel,
                min(each.first for each in spans),
                sum(each.count for each in spans),
            )
            if whole != span:
                yield Anomaly(Kind.OFFSET, f"call {op} was told {span}, readers find {whole}")
