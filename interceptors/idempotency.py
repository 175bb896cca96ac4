"""Recognises retried writes before any expensive step, and keeps the named producers.

A write that is in the window returns its first result. While another attempt of it is under way,
this attempt waits for that outcome. Otherwise it passes on as the first attempt, and its result
goes into the window. Only writes with a producer stamp are recognised; other writes are never
retried.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from msgspec.structs import replace

from interceptors.chain import Interceptor
from interceptors.errors import ProducerFenced
from interceptors.window import ProducerLimits, Window, Write
from wal.append import AppendGroup, AppendPack, AppendResult, Pack
from wal.errors import (
    Corrupt,
    Ends,
    Indeterminate,
    InvalidArgument,
    Overloaded,
    StreamingNodeError,
    ends_of,
)
from wal.log import StateMap
from wal.position import SEQUENCE_MAX, ProducerStamp
from wal.runtime import carry_on

_Results = dict[AppendGroup, AppendResult]


class _Try(msgspec.Struct, eq=False):
    """A first attempt that is under way; `waiting` is created when another attempt waits for it.

    `key` is set once the sequence is assigned. A group that leaves its pack and is appended again
    gets a new `_Try`.
    """

    write: AppendGroup
    key: Write | None = None
    waiting: asyncio.Future[AppendResult | None] | None = None

    @property
    def stamp(self) -> ProducerStamp:
        """The stamp of the write."""
        assert self.write.producer is not None, "only stamped writes are tries"
        return self.write.producer

    def outcome(self) -> asyncio.Future[AppendResult | None]:
        """Return a future that completes with the result, with None when the attempt ends before
        the log has the write, or with its error.
        """
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        return self.waiting


class Sequences:
    """The highest sequence that each named producer has used or was assigned, over all terms."""

    def __init__(self) -> None:
        self._reached: dict[int, int] = {}

    def reach(self, producer_id: int, sequence: int) -> None:
        """Assign only sequences above this one from now on."""
        self._reached[producer_id] = max(sequence, self._reached.get(producer_id, 0))

    def after(self, producer_id: int, last_sequence: int) -> int:
        """Return the producer's next sequence; `last_sequence` is its highest in the log. Raises
        `InvalidArgument` when all are used.
        """
        reached = max(last_sequence, self._reached.get(producer_id, 0))
        if reached >= SEQUENCE_MAX:
            raise InvalidArgument(
                f"the producer has used sequence {SEQUENCE_MAX} — use another producer"
            )
        return reached + 1

    def forget(self, producer_id: int) -> None:
        """Forget a deleted producer."""
        self._reached.pop(producer_id, None)


class IdempotencyInterceptor(Interceptor):
    """Deduplicates appends with the window of the log, which is recovered before the chain is
    built.
    """

    name = "idempotency"

    def __init__(self, window: Window, sequences: Sequences) -> None:
        self.window = window
        self._sequences = sequences
        self._under_way: dict[Write, _Try] = {}

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append each write that is not in the log yet exactly once. A retry that joins another
        attempt gets the outcome of that attempt.
        """
        tries: list[_Try] = []
        while (other := self._look(pack, tries)) is not None:
            # an error of the other attempt is raised here, too; the caller may then retry
            await asyncio.shield(other.outcome())
        if not pack.groups:
            return
        unnumbered = [attempt for attempt in tries if attempt.key is None]
        if unnumbered:
            pack.draw = partial(self._draw, unnumbered)
            pack.check = partial(self._refuse_fenced, unnumbered)
        try:
            await append(pack)
        except BaseException as error:
            is_decided_later = isinstance(error, asyncio.CancelledError) and pack.ticket is not None
            results = _results_in(pack) if is_decided_later and tries else {}
            for attempt in tries:
                self._failed(attempt, pack, error, results)
            raise
        for attempt in tries:
            self._ended(attempt)

    async def outcome(self, stamp: ProducerStamp) -> AppendResult | None:
        """Return the result of a write after any attempt under way has ended; None when the write
        is not in the log.
        """
        while (attempt := self._under_way.get((stamp.producer_id, stamp.sequence))) is not None:
            with suppress(Exception):  # the error belongs to the appender
                await asyncio.shield(attempt.outcome())
        return self.window.find(stamp)

    async def settled(self, producer_id: int) -> None:
        """Wait until no write of this producer is under way. Fence the producer first, so that no
        new ones arrive.
        """
        while tries := [each for key, each in self._under_way.items() if key[0] == producer_id]:
            # the error belongs to the appender; here only the end matters
            with suppress(Exception):
                await asyncio.shield(tries[0].outcome())

    def _look(self, pack: Pack, tries: list[_Try]) -> _Try | None:
        """Begin attempts for a pack's writes of named producers. Known writes get their result and
        leave the pack; writes with another attempt under way wait for its outcome.

        Returns the other attempt when the pack is one such write alone: then `do_append` waits for
        it. In a larger pack the write leaves the pack and waits by a callback.
        """
        for group in [group for group in pack.groups if group.producer is not None]:
            stamp = group.producer
            assert stamp is not None, "the loop takes stamped groups only"
            try:
                known = None
                if stamp.sequence:
                    known = self.window.find(stamp)
                else:
                    # sequence 0 stands for the producer's next write, which cannot be a retry
                    self.window.check_epoch(stamp)
            except StreamingNodeError as error:
                pack.leave(group, error)
                continue
            if group.settled:
                self.window.settle(stamp.producer_id, group.settled)
            other = (
                self._under_way.get((stamp.producer_id, stamp.sequence)) if stamp.sequence else None
            )
            # the group has left the pack of that attempt, which is still under way
            if other is not None and other.write is group:
                self._end(other, None)
                other = None
            if known is not None:
                pack.leave(group, known)
            elif other is None:
                group.other_try = None
                tries.append(attempt := _Try(group))
                if stamp.sequence:
                    self._give_key(attempt, stamp)
            else:
                group.other_try = other.write
                if pack.come_again is None or len(pack.groups) == 1:
                    return other
                pack.leave(group)
                other.outcome().add_done_callback(partial(_joined, group, pack.come_again))
        return None

    def _refuse_fenced(self, tries: Sequence[_Try], pack: Pack) -> None:
        """Remove the writes of producers that are fenced by now or out of sequences from the pack.
        In a pack of messages raise the error instead.
        """
        for attempt in tries:
            group = attempt.write
            stamp = attempt.stamp
            if group.pack is pack and not stamp.sequence:
                try:
                    # `settled` covers only numbered writes that are under way
                    self.window.check_epoch(stamp)
                    self._next_sequence(stamp.producer_id)
                except StreamingNodeError as error:
                    if pack.messages:  # the session of the messages needs the error
                        raise
                    pack.leave(group, error)

    def _draw(self, tries: Sequence[_Try], pack: Pack) -> None:
        """Assign sequences to writes, in the same step that gives their pack its place in the
        log.
        """
        for attempt in tries:
            write = attempt.write
            stamp = attempt.stamp
            if not stamp.sequence and write.pack is pack:
                sequence = self._next_sequence(stamp.producer_id)
                self._sequences.reach(stamp.producer_id, sequence)
                drawn = write.producer = ProducerStamp(stamp.producer_id, stamp.epoch, sequence)
                self._give_key(attempt, drawn)

    def _next_sequence(self, producer_id: int) -> int:
        return self._sequences.after(producer_id, self.window.last_sequence(producer_id))

    def _give_key(self, attempt: _Try, stamp: ProducerStamp) -> None:
        attempt.key = (stamp.producer_id, stamp.sequence)
        self._under_way[attempt.key] = attempt

    def _ended(self, attempt: _Try) -> None:
        """End an attempt whose append returned, with the outcome of its write; None when the write
        left its pack.
        """
        write = attempt.write
        # an attempt that is not under way never reached the log
        if attempt.key is not None and self._under_way.get(attempt.key) is attempt:
            self._end(attempt, write.outcome)

    def _failed(self, attempt: _Try, pack: Pack, error: BaseException, results: _Results) -> None:
        write = attempt.write
        if attempt.key is None or write.pack is not pack:
            self._ended(attempt)
            return
        if not isinstance(error, asyncio.CancelledError):
            self._end(attempt, error)
        elif pack.ticket is None:
            # the log has no trace of it; an attempt that waits for it goes next
            self._end(attempt, None)
        else:
            pack.ticket.durable.add_done_callback(partial(self._decided, attempt, results[write]))

    def _decided(self, attempt: _Try, result: AppendResult, durable: asyncio.Future[None]) -> None:
        """End an attempt that was cancelled after the log took it: only its ticket decides the
        outcome.
        """
        error = (
            Indeterminate("the outcome of the write is unknown")
            if durable.cancelled()
            else durable.exception()
        )
        self._end(attempt, error or result)

    def _end(self, attempt: _Try, outcome: AppendResult | BaseException | None) -> None:
        stamp = attempt.stamp
        waiting = attempt.waiting
        assert attempt.key is not None, "a write without a sequence is not under way"
        del self._under_way[attempt.key]
        if isinstance(outcome, AppendResult):
            self.window.add(stamp, outcome)
        if waiting is None:
            return
        if isinstance(outcome, BaseException):
            waiting.set_exception(outcome)
            waiting.exception()  # marks it as retrieved: all waiters may be cancelled
        else:
            waiting.set_result(outcome)


