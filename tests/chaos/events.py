"""The life of a directory in the words of `journal`, for the one judge. Pure.

In: operations as processes recorded them, and what reopened nodes showed. Out: events, and the
findings of the judge.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.journal import (
    NO_VALUE,
    Asked,
    Below,
    Died,
    Drop,
    Event,
    Listed,
    Put,
    Removed,
    Scanned,
    Seen,
    Span,
    State,
    Told,
)
from tests.chaos.journal import Outcome as ToldOutcome
from tests.chaos.judge.verdict import Verdict, judged
from tests.chaos.operations import Operation, Outcome
from tests.chaos.produced import PRODUCED, joined_tries
from tests.chaos.read_back import Audit, ReadBack
from tests.chaos.read_back import Seen as SeenMessage

FINDINGS_MAX = 20
"""More of them say nothing new."""
GIVEN_UP = "_GivenUp"
"""What a caller raises that rolls its own transaction back."""

_OUTCOMES: dict[Outcome, ToldOutcome] = {"ok": "ok", "failed": "failed", "indeterminate": "open"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What this kind of fault may do.

    `truncated`: the log may begin later than the node's life. `gaps`: failed appends may leave
    offsets unused. `suffix_lost`: acknowledged operations may be missing, if all later ones are too
    (durability `os`, power lost).
    """

    truncated: bool = False
    gaps: bool = False
    suffix_lost: bool = False


STRICT = Allowed()


def calls_of(operations: Sequence[Operation]) -> Iterator[Event]:
    """Yield what was asked and told; the tries of one sequence are one call, until the last of
    them.
    """
    latest = {_sequence(each): each.started_ns for each in operations if each.kind in PRODUCED}
    for operation in joined_tries(operations).operations:
        if operation.writes:
            yield from _call(operation, tried_ns=latest.get(_sequence(operation), 0))


def reads_of(seen: ReadBack, reader: str, allowed: Allowed = STRICT) -> Iterator[Event]:
    """Yield what one open of a node showed."""
    yield Listed(seen.asked_ns, tuple(seen.collections))
    for name, each in seen.collections.items():
        begins = (each.log[0].tick - 1 if each.log else seen.tick) if allowed.truncated else 0
        yield Scanned(
            collection=name,
            reader=reader,
            asked_ns=seen.asked_ns,
            told_ns=seen.told_ns,
            after_tick=begins,
            until_tick=seen.tick,
            rows=tuple(row for one in each.log for row in _rows(name, one)),
            spans=tuple(
                Span(one.tick, span.vchannel, span.first, span.count)
                for one in each.log
                for span in one.offsets
            ),
            removed=tuple(
                Removed(one.tick, one.position, write.keys)
                for one in each.log
                for write in one.writes
                if write.keys
            ),
        )
        values = tuple(_value(name, row.number) for row in each.rows)
        wrong = tuple(_value(name, number) for number in each.wrong)
        yield State(name, seen.asked_ns, seen.told_ns, seen.tick, values, wrong)


def below_of(audit: Audit) -> Below:
    """Return what lies below a closed node."""
    files = {
        name: tuple(_value(name, row.number) for row in rows)
        for name, rows in audit.in_files.items()
    }
    return Below(
        entries=audit.entries, files=files, cut_tick=audit.cut_tick, findings=audit.findings
    )


def findings_in(operations: Sequence[Operation], seen: ReadBack) -> tuple[str, ...]:
    """Judge what one open shows of everything that dead processes did."""
    died = Died(seen.asked_ns - 1)
    return findings_of(
        judged([*calls_of(operations), died, *reads_of(seen, "the only one")], gaps=False)
    )


def findings_of(verdict: Verdict) -> tuple[str, ...]:
    """Return the first anomalies as sentences."""
    return tuple(map(str, verdict.anomalies[:FINDINGS_MAX]))


def _call(operation: Operation, *, tried_ns: int) -> Iterator[Event]:
    puts = tuple(
        Put(
            write.collection,
            row.key,
            _value(write.collection, row.number),
            write.action == "upsert",
        )
        for write in operation.writes
        for row in write.rows
    )
    drops = tuple(Drop(write.collection, key) for write in operation.writes for key in write.keys)
    yield Asked(
        op=operation.op,
        client=operation.process,
        at_ns=operation.started_ns,
        puts=puts,
        drops=drops,
    )
    outcome = _OUTCOMES[operation.outcome]
    ended_ns = operation.ended_ns
    if outcome == "open" and tried_ns:
        ended_ns = max(ended_ns or 0, tried_ns)
    if ended_ns is not None:
        error = "" if operation.error == GIVEN_UP else operation.error
        yield Told(
            op=operation.op,
            at_ns=ended_ns,
            outcome=outcome,
            tick=operation.tick,
            error=error,
            position=max(operation.positions, default=0),
            spans=tuple(
                Span(operation.tick, vchannel, first, count)
                for vchannel, (first, count) in operation.offsets.items()
            ),
        )


def _rows(name: str, message: SeenMessage) -> Iterator[Seen]:
    """Yield the rows of a message, or that there was one."""
    values = [_value(name, row.number) for write in message.writes for row in write.rows]
    return (Seen(message.tick, message.position, value) for value in values or [NO_VALUE])


def _value(collection: str, number: int) -> int:
    """Return a value that no other row has: `left` and `right` hold rows of the same numbers."""
    return -number if collection == "right" else number


def _sequence(operation: Operation) -> int:
    return operation.writes[0].rows[0].number if operation.kind in PRODUCED else 0
