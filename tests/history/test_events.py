"""What real processes recorded, judged: each way to break a promise is made up and found; an honest
node is left alone.
"""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from tests.chaos.events import Allowed, below_of, calls_of, findings_in, reads_of
from tests.chaos.journal import Died, Event
from tests.chaos.judge.anomaly import Kind
from tests.chaos.judge.verdict import Verdict, judged
from tests.chaos.operations import Kind as OperationKind
from tests.chaos.operations import Operation, Outcome, Row, RowWrite
from tests.chaos.read_back import Audit, Offsets, ReadBack, Seen, SeenCollection

READ_NS = 1_000_000


def insert(
    op: int, *numbers: int, outcome: Outcome = "ok", kind: OperationKind = "insert"
) -> Operation:
    rows = tuple(Row(number, number) for number in numbers)
    return Operation(
        op=op,
        process="a",
        kind=kind,
        writes=(RowWrite(collection="events", action="insert", rows=rows),),
        started_ns=10 * op,
        ended_ns=10 * op + 5 if outcome != "indeterminate" else None,
        outcome=outcome,
        tick=100 + op if outcome == "ok" else 0,
    )


def seen_insert(op: int, first: int, *numbers: int) -> Seen:
    rows = tuple(Row(number, number) for number in numbers)
    write = RowWrite(collection="events", action="insert", rows=rows)
    return Seen(
        tick=100 + op, position=op, writes=(write,), offsets=(Offsets("v0", first, len(rows)),)
    )


def shown(*log: Seen, rows: Sequence[int] | None = None, at_ns: int = READ_NS) -> ReadBack:
    logged = [row.number for one in log for write in one.writes for row in write.rows]
    now = tuple(Row(number, number) for number in (logged if rows is None else rows))
    collections = {"events": SeenCollection(log=log, rows=now, wrong=())}
    return ReadBack(collections=collections, tick=1_000, asked_ns=at_ns, told_ns=at_ns + 1)


def history(operations: Sequence[Operation], *reads: ReadBack, allowed: Allowed) -> list[Event]:
    """Return one process that did everything and died, and processes that read."""
    events = [*calls_of(operations), Died(READ_NS - 1, suffix_lost=allowed.suffix_lost)]
    for number, read in enumerate(reads):
        events += reads_of(read, f"open {number}", allowed)
    return events


def verdict(operations: Sequence[Operation], *reads: ReadBack, **allows: bool) -> Verdict:
    allowed = Allowed(**allows)
    return judged(history(operations, *reads, allowed=allowed), gaps=allowed.gaps)


def found(operations: Sequence[Operation], *reads: ReadBack, **allows: bool) -> set[Kind]:
    return {anomaly.kind for anomaly in verdict(operations, *reads, **allows).anomalies}


OPERATIONS = [insert(1, 1, 2), insert(2, 3), insert(3, 4, 5)]
LOG = (seen_insert(1, 0, 1, 2), seen_insert(2, 2, 3), seen_insert(3, 3, 4, 5))


@pytest.mark.parametrize("truncated", [False, True])
def test_honest_node_is_left_alone(truncated: bool) -> None:
    assert found(OPERATIONS, shown(*LOG), truncated=truncated) == set()


def test_lost_row_is_found() -> None:
    assert Kind.LOST in found(OPERATIONS, shown(*LOG[:2]))


def test_lost_row_of_a_truncated_log_is_found() -> None:
    assert Kind.STATE in found(OPERATIONS, shown(rows=[1, 2, 3]), truncated=True)


def test_collection_that_is_gone_with_all_its_rows_is_found() -> None:
    empty = ReadBack(tick=1_000, asked_ns=READ_NS, told_ns=READ_NS)
    assert found(OPERATIONS, empty) == {Kind.LOST}
    assert found(OPERATIONS, empty, suffix_lost=True) == set()


def test_row_that_is_there_twice_is_found() -> None:
    assert found(OPERATIONS, shown(*LOG, rows=[1, 2, 3, 3, 4, 5])) == {Kind.STATE}


def test_retry_that_left_a_second_message_is_found() -> None:
    again = msgspec.structs.replace(seen_insert(2, 5, 3), tick=104, position=4)
    assert Kind.DUPLICATE in found(OPERATIONS, shown(*LOG, again, rows=[1, 2, 3, 4, 5]))


def test_operation_that_is_there_in_part_is_found() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    assert Kind.TORN in found(operations, shown(*LOG[:2], seen_insert(3, 3, 4)))


def test_operation_that_is_there_in_part_of_a_truncated_log_is_found() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    assert Kind.TORN in found(operations, shown(rows=[1, 2, 3, 4]), truncated=True)


