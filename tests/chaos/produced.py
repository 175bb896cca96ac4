"""Writes of named producers: one sequence is one write, however many processes ask for it. Pure.

In: operations as processes recorded them, each try one of its own. Out: one operation for each
sequence, from the first try to the first answer, for judges that know no retries, and a finding
wherever two answers to one sequence differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from tests.chaos.operations import Operation

PRODUCED = frozenset({"produced", "produced transaction"})
"""Kinds of operations that may be tried again under the same sequence, with the same rows."""
SEQUENCES = 1_000_000
"""Most sequences of one producer."""
FIRST_NUMBER = 1 << 50
"""Rows of producers have numbers from here on, above those of all processes."""


def row_number(producer: int, sequence: int) -> int:
    """Return the number of a producer's row: the same in every process that writes the sequence."""
    assert sequence < SEQUENCES
    return FIRST_NUMBER + producer * SEQUENCES + sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Operations with the tries of each sequence as one, how many second answers were compared, and
    which differ.
    """

    operations: list[Operation]
    compared: int
    findings: list[str]


def joined_tries(operations: Iterable[Operation]) -> Joined:
    """Put the tries of each sequence together, in place of the first."""
    joined: dict[tuple[bool, int], Operation] = {}
    findings: list[str] = []
    compared = 0
    for each in operations:
        key = (True, each.writes[0].rows[0].number) if each.kind in PRODUCED else (False, each.op)
        first = joined.get(key)
        if first is None:
            joined[key] = each
            continue
        if _answered(first) and _answered(each):
            compared += 1
            if _answer(first) != _answer(each):
                findings.append(
                    f"operation {first.op} was told {_answer(first)}, its retry {each.op} "
                    f"{_answer(each)}"
                )
        joined[key] = _joined(first, each)
    return Joined(operations=list(joined.values()), compared=compared, findings=findings)


def _answered(operation: Operation) -> bool:
    return operation.outcome == "ok" and operation.tick > 0


def _answer(operation: Operation) -> tuple[object, ...]:
    return operation.tick, dict(operation.offsets), operation.positions


def _joined(first: Operation, again: Operation) -> Operation:
    """Return two tries as one, from the earlier call to the earlier answer; one that failed for
    certain never began.
    """
    if again.outcome == "failed":
        return first
    if first.outcome == "failed":
        return msgspec.structs.replace(again, op=first.op)
    told = min(first, again, key=_when_told)
    started_ns = min(first.started_ns, again.started_ns)
    return msgspec.structs.replace(told, op=first.op, process=first.process, started_ns=started_ns)


def _when_told(operation: Operation) -> tuple[bool, bool, int]:
    """Sort answers first, by time, then what was found there without one."""
    return not _answered(operation), operation.outcome != "ok", operation.ended_ns or 0
