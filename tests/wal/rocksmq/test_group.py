"""One consumer group against a model of sets: what is open is delivered, the first ones first, and
nothing else.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.errors import Overloaded
from wal.rocksmq import group as module
from wal.rocksmq.group import Group, Lease, acknowledge, all_below

BEGIN = 5
END = 40


steps = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 9), st.integers(1, 2)),
    st.tuples(st.just("ack"), st.lists(st.integers(0, END), min_size=1, max_size=6)),
    st.tuples(st.just("give back"), st.integers(1, 2)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("reopen")),
)


@given(st.lists(steps, max_size=40))
def test_a_group_delivers_what_is_open_in_order_and_keeps_what_was_acknowledged(
    taken_steps: list[tuple[Any, ...]],
) -> None:
    group = Group(all_below(BEGIN))
    held = dict[int, Lease]()
    acked = set(range(BEGIN))
    now = 0.0
    for what, *given_ in taken_steps:
        now += 1
        match what, given_:
            case "take", [count, owner]:
                lease = (owner, now + 5 if owner == 1 else math.inf)
                wanted = [
                    each for each in range(END + 1) if each not in acked and each not in held
                ][:count]
                assert group.take(lease, count, end_id=END) == wanted
                held |= dict.fromkeys(wanted, lease)
            case "ack", [ids]:
                group.acked = acknowledge(group.acked, ids, end_id=END)
                assert group.settle(ids) == len(held.keys() & set(ids))
                acked |= set(ids)
                held = {each: lease for each, lease in held.items() if each not in acked}
            case "give back", [owner]:
                group.give_back(list(group.held), owner)
                held = {each: lease for each, lease in held.items() if lease[0] != owner}
            case "expire", _:
                group.expire(now)
                held = {each: lease for each, lease in held.items() if lease[1] > now}
            case _:
                group = Group(group.acked)
                held = {}
        assert group.held == held
        assert group.floor == min(set(range(END + 2)) - acked)
        assert group.lag(END) == len(set(range(END + 1)) - acked)
        assert {each for run in group.acked[1:] for each in range(*run)} == {
            e for e in acked if e > group.floor
        }


def test_no_more_is_held_than_may_be_and_what_comes_again_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HELD_MAX", 4)
    group = Group(all_below(1))
    lease = (1, math.inf)
    assert group.take(lease, 9, end_id=9) == [1, 2, 3, 4]
    assert group.take(lease, 9, end_id=9) == []
    group.give_back([2], 1)
    assert group.take(lease, 9, end_id=9) == [2]
    group.acked = acknowledge(group.acked, [1], end_id=END)
    assert group.settle([1]) == 1
    assert group.take(lease, 9, end_id=9) == [5]


def test_an_acknowledgement_that_would_leave_too_many_gaps_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GAPS_MAX", 2)
    acked = acknowledge(all_below(1), [3, 5], end_id=END)
    before = acked.copy()
    with pytest.raises(Overloaded, match="earliest first"):
        acknowledge(acked, [7, 9], end_id=END)
    assert acked == before
    assert acknowledge(acked, [4, 7], end_id=END)[1:] == [(3, 6), (7, 8)]