@pytest.mark.parametrize("kind", ["insert", "rollback"])
def test_row_of_a_failed_operation_is_found(kind: OperationKind) -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="failed", kind=kind)]
    assert Kind.ABORTED in found(operations, shown(*LOG))


def test_row_that_nobody_wrote_is_found() -> None:
    assert Kind.INVENTED in found(OPERATIONS[:2], shown(*LOG))


def test_row_that_nobody_wrote_is_found_in_a_truncated_log() -> None:
    assert found(OPERATIONS, shown(*LOG, rows=[1, 2, 3, 4, 5, 6]), truncated=True) == {Kind.STATE}


def test_changed_bytes_are_found() -> None:
    seen = shown(*LOG)
    wrong = msgspec.structs.replace(seen.collections["events"], wrong=(3,))
    assert found(OPERATIONS, msgspec.structs.replace(seen, collections={"events": wrong})) == {
        Kind.CHANGED
    }


def test_ticks_that_go_back_are_found() -> None:
    assert Kind.BACKWARDS in found(OPERATIONS, shown(LOG[1], LOG[0], LOG[2]))


def test_ticks_of_messages_without_rows_that_go_back_are_found() -> None:
    early = Seen(
        tick=99,
        position=4,
        writes=(RowWrite(collection="events", action="delete", keys=(9,)),),
        offsets=(),
    )
    assert Kind.BACKWARDS in found(OPERATIONS, shown(*LOG, early))


@pytest.mark.parametrize("first", [1, 4])
def test_offsets_that_overlap_or_leave_a_gap_are_found(first: int) -> None:
    assert found(OPERATIONS, shown(LOG[0], LOG[1], seen_insert(3, first, 4, 5))) == {Kind.OFFSET}


def test_gap_in_offsets_is_allowed_after_failed_appends() -> None:
    assert found(OPERATIONS, shown(LOG[0], LOG[1], seen_insert(3, 9, 4, 5)), gaps=True) == set()


def test_acknowledged_tick_that_is_not_the_one_in_the_log_is_found() -> None:
    moved = msgspec.structs.replace(LOG[2], tick=150)
    assert Kind.POSITION in found(OPERATIONS, shown(*LOG[:2], moved))


def test_tick_below_one_that_was_acknowledged_before_the_call_is_found() -> None:
    late = msgspec.structs.replace(OPERATIONS[2], started_ns=100, ended_ns=200, tick=90)
    assert Kind.ORDER in found([*OPERATIONS[:2], late], shown(*LOG))


DELETE_OF_3 = Seen(
    tick=104,
    position=4,
    writes=(RowWrite(collection="events", action="delete", keys=(3,)),),
    offsets=(),
)


def delete(op: int, key: int, outcome: Outcome = "ok") -> Operation:
    write = RowWrite(collection="events", action="delete", keys=(key,))
    return msgspec.structs.replace(insert(op, outcome=outcome, kind="delete"), writes=(write,))


@pytest.mark.parametrize("outcome", ["ok", "indeterminate"])
def test_rows_that_are_not_what_the_log_adds_up_to_are_found(outcome: Outcome) -> None:
    operations = [*OPERATIONS, delete(4, 3, outcome)]
    assert found(operations, shown(*LOG, DELETE_OF_3, rows=[1, 2, 4, 5])) == set()
    assert found(operations, shown(*LOG, DELETE_OF_3, rows=[1, 2, 3, 4, 5])) == {Kind.STATE}


def test_removal_that_nobody_asked_for_is_found() -> None:
    assert Kind.INVENTED in found(OPERATIONS, shown(*LOG, DELETE_OF_3, rows=[1, 2, 4, 5]))


def test_row_of_an_open_write_may_be_removed_by_an_open_delete_that_a_reader_met() -> None:
    operations = [
        *OPERATIONS[:1],
        insert(2, 3, 4, outcome="indeterminate"),
        delete(3, 3, "indeterminate"),
    ]
    log = (LOG[0], seen_insert(2, 2, 3, 4), DELETE_OF_3)
    assert found(operations, shown(*log, rows=[1, 2, 4])) == set()
    assert found(operations, shown(*log, rows=[1, 2])) == {Kind.STATE}


def test_delete_that_left_no_trace_in_the_log_removed_nothing() -> None:
    operations = [*OPERATIONS, delete(4, 3, "indeterminate")]
    assert found(operations, shown(*LOG)) == set()
    assert found(operations, shown(*LOG, rows=[1, 2, 4, 5])) == {Kind.STATE}


def test_entry_that_a_reader_saw_and_that_is_gone_is_found() -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    assert Kind.SKIPPED in found(operations, shown(*LOG), shown(*LOG[:2], at_ns=READ_NS + 9))


