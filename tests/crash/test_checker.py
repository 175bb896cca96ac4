"""The checker is checked: each way to break a promise is made up and must be found; an honest node is left alone."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from bench.chaos.checker import Allowed, check, check_audit
from bench.chaos.operations import Kind, Operation, Outcome, Row, RowWrite
from bench.chaos.read_back import Audit, Offsets, ReadBack, Seen, SeenCollection


def insert(op: int, *numbers: int, outcome: Outcome = "ok", kind: Kind = "insert", name: str = "events") -> Operation:
    rows = tuple(Row(number, number) for number in numbers)
    return Operation(
        op=op,
        process="a",
        kind=kind,
        writes=(RowWrite(collection=name, action="insert", rows=rows),),
        started_ns=10 * op,
        ended_ns=10 * op + 5 if outcome != "indeterminate" else None,
        outcome=outcome,
        tick=100 + op if outcome == "ok" else 0,
    )


def seen_insert(op: int, first: int, *numbers: int) -> Seen:
    rows = tuple(Row(number, number) for number in numbers)
    write = RowWrite(collection="events", action="insert", rows=rows)
    return Seen(tick=100 + op, position=op, writes=(write,), offsets=(Offsets("v0", first, len(rows)),))


def shown(*log: Seen, rows: Sequence[int] | None = None) -> ReadBack:
    logged = [row.number for one in log for write in one.writes for row in write.rows]
    numbers = logged if rows is None else rows
    now = tuple(Row(number, number) for number in numbers)
    return ReadBack(collections={"events": SeenCollection(log=log, rows=now, wrong=())}, tick=1_000)


OPERATIONS = [insert(1, 1, 2), insert(2, 3), insert(3, 4, 5)]
LOG = (seen_insert(1, 0, 1, 2), seen_insert(2, 2, 3), seen_insert(3, 3, 4, 5))


def found(operations: Sequence[Operation], seen: ReadBack, **allowed: bool) -> str:
    return "\n".join(check(operations, seen, allowed=Allowed(**allowed)).findings)


def test_honest_node_is_left_alone() -> None:
    assert found(OPERATIONS, shown(*LOG)) == ""


def test_lost_row_is_found() -> None:
    assert "acknowledged at tick 103 and is not there" in found(OPERATIONS, shown(*LOG[:2]))


def test_row_that_is_there_twice_is_found() -> None:
    assert "row 3 of events is there 2 times" in found(OPERATIONS, shown(*LOG, rows=[1, 2, 3, 3, 4, 5]))


def test_retry_that_left_a_second_message_is_found() -> None:
    again = msgspec.structs.replace(seen_insert(2, 5, 3), tick=104, position=4)
    assert "row 3 of events is 2 times in the log" in found(OPERATIONS, shown(*LOG, again, rows=[1, 2, 3, 4, 5]))


def test_operation_that_is_there_in_part_is_found() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    seen = shown(*LOG[:2], seen_insert(3, 3, 4))
    assert "is there in part: 1 of 2 rows" in found(operations, seen)


@pytest.mark.parametrize("kind", ["insert", "rollback"])
def test_row_of_a_failed_operation_is_found(kind: Kind) -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="failed", kind=kind)]
    assert f"operation 3 ({kind}) failed" in found(operations, shown(*LOG))


def test_row_that_nobody_wrote_is_found() -> None:
    assert "row 4 is there, and nobody wrote it" in found(OPERATIONS[:2], shown(*LOG))


def test_changed_bytes_are_found() -> None:
    seen = shown(*LOG)
    wrong = msgspec.structs.replace(seen.collections["events"], wrong=(3,))
    assert "row 3 of events is not what was written" in found(OPERATIONS, ReadBack(collections={"events": wrong}))


def test_ticks_that_go_back_are_found() -> None:
    assert "comes after tick" in found(OPERATIONS, shown(LOG[1], LOG[0], LOG[2]))


@pytest.mark.parametrize("first", [1, 4])
def test_offsets_that_overlap_or_leave_a_gap_are_found(first: int) -> None:
    log = (LOG[0], LOG[1], seen_insert(3, first, 4, 5))
    assert "where 3 was due" in found(OPERATIONS, shown(*log))


def test_gap_in_offsets_is_allowed_after_failed_appends() -> None:
    assert found(OPERATIONS, shown(LOG[0], LOG[1], seen_insert(3, 9, 4, 5)), gaps=True) == ""


def test_acknowledged_tick_that_is_not_the_one_in_the_log_is_found() -> None:
    moved = msgspec.structs.replace(LOG[2], tick=150)
    assert "is at tick 150 and was acknowledged at 103" in found(OPERATIONS, shown(*LOG[:2], moved))


def test_tick_below_one_that_was_acknowledged_before_the_call_is_found() -> None:
    late = msgspec.structs.replace(OPERATIONS[2], started_ns=100, ended_ns=200, tick=90)
    assert "one that ended before it began has 102" in found([*OPERATIONS[:2], late], shown(*LOG))


def test_rows_that_are_not_what_the_log_adds_up_to_are_found() -> None:
    log = (
        *LOG,
        Seen(tick=104, position=4, writes=(RowWrite(collection="events", action="delete", keys=(3,)),), offsets=()),
    )
    seen = ReadBack(
        collections={"events": SeenCollection(log=log, rows=shown(*LOG).collections["events"].rows, wrong=())}
    )
    assert "the current rows are not what the log adds up to" in found(OPERATIONS, seen)


def test_entry_that_a_reader_saw_and_that_changed_is_found() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    verdict = check(operations, shown(*LOG[:2]), before=shown(*LOG))
    assert any("what a reader saw of the log before" in finding for finding in verdict.findings)


def test_indeterminate_operation_that_was_not_there_must_not_appear_later() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    first = check(operations, shown(*LOG[:2]))
    assert first.findings == ()
    assert "operation 3 (insert) failed" in found(first.operations, shown(*LOG))


def test_suffix_may_be_lost_where_that_is_allowed_and_a_hole_may_not() -> None:
    assert found(OPERATIONS, shown(*LOG[:1]), suffix_lost=True) == ""
    hole = found(OPERATIONS, shown(LOG[0], seen_insert(3, 2, 4, 5)), suffix_lost=True)
    assert "acknowledged tick 102 is not: a hole" in hole


def test_error_that_is_none_of_ours_is_found() -> None:
    strange = msgspec.structs.replace(insert(4, 9, outcome="indeterminate"), error="ZeroDivisionError")
    assert "raised ZeroDivisionError" in found([*OPERATIONS, strange], shown(*LOG))


def upsert(op: int, key: int, number: int, outcome: Outcome = "ok") -> Operation:
    write = RowWrite(collection="state", action="upsert", rows=(Row(key, number),))
    return msgspec.structs.replace(insert(op, outcome=outcome, kind="upsert"), writes=(write,))


def state_of(*rows: Row) -> ReadBack:
    return ReadBack(collections={"state": SeenCollection(log=(), rows=rows, wrong=())})


@pytest.mark.parametrize(
    "rows, is_fine",
    [
        ((Row(1, 11),), True),
        ((Row(1, 12),), True),
        ((Row(1, 10),), False),
        ((), False),
        ((Row(1, 11), Row(1, 12)), False),
    ],
    ids=["last acknowledged", "indeterminate", "replaced", "none", "both"],
)
def test_key_of_a_truncated_log_has_the_last_row_it_can_have(rows: tuple[Row, ...], is_fine: bool) -> None:
    operations = [upsert(1, 1, 10), upsert(2, 1, 11), upsert(3, 1, 12, outcome="indeterminate")]
    assert (found(operations, state_of(*rows), truncated=True) == "") is is_fine


AUDIT = Audit(entries=((1, 2, 101), (3, 3, 102)), in_files={"events": (Row(1, 1), Row(2, 2))}, cut_tick=101)


@pytest.mark.parametrize(
    "broken, finding",
    [
        (
            lambda audit: msgspec.structs.replace(audit, entries=((1, 2, 101), (4, 4, 102))),
            "positions 3 to 3 are missing",
        ),
        (lambda audit: msgspec.structs.replace(audit, entries=((1, 2, 101), (3, 3, 101))), "is not above 101"),
        (
            lambda audit: msgspec.structs.replace(audit, in_files={"events": (Row(1, 1),)}),
            "row 2 of events is before a cut",
        ),
        (
            lambda audit: msgspec.structs.replace(audit, in_files={"events": (Row(1, 1), Row(2, 2), Row(2, 2))}),
            "row 2 is 2 times in files",
        ),
        (
            lambda audit: msgspec.structs.replace(audit, in_files={"events": (Row(1, 1), Row(2, 2), Row(9, 9))}),
            "row 9 of events is in a file and nowhere else",
        ),
    ],
    ids=["gap", "tick", "not in a file", "twice in files", "only in a file"],
)
def test_damage_below_the_node_is_found(broken: Callable[[Audit], Audit], finding: str) -> None:
    assert check_audit(shown(*LOG), AUDIT) == ()
    assert finding in "\n".join(check_audit(shown(*LOG), broken(AUDIT)))
