"""Tries of one sequence as one operation, and answers that must not differ."""

import msgspec

from tests.chaos.operations import Operation, Outcome, Row, RowWrite
from tests.chaos.produced import joined_tries, row_number


def tried(op: int, sequence: int, outcome: Outcome, *, tick: int = 0, at_ns: int = 0) -> Operation:
    number = row_number(1, sequence)
    write = RowWrite(collection="events", action="insert", rows=(Row(number, number),))
    return Operation(
        op=op,
        process="p",
        kind="produced",
        writes=(write,),
        started_ns=at_ns,
        ended_ns=at_ns + 1,
        outcome=outcome,
        tick=tick,
    )


def test_a_try_without_an_answer_and_its_retry_are_one_operation_from_first_call_to_answer() -> (
    None
):
    joined = joined_tries(
        [tried(1, 5, "indeterminate", at_ns=10), tried(2, 5, "ok", tick=7, at_ns=20)]
    )
    [one] = joined.operations
    assert (one.op, one.outcome, one.tick, one.started_ns, one.ended_ns) == (1, "ok", 7, 10, 21)
    assert (joined.compared, joined.findings) == (0, [])


def test_a_second_answer_that_differs_from_the_first_is_found() -> None:
    joined = joined_tries(
        [tried(1, 5, "ok", tick=7), tried(2, 5, "ok", tick=7), tried(3, 5, "ok", tick=8)]
    )
    assert joined.compared == 2
    assert len(joined.findings) == 1
    assert "retry 3" in joined.findings[0]


def test_a_try_that_is_known_to_have_failed_leaves_only_the_next_one() -> None:
    [one] = joined_tries(
        [tried(1, 5, "failed", at_ns=10), tried(2, 5, "ok", tick=7, at_ns=20)]
    ).operations
    assert (one.outcome, one.started_ns) == ("ok", 20)


def test_an_answer_stays_when_a_later_retry_hears_nothing() -> None:
    [one] = joined_tries([tried(1, 5, "ok", tick=7), tried(2, 5, "indeterminate")]).operations
    assert (one.outcome, one.tick) == ("ok", 7)


def test_other_operations_and_other_sequences_stay_apart() -> None:
    plain = msgspec.structs.replace(tried(3, 5, "ok", tick=9), kind="insert")
    joined = joined_tries([tried(1, 5, "ok", tick=7), tried(2, 6, "ok", tick=8), plain])
    assert [each.op for each in joined.operations] == [1, 2, 3]
