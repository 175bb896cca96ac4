"""A named producer: writes that can be repeated exactly, by a later call, after a crash, or by
another process.

Each call is one append group or one transaction with one sequence, so the log has all of it or
nothing.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Awaitable
from functools import partial

from interceptors.idempotency import ProducerRecord
from streamingnode.backend import Backend
from streamingnode.rows import Keys, Rows
from streamingnode.writing.transaction import Transaction
from streamingnode.writing.write import Deadline, Write, WriteResult, Writes, by_deadline
from wal.append import AppendGroup, AppendResult
from wal.errors import InvalidArgument
from wal.position import ProducerStamp, check_sequence
from wal.queue import Budget

NOTE_BYTES_MAX = 4_096


def check_note(note: bytes) -> None:
    """Raise `InvalidArgument` unless `note` is a valid note."""
    if not isinstance(note, bytes) or len(note) > NOTE_BYTES_MAX:
        raise InvalidArgument(
            f"the note is not bytes, or over {NOTE_BYTES_MAX} of them — keep it elsewhere"
        )


class Outstanding:
    """The writes of one producer that have begun and not ended; a new one waits while the oldest is
    a whole window behind.

    So after a crash, every write that may be in the log is among those that the log remembers.
    Waiting calls go first come, first served. Lives on the event loop.
    """

    def __init__(self, width: int) -> None:
        self._span = Budget(width)
        """It holds one unit for each write begun since the oldest one under way, inclusive."""
        self._next = 0
        self._sequences: OrderedDict[int, int] = OrderedDict()
        """By number, oldest first: the lowest sequence that each write may have."""
        self._ascending: list[int] = []
        """The same sequences in order."""

    @property
    def settled(self) -> int:
        """The lowest sequence that a write under way may have; call it only while there is one."""
        return self._ascending[0]

    async def enter(self, sequence: int) -> int:
        """Begin a write with this sequence or a higher one; return its number, counted from 0.

        A call that is cancelled while it waits begins nothing.
        """
        await self._span.take(1)
        number = self._next
        self._next = self._next + 1
        self._sequences[number] = sequence
        insort(self._ascending, sequence)
        return number

    def leave(self, number: int) -> None:
        """End a write: its outcome is known, or its caller has stopped waiting."""
        sequence = self._sequences.pop(number)
        del self._ascending[bisect_left(self._ascending, sequence)]
        self._span.give_back(
            self._span.held_bytes - self._next + next(iter(self._sequences), self._next)
        )


class Producer:
    """One opening of a named producer; made by `Node.producer`, used on the node's event loop by
    any number of tasks.

    The sequence of a write is `sequence=`, from 1 to 2^63 - 1. Without it, the write gets one more
    than the highest sequence so far, when it goes to the log; a transaction gets it at its commit.
    A write that is already in the log is not written again: the call returns the first result, even
    if it now has other rows. So after an error, a deadline or a crash, repeat the call with the
    same sequence.

    Sequences may have gaps and may come out of order. A sequence below the newest
    `producers.results_per_producer_max` results, and below all writes under way, raises
    `SequenceTooOld`. That is also how many writes may be under way before others wait; a
    transaction counts from its commit on. Opening the name again fences this producer: its calls
    raise `ProducerFenced`.
    """

    def __init__(self, name: str, opened: ProducerRecord, backend: Backend, writes: Writes) -> None:
        self._name = name
        self._id = opened.producer_id
        self._epoch = opened.epoch
        self._note = opened.note
        self._backend = backend
        self._writes = writes
        self._outstanding = Outstanding(backend.config.producers.results_per_producer_max)

    @property
    def name(self) -> str:
        """The producer's name."""
        return self._name

    @property
    def epoch(self) -> int:
        """How often the name was opened, including this time."""
        return self._epoch

    @property
    def last_sequence(self) -> int:
        """The highest sequence in the log, 0 for none; after a restart, go on with the next one."""
        return self._backend.last_sequence(self._id)

    @property
    def note(self) -> bytes:
        """The last note of `put_note`, by this opening or an earlier one; empty at first."""
        return self._note

    async def put_note(self, note: bytes) -> None:
        """Store up to `NOTE_BYTES_MAX` bytes with the name, for its next opening; durable when this
        returns.

        A note is not atomic with the producer's writes: put the note that describes a write before
        that write, never after it. Raises `ProducerFenced`, and the errors of a write; after
        `Indeterminate`, the next opening finds this note or the previous one.
        """
        check_note(note)
        await self._backend.put_note(self._name, self._epoch, note)
        self._note = note

    async def insert(
        self,
        collection: str,
        rows: Rows,
        *,
        sequence: int | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> WriteResult:
        """Add rows, once, at one tick; over one append group they go as a transaction. Raises as
        `Node.insert` does.
        """
        return await self._run(
            self._writes.write("insert", collection, partition), rows, sequence, timeout
        )

    async def upsert(
        self,
        collection: str,
        rows: Rows,
        *,
        sequence: int | None = None,
        partition: str | None = None,
        timeout: float | None = None,
    ) -> WriteResult:
        """Replace the rows of these keys, once, in one transaction of any size. Raises as
        `Node.upsert` does.
        """
        return await self._run(
            self._writes.write("upsert", collection, partition), rows, sequence, timeout
        )

    async def delete(
        self,
        collection: str,
        keys: Keys,
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> WriteResult:
        """Delete the rows of these keys, once, at one tick. Raises as `Node.delete` does."""
        return await self._run(self._writes.write("delete", collection), keys, sequence, timeout)

    def transaction(
        self,
        *,
        sequence: int | None = None,
        keepalive_s: float | None = None,
        timeout: float | None = None,
    ) -> Transaction:
        """Return a transaction that is written exactly once:
        `async with producer.transaction(sequence=7) as txn`.

        If the write is already in the log, leaving the block writes nothing, and `txn.result` is
        the first result. `keepalive_s` and `timeout` are those of `Node.transaction`. With a given
        sequence, a block that stays open while `producers.results_per_producer_max` later writes
        end raises `SequenceTooOld` at its commit.
        """
        deadline = None if timeout is None else Deadline(timeout)
        append = partial(self._append, self._stamp(sequence))
        return Transaction(
            self._writes, keepalive_s=keepalive_s, deadline=deadline, append_commit=append
        )

    def _run(
        self, write: Write, rows: Rows | Keys, sequence: int | None, timeout: float | None
    ) -> Awaitable[WriteResult]:
        deadline = None if timeout is None else Deadline(timeout)
        group = write.at_once(rows, self._writes.group_bytes_max)
        last = list[AppendGroup]()
        stamp = self._stamp(sequence)
        if group is not None and deadline is None:
            return self._append(stamp, group)

        def append(group: AppendGroup) -> Awaitable[AppendResult]:
            last.append(group)  # the group that makes the write appear
            return self._append_now(stamp, group)

        async def write_in_groups() -> WriteResult:
            batches = await write.check(rows)
            slices = write.slices(batches, self._writes.group_bytes_max)
            if len(slices) == 1:
                return await append(write.group(write.pieces(slices[0])))
            async with Transaction(self._writes, deadline=deadline, append_commit=append) as txn:
                await txn.add(write, batches)
                return await txn.commit()

        async def run() -> WriteResult:
            number = await self._enter(stamp)
            try:
                return await (write_in_groups() if group is None else append(group))
            finally:
                self._outstanding.leave(number)

        if deadline is None:
            return run()

        def begun() -> bool:
            return any(group.begun for group in last)

        return by_deadline(deadline, run, f"the {write.kind}", begun=begun)

    def _stamp(self, sequence: int | None) -> ProducerStamp:
        """Return the stamp of a write; later automatic sequences are above a given one."""
        if sequence is None:
            return ProducerStamp(self._id, self._epoch, 0)
        self._backend.reach(self._id, check_sequence(sequence))
        return ProducerStamp(self._id, self._epoch, sequence)

    def _enter(self, stamp: ProducerStamp) -> Awaitable[int]:
        """Begin a write, after waiting for its turn among the outstanding ones."""
        return self._outstanding.enter(stamp.sequence or self.last_sequence + 1)

    async def _append(self, stamp: ProducerStamp, group: AppendGroup) -> AppendResult:
        """Append as a write of its own."""
        number = await self._enter(stamp)
        try:
            return await self._append_now(stamp, group)
        finally:
            self._outstanding.leave(number)

    def _append_now(self, stamp: ProducerStamp, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append under the stamp of a write that is outstanding."""
        group.producer = stamp
        group.settled = self._outstanding.settled
        return self._backend.append(group)