def _results_in(pack: Pack) -> _Results:
    """Return the results that the groups of a pack have once the log has synced it."""
    return dict(
        zip(pack.groups, [replace(result, durable=True) for result in pack.results()], strict=True)
    )


def _joined(
    group: AppendGroup,
    come_again: Callable[[AppendGroup], None],
    outcome: asyncio.Future[AppendResult | None],
) -> None:
    """Settle a group with the error of the other attempt, or append the group again, so that the
    window decides.
    """
    error = None if outcome.cancelled() else outcome.exception()
    # the error ends the term: the next term finds out what became of the write
    if error is None or ends_of(error) is not Ends.CALL:
        group.doubt = error if isinstance(error, Indeterminate) else group.doubt
        come_again(group)
    else:
        assert isinstance(error, Exception), "an attempt ends with an error, not a cancellation"
        group.settle(error)


class ProducerRecord(msgspec.Struct, frozen=True, array_like=True):
    """The stored record of a name: the producer id, which is drawn once, the epoch of the last
    opening, and a note of the user.
    """

    producer_id: int
    epoch: int
    note: bytes = b""


class Producers:
    """The named producers of one pchannel; they outlive terms. The id and epoch of a name are
    durable before they are used.

    Call `load` first, and `bind` in each term with the interceptor whose window checks the writes.
    A change that has begun may still take effect when its caller is cancelled.
    """

    def __init__(self, state: StateMap, pchannel: str, limits: ProducerLimits) -> None:
        self.limits = limits
        self.sequences = Sequences()
        self._state = state
        self._prefix = f"producer/{pchannel}/"
        self._records: dict[str, ProducerRecord] = {}
        self._interceptor: IdempotencyInterceptor | None = None
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the stored producers. Raises `Corrupt` for a record that does not decode."""
        stored = await self._state.scan(self._prefix)
        self._records = {
            key.removeprefix(self._prefix): _decode(key, value) for key, value in stored.items()
        }

    def bind(self, interceptor: IdempotencyInterceptor) -> None:
        """Use this interceptor's window from now on."""
        # the window is rebuilt from the log, which does not record openings and deletions
        window = interceptor.window
        window.keep_only(self._live_ids())
        for record in self._records.values():
            window.fence(record.producer_id, record.epoch)
        self._interceptor = interceptor

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 when it has none."""
        return self._bound.window.last_sequence(producer_id)

    async def open(self, name: str) -> ProducerRecord:
        """Open a producer, creating it if it is new, and fence its previous user; durable on
        return.

        Raises `Overloaded` at `producers_max`, and the errors of the log store; after these the
        previous user may be fenced.
        """
        return await carry_on(self._open(name))

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """Store a note that the next opening of the name returns; durable on return. Raises
        `ProducerFenced` unless `epoch` is the current one.
        """
        await carry_on(self._put_note(name, epoch, note))

    async def delete(self, name: str) -> bool:
        """Delete a producer; return whether it existed. After `Indeterminate` the producer is
        fenced.
        """
        return await carry_on(self._delete(name))

    async def _open(self, name: str) -> ProducerRecord:
        async with self._changing:
            record = self._next_record(name)
            await self._put(name, record)
            # so that `last_sequence` is final for the previous user
            await self._fence(record)
            return record

    async def _put_note(self, name: str, epoch: int, note: bytes) -> None:
        async with self._changing:
            record = self._records.get(name)
            if record is None or record.epoch != epoch:
                raise ProducerFenced(epoch, None if record is None else record.epoch)
            await self._put(name, ProducerRecord(record.producer_id, epoch, note))

    async def _delete(self, name: str) -> bool:
        async with self._changing:
            record = self._records.get(name)
            if record is None:
                return False
            gone = ProducerRecord(record.producer_id, record.epoch + 1)
            try:
                await self._state.put({self._prefix + name: None})
            except Indeterminate:
                # A restart may find the producer deleted, and its retries would become new writes.
                # So fence it now.
                self._records[name] = gone
                self._bound.window.fence(gone.producer_id, gone.epoch)
                raise
            del self._records[name]
            window = self._bound.window
            await self._fence(gone)
            window.keep_only(self._live_ids())
            self.sequences.forget(record.producer_id)
            return True

    async def _put(self, name: str, record: ProducerRecord) -> None:
        await self._state.put({self._prefix + name: msgspec.msgpack.encode(record)})
        self._records[name] = record

    async def _fence(self, record: ProducerRecord) -> None:
        self._bound.window.fence(record.producer_id, record.epoch)
        await self._bound.settled(record.producer_id)

    @property
    def _bound(self) -> IdempotencyInterceptor:
        assert self._interceptor is not None, "`bind` is called before the log takes appends"
        return self._interceptor

    def _next_record(self, name: str) -> ProducerRecord:
        record = self._records.get(name)
        if record is not None:
            return ProducerRecord(record.producer_id, record.epoch + 1, record.note)
        if len(self._records) >= self.limits.producers_max:
            raise Overloaded(
                f"there are {len(self._records)} producers, the limit — delete unused ones with "
                "delete_producer()"
            )
        # Draw 62 random bits instead of counting up, because the log still has the ids of deleted
        # producers.
        taken = {0} | self._live_ids()
        while (drawn := secrets.randbits(62)) in taken:
            pass
        return ProducerRecord(drawn, 1)

    def _live_ids(self) -> set[int]:
        return {record.producer_id for record in self._records.values()}


def _decode(key: str, value: bytes) -> ProducerRecord:
    try:
        return msgspec.msgpack.decode(value, type=ProducerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the producer under {key!r} does not decode: {error}") from error
