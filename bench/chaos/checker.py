"""Whether what a node holds is what it promised: pure, linear, and it names each broken promise in one sentence.

In: all operations on one directory so far, what the reopened node shows, what the open before it showed, an audit. Out:
findings, empty when every promise held, and the operations with their outcome settled: an indeterminate one that is there
happened, one that is not there must never appear.

- Every acknowledged row is there, once, with its bytes; nothing is there that nobody wrote, that was refused or rolled back.
- An operation's rows are all there or none of them; an indeterminate operation at most once.
- Ticks and positions ascend; an acknowledged operation is at its tick; one that began after another ended has a higher tick;
  row offsets of a vchannel follow each other without a gap.
- The current rows are what the log replays to. What a reader once saw stays.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from bench.chaos.operations import Operation, Row, RowWrite
from bench.chaos.read_back import Audit, ReadBack, Seen, SeenCollection
from bench.chaos.rows import ADDED_ONLY, REPLACED

FINDINGS_MAX = 20
"""More of them say nothing new."""
KNOWN_ERRORS = frozenset({"_GivenUp"})

NOTHING_SEEN = SeenCollection(log=(), rows=(), wrong=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What this kind of fault may do.

    `truncated`: the log may begin later than the node's life. `gaps`: failed appends may leave offsets unused.
    `suffix_lost`: acknowledged operations may be missing, if all later ones are too (durability `os`, power lost).
    """

    truncated: bool = False
    gaps: bool = False
    suffix_lost: bool = False


STRICT = Allowed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The broken promises, and the operations as they are known now."""

    findings: tuple[str, ...]
    operations: tuple[Operation, ...]
    lost: int = 0


def check(
    operations: Sequence[Operation], seen: ReadBack, *, before: ReadBack | None = None, allowed: Allowed = STRICT
) -> Verdict:
    """Judge what an open node shows."""
    if seen.error:
        return Verdict(findings=(f"the node refused: {seen.code}: {seen.error}",), operations=tuple(operations))
    present = _numbers(seen)
    lost = [each for each in operations if each.outcome == "ok" and _is_missing(each, present)]
    findings = [
        *_strange_errors(operations),
        *_wrong_bytes(seen),
        *_copies(seen),
        *_strangers(operations, present),
        *_parts(operations, present),
        *_order(seen),
        *_offsets(seen, allowed),
        *_real_time(operations),
        *_ticks(operations, seen),
        *_stays(before, seen),
        *(_suffix(operations, lost) if allowed.suffix_lost else _losses(lost)),
    ]
    missing = {each.op for each in lost}
    settled = tuple(_settled(each, present, missing) for each in operations)
    if allowed.suffix_lost:
        settled = tuple(_doubted(settled))
    findings += _replaced_keys(settled, seen) if allowed.truncated else _replays(seen)
    return Verdict(findings=tuple(findings[:FINDINGS_MAX]), operations=settled, lost=len(lost))


def check_audit(seen: ReadBack, audit: Audit) -> tuple[str, ...]:
    """Judge what lies below a node that `seen` was read from, and that was then closed."""
    findings = list(audit.findings)
    for (_, last, tick), (first, _, next_tick) in pairwise(audit.entries):
        if first != last + 1:
            findings.append(f"positions {last + 1} to {first - 1} are missing in the log")
        if next_tick <= tick:
            findings.append(f"tick {next_tick} at position {first} is not above {tick}")
    for name, rows in audit.in_files.items():
        shown = seen.collections.get(name, NOTHING_SEEN)
        findings += [f"row {number} is {count} times in files" for number, count in _repeated(rows)]
        in_files = {row.number for row in rows}
        strangers = in_files - {row.number for row in shown.rows}
        findings += [f"row {number} of {name} is in a file and nowhere else" for number in sorted(strangers)]
        due = {row.number for one in shown.log if one.tick <= audit.cut_tick for row in _inserted(one)}
        findings += [f"row {number} of {name} is before a cut and in no file" for number in sorted(due - in_files)]
    return tuple(findings[:FINDINGS_MAX])


# --- rows ---------------------------------------------------------------------------------------------------------------


def _numbers(seen: ReadBack) -> frozenset[int]:
    """Return the numbers of all rows that are there, or were before they were replaced, as far as the log is kept."""
    rows = {row.number for each in seen.collections.values() for row in each.rows}
    replaced = seen.collections.get(REPLACED, NOTHING_SEEN)
    return frozenset(rows | {row.number for one in replaced.log for row in _inserted(one)})


def _inserted(message: Seen) -> Iterator[Row]:
    return (row for write in message.writes for row in write.rows)


def _lasting(operation: Operation) -> list[int]:
    """Return the numbers of an operation's rows that no later operation can take away."""
    return [row.number for write in operation.writes if write.collection in ADDED_ONLY for row in write.rows]


