"""The judge of journals, judged: it passes what a log can produce, and finds each way in which a
log can lie.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.journal import Asked, Drop, Event, Put, Removed, Scanned, Seen, Span, State, Told
from tests.chaos.judge.anomaly import Kind
from tests.chaos.judge.verdict import check

NAMES = ("a", "b")


@dataclass
class Perfect:
    """A log that does all it promises, and the journal of its clients; `events` may be spoiled
    afterwards.
    """

    choose: random.Random
    events: list[Event] = field(default_factory=list)
    log: list[tuple[int, int, Asked]] = field(default_factory=list)
    now: int = 0
    tick: int = 0
    value: int = 0
    op: int = 0
    reached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))
    spans: list[Span] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NAMES, 0))

    def run(self, steps: int) -> "Perfect":
        for _ in range(steps):
            step = self.choose.choice(
                [self.write, self.write, self.write, self.scan, self.tail, self.state]
            )
            step()
        for name in NAMES:
            self.scan(name)
            self.state(name)
        return self

    def moment(self) -> int:
        self.now += self.choose.randint(1, 9)
        return self.now

    def write(self) -> None:
        self.op += 1
        puts = []
        drops = []
        for _ in range(self.choose.randint(1, 3)):
            self.value += 1
            name = self.choose.choice(NAMES)
            puts.append(
                Put(name, self.choose.randint(1, 5), self.value, replace=self.choose.random() < 0.3)
            )
        if self.choose.random() < 0.2:
            drops.append(Drop(self.choose.choice(NAMES), self.choose.randint(1, 5)))
        asked = Asked(self.op, "c", self.moment(), tuple(puts), tuple(drops))
        self.events.append(asked)
        outcome = self.choose.choice(["ok"] * 6 + ["failed", "there", "not there"])
        if outcome in {"ok", "there"}:
            self.tick += self.choose.randint(1, 5)
            self.log.append((self.tick, len(self.log) + 1, asked))
            for name in sorted({put.collection for put in puts}):
                count = sum(put.collection == name for put in puts)
                self.spans.append(Span(self.tick, name, self.ends[name], count))
                self.ends[name] += count
        if outcome == "ok":
            spans = tuple(span for span in self.spans if span.tick == self.tick)
            self.events.append(
                Told(self.op, self.moment(), "ok", self.tick, position=len(self.log), spans=spans)
            )
        elif outcome == "failed":
            self.events.append(Told(self.op, self.moment(), "failed"))

    def scan(self, name: str | None = None) -> None:
        self.read(name or self.choose.choice(NAMES), f"scan {self.now}", 0)

    def tail(self) -> None:
        name = self.choose.choice(NAMES)
        self.read(name, "tail", self.reached[name])
        self.reached[name] = self.tick

    def read(self, name: str, reader: str, after: int) -> None:
        asked_ns = self.moment()
        rows = [
            Seen(tick, position, put.value)
            for tick, position, asked in self.log
            for put in asked.puts
            if put.collection == name and tick > after
        ]
        removed = [
            Removed(tick, position, tuple(keys))
            for tick, position, asked in self.log
            if tick > after
            and (keys := [each.key for each in removals(asked) if each.collection == name])
        ]
        spans = tuple(span for span in self.spans if span.vchannel == name and span.tick > after)
        read = (tuple(rows), spans, tuple(removed))
        self.events.append(Scanned(name, reader, asked_ns, self.moment(), after, self.tick, *read))

    def state(self, name: str | None = None) -> None:
        name = name or self.choose.choice(NAMES)
        rows: dict[int, set[int]] = {}
        for _, _, asked in self.log:
            for drop in asked.drops:
                if drop.collection == name:
                    rows.pop(drop.key, None)
            for put in asked.puts:
                if put.collection == name:
                    if put.replace:
                        rows.pop(put.key, None)
                    rows.setdefault(put.key, set()).add(put.value)
        values = sorted(value for found in rows.values() for value in found)
        self.events.append(State(name, self.moment(), self.moment(), self.tick, tuple(values)))


def removals(asked: Asked) -> list[Put | Drop]:
    return [*asked.drops, *(put for put in asked.puts if put.replace)]


@given(seed=st.integers(0, 1 << 32), steps=st.integers(0, 60))
def test_what_a_perfect_log_produces_has_no_anomaly(seed: int, steps: int) -> None:
    assert check(Perfect(random.Random(seed)).run(steps).events) == []


# --- lies -----------------------------------------------------------------------------------------


def simple() -> list[Event]:
    """Three writes of two rows, each in both collections, read whole; then a second reader and the
    states.
    """
    events: list[Event] = []
    for op in (1, 2, 3):
        puts = (Put("a", op, 10 * op), Put("b", op, 10 * op + 1))
        events += [Asked(op, "c", 10 * op, puts), Told(op, 10 * op + 1, "ok", 100 * op)]
    events += [Asked(4, "c", 40, (Put("a", 4, 40),)), Told(4, 41, "failed")]
    for at, reader in ((50, "r"), (60, "s")):
        for column, name in enumerate(NAMES):
            rows = tuple(Seen(100 * op, op, 10 * op + column) for op in (1, 2, 3))
            events.append(Scanned(name, reader, at, at + 1, 0, 300, rows))
    events += [State("a", 70, 71, 300, (10, 20, 30)), State("b", 70, 71, 300, (11, 21, 31))]
    return events


def scans(events: list[Event], name: str = "a", reader: str | None = None) -> list[int]:
    return [
        at
        for at, event in enumerate(events)
        if isinstance(event, Scanned)
        and event.collection == name
        and reader in (None, event.reader)
    ]


def change_rows(
    change: Callable[[list[Seen]], list[Seen]], name: str = "a", reader: str | None = None
) -> list[Event]:
    events = simple()
    for at in scans(events, name, reader):
        scan = events[at]
        assert isinstance(scan, Scanned)
        events[at] = msgspec.structs.replace(scan, rows=tuple(change(list(scan.rows))))
    return events


def change_told(op: int, **changes: object) -> list[Event]:
    return [
        msgspec.structs.replace(event, **changes)
        if isinstance(event, Told) and event.op == op
        else event
        for event in simple()
    ]


def with_spans(told: Span, *found: Span) -> list[Event]:
    events = change_told(2, spans=(told,))
    for at in scans(events):
        events[at] = msgspec.structs.replace(events[at], spans=found)
    return events


def with_removals(*removed: Removed) -> list[Event]:
    """A fourth write, which removes a key at tick 350, and a reader of its range."""
    asked = Asked(5, "c", 75, drops=(Drop("a", 9),))
    told = Told(5, 76, "ok", 350)
    return [*simple(), asked, told, Scanned("a", "t", 80, 81, 300, 400, (), removed=removed)]


def replaced_state(values: tuple[int, ...]) -> list[Event]:
    events = simple()
    events[-2] = State("a", 70, 71, 300, values)
    return events


LIES: dict[str, tuple[list[Event], Kind]] = {
    "an acknowledged row is gone": (change_rows(lambda rows: rows[:1] + rows[2:]), Kind.LOST),
    "the last acknowledged row is gone": (change_rows(lambda rows: rows[:-1]), Kind.LOST),
    "one reader misses a row": (
        change_rows(lambda rows: rows[:1] + rows[2:], reader="s"),
        Kind.SKIPPED,
    ),
    "a row comes twice": (change_rows(lambda rows: [*rows, rows[-1]]), Kind.DUPLICATE),
    "a row comes twice, at another tick": (
        change_rows(lambda rows: [*rows, Seen(300, 4, 10)]),
        Kind.DUPLICATE,
    ),
    "a refused row appears": (change_rows(lambda rows: [*rows, Seen(300, 3, 40)]), Kind.ABORTED),
    "a row nobody wrote appears": (
        change_rows(lambda rows: [*rows, Seen(300, 3, 99)]),
        Kind.INVENTED,
    ),
    "a row moved": (
        change_rows(lambda rows: [*rows[:2], Seen(299, 3, 30)], reader="s"),
        Kind.POSITION,
    ),
    "positions against ticks": (
        change_rows(lambda rows: [Seen(100, 2, 10), Seen(200, 1, 20), *rows[2:]]),
        Kind.POSITION,
    ),
    "acknowledged at another tick": (change_told(2, tick=201), Kind.POSITION),
    "acknowledged at another place": (change_told(2, position=3), Kind.POSITION),
    "acknowledged with offsets of another": (
        with_spans(Span(200, "v", 1, 1), Span(200, "v", 2, 1)),
        Kind.OFFSET,
    ),
    "acknowledged with half of its offsets": (
        with_spans(Span(200, "v", 1, 1), Span(200, "v", 1, 1), Span(200, "v", 2, 1)),
        Kind.OFFSET,
    ),
    "a removal of which a reader is not told": (with_removals(), Kind.SKIPPED),
    "a removal at another tick": (with_removals(Removed(351, 4, (9,))), Kind.SKIPPED),
    "ticks go back": (change_rows(lambda rows: [rows[1], rows[0], rows[2]]), Kind.BACKWARDS),
    "a reader goes past its end": (
        change_rows(lambda rows: [*rows[:2], Seen(301, 3, 30)]),
        Kind.BACKWARDS,
    ),
    "half of a transaction": (change_rows(lambda rows: rows[:1] + rows[2:], name="b"), Kind.TORN),
    "a transaction at two ticks": (
        change_rows(lambda rows: [*rows[:2], Seen(299, 3, 31)], name="b"),
        Kind.TORN,
    ),
    "a state without a row": (replaced_state((10, 30)), Kind.STATE),
    "a state with a row too many": (replaced_state((10, 20, 30, 40)), Kind.STATE),
    "a state with a row twice": (replaced_state((10, 20, 20, 30)), Kind.STATE),
    "two collections disagree about the order": (
        change_rows(lambda rows: [Seen(100, 1, 21), Seen(200, 2, 11), rows[2]], name="b"),
        Kind.CYCLE,
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_found(lie: str) -> None:
    events, kind = LIES[lie]
    assert kind in {anomaly.kind for anomaly in check(events)}


def test_the_truth_has_no_anomaly() -> None:
    assert check(simple()) == []


def test_a_write_of_several_bodies_is_told_of_their_offsets_together() -> None:
    assert check(with_spans(Span(200, "v", 1, 3), Span(200, "v", 1, 1), Span(200, "v", 2, 2))) == []
    assert check(with_removals(Removed(350, 4, (9,)))) == []


def test_a_write_that_ended_before_another_began_has_the_lower_tick() -> None:
    events = simple()
    events[0], events[2] = (
        msgspec.structs.replace(events[0], at_ns=25),
        msgspec.structs.replace(events[2], at_ns=5),
    )
    events[1], events[3] = (
        msgspec.structs.replace(events[1], at_ns=26),
        msgspec.structs.replace(events[3], at_ns=6),
    )
    assert {anomaly.kind for anomaly in check(events)} == {Kind.ORDER}


def test_a_read_holds_what_was_acknowledged_before_it_was_asked_for() -> None:
    events = change_rows(lambda rows: rows[:2])
    at = scans(events)[0]
    scan = events[at]
    assert isinstance(scan, Scanned)
    events[at] = msgspec.structs.replace(scan, until_tick=250)
    assert Kind.ORDER in {anomaly.kind for anomaly in check(events)}


def test_an_open_call_may_have_happened_or_not_but_not_twice() -> None:
    there = [event for event in simple() if not (isinstance(event, Told) and event.op == 3)]
    assert check(there) == []
    absent = [
        msgspec.structs.replace(event, rows=event.rows[:2]) if isinstance(event, Scanned) else event
        for event in there
    ]
    absent[-2:] = [State("a", 70, 71, 300, (10, 20)), State("b", 70, 71, 300, (11, 21))]
    assert check(absent) == []
    twice = [
        msgspec.structs.replace(event, rows=(*event.rows, *event.rows[2:]))
        if isinstance(event, Scanned)
        else event
        for event in there
    ]
    assert Kind.DUPLICATE in {anomaly.kind for anomaly in check(twice)}


def test_an_acknowledged_row_without_a_known_tick_is_missed_too() -> None:
    events = [event for event in change_rows(lambda rows: rows[:2]) if not isinstance(event, State)]
    events = [
        msgspec.structs.replace(e, tick=0) if isinstance(e, Told) and e.op == 3 else e
        for e in events
    ]
    assert Kind.LOST in {anomaly.kind for anomaly in check(events)}
