"""The life of a directory in the words of `journal`, for the judge of whole histories (`history.check`). Pure.

In: operations as they were recorded, and everything that was read back, in order. Out: events. Only for logs that are kept
whole: a read-back then covers everything from the first tick on.
"""

from collections.abc import Iterable, Iterator, Sequence

from bench.chaos.journal import Asked, Drop, Event, Put, Scanned, Seen, State, Told
from bench.chaos.journal import Outcome as ToldOutcome
from bench.chaos.operations import Operation, Outcome
from bench.chaos.read_back import ReadBack

_OUTCOMES: dict[Outcome, ToldOutcome] = {"ok": "ok", "failed": "failed", "indeterminate": "open"}


def events_of(operations: Iterable[Operation], read_backs: Sequence[ReadBack]) -> Iterator[Event]:
    """Yield what was asked and told, then what was read."""
    for operation in operations:
        if operation.writes:
            yield from _call(operation)
    for number, seen in enumerate(read_backs):
        yield from _read(seen, f"open {number}")


def _value(collection: str, number: int) -> int:
    """Return a value that no other row has: `left` and `right` hold rows of the same numbers."""
    return -number if collection == "right" else number


def _call(operation: Operation) -> Iterator[Event]:
    puts = tuple(
        Put(write.collection, row.key, _value(write.collection, row.number), write.action == "upsert")
        for write in operation.writes
        for row in write.rows
    )
    drops = tuple(Drop(write.collection, key) for write in operation.writes for key in write.keys)
    yield Asked(op=operation.op, client=operation.process, at_ns=operation.started_ns, puts=puts, drops=drops)
    if operation.ended_ns is not None:
        outcome = _OUTCOMES[operation.outcome]
        yield Told(op=operation.op, at_ns=operation.ended_ns, outcome=outcome, tick=operation.tick)


def _read(seen: ReadBack, reader: str) -> Iterator[Event]:
    for name, each in seen.collections.items():
        rows = tuple(
            Seen(one.tick, one.position, _value(name, row.number))
            for one in each.log
            for write in one.writes
            for row in write.rows
        )
        yield Scanned(
            collection=name,
            reader=reader,
            asked_ns=seen.asked_ns,
            told_ns=seen.told_ns,
            after_tick=0,
            until_tick=seen.tick,
            rows=rows,
        )
        values = tuple(_value(name, row.number) for row in each.rows)
        yield State(collection=name, asked_ns=seen.asked_ns, told_ns=seen.told_ns, tick=seen.tick, values=values)