def _is_missing(operation: Operation, present: frozenset[int]) -> bool:
    return any(number not in present for number in _lasting(operation))


def _settled(operation: Operation, present: frozenset[int], missing: set[int]) -> Operation:
    if operation.op in missing:
        return msgspec.structs.replace(operation, outcome="failed")
    lasting = _lasting(operation)
    if operation.outcome != "indeterminate" or not lasting:
        return operation
    return msgspec.structs.replace(operation, outcome="ok" if lasting[0] in present else "failed")


def _doubted(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Take upserts and deletes above the last surviving tick for indeterminate: they may be part of the lost suffix."""
    survived = max((each.tick for each in operations if each.outcome == "ok" and _lasting(each)), default=0)
    for each in operations:
        doubtful = each.outcome == "ok" and each.tick > survived and not _lasting(each)
        yield msgspec.structs.replace(each, outcome="indeterminate", tick=0) if doubtful else each


def _repeated(rows: Iterable[Row]) -> list[tuple[int, int]]:
    return [(number, count) for number, count in Counter(row.number for row in rows).items() if count > 1]


def _strange_errors(operations: Iterable[Operation]) -> Iterator[str]:
    for each in operations:
        if each.error and not each.error.isupper() and each.error not in KNOWN_ERRORS:
            yield f"operation {each.op} ({each.kind}) raised {each.error}, which is no error of ours"


def _wrong_bytes(seen: ReadBack) -> Iterator[str]:
    for name, each in seen.collections.items():
        yield from (f"row {number} of {name} is not what was written" for number in each.wrong)


def _copies(seen: ReadBack) -> Iterator[str]:
    for name, each in seen.collections.items():
        yield from (f"row {number} of {name} is there {count} times" for number, count in _repeated(each.rows))
        logged = (row for one in each.log for row in _inserted(one))
        yield from (f"row {number} of {name} is {count} times in the log" for number, count in _repeated(logged))


def _strangers(operations: Iterable[Operation], present: frozenset[int]) -> Iterator[str]:
    written = set()
    for each in operations:
        numbers = [row.number for write in each.writes for row in write.rows]
        written.update(numbers)
        if each.outcome == "failed":
            shown = sorted(present.intersection(numbers))
            yield from (f"row {number} is there, and operation {each.op} ({each.kind}) failed" for number in shown)
    yield from (f"row {number} is there, and nobody wrote it" for number in sorted(present - written))


def _parts(operations: Iterable[Operation], present: frozenset[int]) -> Iterator[str]:
    for each in operations:
        lasting = _lasting(each)
        there = sum(number in present for number in lasting)
        if 0 < there < len(lasting):
            yield f"operation {each.op} ({each.kind}) is there in part: {there} of {len(lasting)} rows"


def _losses(lost: Iterable[Operation]) -> Iterator[str]:
    for each in lost:
        yield f"operation {each.op} ({each.kind}) was acknowledged at tick {each.tick} and is not there"


def _suffix(operations: Iterable[Operation], lost: Sequence[Operation]) -> Iterator[str]:
    """Require that nothing above the first lost tick is there."""
    if not lost:
        return
    first = min(each.tick for each in lost)
    missing = {each.op for each in lost}
    for each in operations:
        if each.outcome == "ok" and each.tick > first and each.op not in missing and _lasting(each):
            yield f"operation {each.op} at tick {each.tick} is there, and acknowledged tick {first} is not: a hole"


# --- order --------------------------------------------------------------------------------------------------------------


def _order(seen: ReadBack) -> Iterator[str]:
    for name, each in seen.collections.items():
        for one, other in pairwise(each.log):
            if other.tick <= one.tick or other.position <= one.position:
                yield f"{name}: tick {other.tick} at {other.position} comes after tick {one.tick} at {one.position}"


def _offsets(seen: ReadBack, allowed: Allowed) -> Iterator[str]:
    for name, each in seen.collections.items():
        ends: dict[str, int] = {} if allowed.truncated else defaultdict(int)
        for one in each.log:
            for span in one.offsets:
                end = ends.get(span.vchannel, None if allowed.truncated else 0)
                if end is not None and (span.first < end or (span.first > end and not allowed.gaps)):
                    yield f"{name}: {span.vchannel} goes on at offset {span.first} where {end} was due"
                ends[span.vchannel] = span.first + span.count


def _real_time(operations: Iterable[Operation]) -> Iterator[str]:
    """Require that an operation which began after another one ended has a higher tick."""
    acked = [each for each in operations if each.outcome == "ok" and each.ended_ns is not None and _takes_tick(each)]
    by_end = sorted(acked, key=lambda each: each.ended_ns or 0)
    ended, highest = 0, 0
    for each in sorted(acked, key=lambda each: each.started_ns):
        while ended < len(by_end) and (by_end[ended].ended_ns or 0) < each.started_ns:
            highest = max(highest, by_end[ended].tick)
            ended += 1
        if each.tick <= highest:
            yield f"operation {each.op} has tick {each.tick}, and one that ended before it began has {highest}"


def _takes_tick(operation: Operation) -> bool:
    """A cut without new rows answers with the one before it."""
    return operation.kind != "cut"


def _ticks(operations: Iterable[Operation], seen: ReadBack) -> Iterator[str]:
    at = {row.number: one.tick for each in seen.collections.values() for one in each.log for row in _inserted(one)}
    for each in operations:
        if each.outcome != "ok" or not each.tick:
            continue
        for number in (row.number for write in each.writes for row in write.rows):
            if at.get(number, each.tick) != each.tick:
                yield f"row {number} is at tick {at[number]} and was acknowledged at {each.tick}"


def _stays(before: ReadBack | None, seen: ReadBack) -> Iterator[str]:
    if before is None:
        return
    for name, old in before.collections.items():
        new = seen.collections.get(name, NOTHING_SEEN)
        kept_from = new.log[0].tick if new.log else None
        kept = [one for one in old.log if kept_from is not None and one.tick >= kept_from]
        if list(new.log[: len(kept)]) != kept:
            yield f"{name}: what a reader saw of the log before is not what it shows now"
        if name in ADDED_ONLY:
            gone = {row.number for row in old.rows} - {row.number for row in new.rows}
            yield from (f"row {number} of {name} was there before and is gone" for number in sorted(gone))


# --- state --------------------------------------------------------------------------------------------------------------


def _replays(seen: ReadBack) -> Iterator[str]:
    for name, each in seen.collections.items():
        if sorted(_replayed(each.log)) != sorted((row.key, row.number) for row in each.rows):
            yield f"{name}: the current rows are not what the log adds up to"


def _replayed(log: Iterable[Seen]) -> list[tuple[int, int]]:
    rows: dict[int, list[int]] = defaultdict(list)
    for write in (write for one in log for write in one.writes):
        for key in write.keys:
            rows[key].clear()
        for row in write.rows:
            rows[row.key].append(row.number)
    return [(key, number) for key, numbers in rows.items() for number in numbers]


def _replaced_keys(operations: Sequence[Operation], seen: ReadBack) -> Iterator[str]:
    """Check each upserted key without the log: its row is the last acknowledged one's, or an indeterminate one's."""
    shown: dict[int, list[int]] = defaultdict(list)
    for row in seen.collections.get(REPLACED, NOTHING_SEEN).rows:
        shown[row.key].append(row.number)
    possible, settled = _possible(operations)
    for key in sorted({*shown, *settled}):
        numbers, acknowledged = tuple(shown.get(key, ())), settled.get(key, ())
        if len(numbers) > 1:
            yield f"key {key} of {REPLACED} has rows {numbers}, and each upsert replaces"
        elif numbers != acknowledged and numbers not in possible[key]:
            yield f"key {key} of {REPLACED} has row {numbers}, and {acknowledged} was acknowledged last"


def _possible(
    operations: Sequence[Operation],
) -> tuple[Mapping[int, set[tuple[int, ...]]], Mapping[int, tuple[int, ...]]]:
    """Return, by key, what indeterminate operations may have left, and what the last acknowledged one left."""
    possible: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    settled: dict[int, tuple[int, ...]] = {}
    for each in sorted(operations, key=lambda each: each.tick):
        for write in each.writes:
            if write.collection != REPLACED or each.outcome == "failed":
                continue
            for key, numbers in _left(write):
                if each.outcome == "ok" and each.tick:
                    settled[key] = numbers
                else:
                    possible[key].add(numbers)
    return possible, settled


def _left(write: RowWrite) -> Iterator[tuple[int, tuple[int, ...]]]:
    yield from ((key, ()) for key in write.keys)
    yield from ((row.key, (row.number,)) for row in write.rows)
