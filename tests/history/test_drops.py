"""Partitions and collections that come and go, processes that die, and what may be lost then:
judged by time.
"""

import pytest

from tests.chaos.journal import (
    Asked,
    Clear,
    Died,
    Drop,
    Event,
    Listed,
    Made,
    Outcome,
    Put,
    Removed,
    Scanned,
    State,
    Told,
)
from tests.chaos.judge.anomaly import Kind
from tests.chaos.judge.verdict import check, judged


def call(
    op: int, asked_ns: int, told_ns: int, *writes: Put | Drop | Clear, outcome: Outcome = "ok"
) -> list[Event]:
    asked = Asked(
        op,
        "c",
        asked_ns,
        tuple(each for each in writes if isinstance(each, Put)),
        tuple(each for each in writes if isinstance(each, Drop)),
        tuple(each for each in writes if isinstance(each, Clear)),
    )
    is_clear = any(isinstance(each, Clear) for each in writes)
    tick = 0 if outcome != "ok" or is_clear else 10 * op
    return [asked, Told(op, told_ns, outcome, tick)]


def state(asked_ns: int, *values: int, name: str = "a", tick: int = 1_000) -> State:
    return State(name, asked_ns, asked_ns + 1, tick, values)


def kinds(*events: Event | list[Event]) -> set[Kind]:
    flat = [event for each in events for event in (each if isinstance(each, list) else [each])]
    return {anomaly.kind for anomaly in check(flat)}


IN_EU = Put("a", 1, 11, partition="eu")
ELSEWHERE = Put("a", 2, 22)
DROP_EU = Clear("a", "eu")


@pytest.mark.parametrize(
    "asked_ns, values, is_fine",
    [
        (5, (11, 22), True),
        (5, (22,), False),
        (50, (22,), True),
        (50, (11, 22), False),
        (50, (), False),
        (25, (11, 22), True),
        (25, (22,), True),
        (25, (11,), False),
    ],
    ids=[
        "before",
        "gone before",
        "after",
        "still there",
        "all gone",
        "during, there",
        "during, gone",
        "not the other",
    ],
)
def test_rows_are_gone_with_their_partition_and_no_others(
    asked_ns: int, values: tuple[int, ...], is_fine: bool
) -> None:
    events = (
        call(1, 1, 2, IN_EU),
        call(2, 3, 4, ELSEWHERE),
        call(3, 20, 30, DROP_EU),
        state(asked_ns, *values),
    )
    assert (kinds(*events) == set()) is is_fine


def test_row_of_a_partition_that_was_made_again_stays() -> None:
    again = call(4, 40, 41, Put("a", 3, 33, partition="eu"))
    assert kinds(call(1, 1, 2, IN_EU), call(3, 20, 30, DROP_EU), again, state(50, 33)) == set()
    assert Kind.STATE in kinds(call(1, 1, 2, IN_EU), call(3, 20, 30, DROP_EU), again, state(50))


def test_drop_that_nobody_answered_for_may_have_happened() -> None:
    events = (call(1, 1, 2, IN_EU), call(3, 20, 30, DROP_EU, outcome="open"), Died(35))
    assert kinds(*events, state(50, 11)) == set()
    assert kinds(*events, state(50)) == set()


def test_dropped_collection_is_neither_listed_nor_read() -> None:
    events = (Made(1, "a"), call(1, 2, 3, ELSEWHERE), call(2, 10, 20, Clear("a")))
    assert kinds(*events, Listed(30, ())) == set()
    assert kinds(*events, Listed(30, ("a",))) == {Kind.STATE}
    assert Kind.STATE in kinds(*events, state(30))


def test_collection_that_was_made_is_listed_until_a_drop_is_asked_for() -> None:
    assert kinds(Made(1, "a"), Listed(5, ())) == {Kind.LOST}
    assert kinds(Made(1, "a"), call(2, 3, 9, Clear("a"), outcome="open"), Listed(5, ())) == set()


def test_row_of_an_earlier_collection_does_not_belong_to_a_later_one_of_its_name() -> None:
    later = Scanned("a#2", "r", 40, 41, 0, 1_000, ())
    found = kinds(
        call(1, 1, 2, Put("a#1", 1, 11)),
        call(2, 3, 4, Clear("a#1")),
        later,
        state(50, 11, name="a#2"),
    )
    assert found == {Kind.STATE}


def test_open_delete_is_known_by_what_it_removed() -> None:
    events = (call(1, 1, 2, ELSEWHERE), call(2, 5, 6, Drop("a", 2), outcome="open"), Died(10))
    seen = Scanned("a", "r", 20, 21, 15, 1_000, (), removed=(Removed(25, 3, (2,)),))
    assert kinds(*events, seen, state(30)) == set()
    assert kinds(*events, seen, state(30, 22)) == {Kind.STATE}


def test_acknowledged_suffix_may_be_lost_with_the_power_and_is_counted() -> None:
    events = [
        *call(1, 1, 2, Put("a", 1, 11)),
        *call(2, 3, 4, Put("a", 2, 22)),
        Died(5, suffix_lost=True),
        state(9, 11),
    ]
    verdict = judged(events)
    assert (verdict.anomalies, verdict.lost, verdict.operations) == ((), 1, 3)
    assert kinds(*events[:-1], state(9, 22)) != set()


def test_what_was_written_after_a_loss_is_lost_no_more() -> None:
    events = (
        call(1, 1, 2, Put("a", 1, 11)),
        Died(5, suffix_lost=True),
        call(2, 6, 7, Put("a", 2, 22)),
    )
    assert kinds(*events, state(9, 22)) == set()
    assert Kind.STATE in kinds(*events, state(9))