@pytest.mark.parametrize("truncated", [False, True])
def test_indeterminate_operation_that_was_not_there_must_not_appear_later(truncated: bool) -> None:
    operations = [*OPERATIONS[:2], insert(3, 4, 5, outcome="indeterminate")]
    first = shown(*LOG[:2])
    later = shown(*LOG, at_ns=READ_NS + 9)
    assert found(operations, first, truncated=truncated) == set()
    assert found(operations, first, later, truncated=truncated)


def test_suffix_may_be_lost_where_that_is_allowed_and_a_hole_may_not() -> None:
    suffix = verdict(OPERATIONS, shown(*LOG[:1]), suffix_lost=True)
    assert (suffix.anomalies, suffix.lost) == ((), 2)
    assert Kind.LOST in found(OPERATIONS, shown(LOG[0], seen_insert(3, 2, 4, 5)), suffix_lost=True)


def test_error_that_is_none_of_ours_is_found() -> None:
    strange = msgspec.structs.replace(
        insert(4, 9, outcome="indeterminate"), error="ZeroDivisionError", ended_ns=50
    )
    assert found([*OPERATIONS, strange], shown(*LOG)) == {Kind.ERROR}


def upsert(op: int, key: int, number: int, outcome: Outcome = "ok") -> Operation:
    write = RowWrite(collection="state", action="upsert", rows=(Row(key, number),))
    return msgspec.structs.replace(insert(op, outcome=outcome, kind="upsert"), writes=(write,))


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
def test_key_of_a_truncated_log_has_the_last_row_it_can_have(
    rows: tuple[Row, ...], is_fine: bool
) -> None:
    operations = [upsert(1, 1, 10), upsert(2, 1, 11), upsert(3, 1, 12, outcome="indeterminate")]
    state = SeenCollection(log=(), rows=rows, wrong=())
    seen = ReadBack(collections={"state": state}, tick=1_000, asked_ns=READ_NS, told_ns=READ_NS)
    assert (found(operations, seen, truncated=True) == set()) is is_fine


def test_retry_in_a_later_process_may_be_what_wrote_the_row() -> None:
    first = msgspec.structs.replace(insert(1, 1, outcome="indeterminate"), kind="produced")
    again = msgspec.structs.replace(first, op=2, started_ns=READ_NS + 2)
    written = msgspec.structs.replace(seen_insert(1, 0, 1), tick=1_001)
    later = msgspec.structs.replace(shown(written, at_ns=READ_NS + 9), tick=2_000)
    events = [
        *calls_of([first, again]),
        Died(READ_NS - 1),
        *reads_of(shown(), "open 0", Allowed(truncated=True)),
        Died(READ_NS + 3),
        *reads_of(later, "open 1", Allowed(truncated=True)),
    ]
    assert judged(events).anomalies == ()


def test_one_open_of_a_damaged_copy_is_judged_alone() -> None:
    assert findings_in(OPERATIONS, shown(*LOG)) == ()
    assert findings_in(OPERATIONS, shown(*LOG[:2]))


AUDIT = Audit(
    entries=((1, 2, 101), (3, 3, 102)), in_files={"events": (Row(1, 1), Row(2, 2))}, cut_tick=101
)


@pytest.mark.parametrize(
    "broken, finding",
    [
        (
            lambda audit: msgspec.structs.replace(audit, entries=((1, 2, 101), (4, 4, 102))),
            "positions 3 to 3 are missing",
        ),
        (
            lambda audit: msgspec.structs.replace(audit, entries=((1, 2, 101), (3, 3, 101))),
            "is not above 101",
        ),
        (
            lambda audit: msgspec.structs.replace(audit, in_files={"events": (Row(1, 1),)}),
            "value 2 of events is before a cut",
        ),
        (
            lambda audit: msgspec.structs.replace(
                audit, in_files={"events": (Row(1, 1), Row(2, 2), Row(2, 2))}
            ),
            "value 2 is 2 times in files",
        ),
        (
            lambda audit: msgspec.structs.replace(
                audit, in_files={"events": (Row(1, 1), Row(2, 2), Row(9, 9))}
            ),
            "value 9 of events is in a file and nowhere else",
        ),
    ],
    ids=["gap", "tick", "not in a file", "twice in files", "only in a file"],
)
def test_damage_below_the_node_is_found(broken: Callable[[Audit], Audit], finding: str) -> None:
    events = history(OPERATIONS, shown(*LOG), allowed=Allowed())
    assert judged([*events, below_of(AUDIT)]).anomalies == ()
    [anomaly] = judged([*events, below_of(broken(AUDIT))]).anomalies
    assert anomaly.kind is Kind.BELOW
    assert finding in anomaly.text
