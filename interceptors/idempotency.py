"""Recognises retries, in front of everything that costs something, and keeps the named producers
whose writes they are.

A write that is in the window gets its first result back. While another try of it is under way, this
one waits for that outcome. Otherwise it passes, as the first try, and what becomes of it is
remembered. Only writes of producers are recognised: others nobody sends again.
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
    """A first try under way; `waiting` is made when somebody waits for it.

    `key` is there once its sequence is. A group that leaves its pack to come again has another try
    then, not this one.
    """

    write: AppendGroup
    key: Write | None = None
    waiting: asyncio.Future[AppendResult | None] | None = None

    @property
    def stamp(self) -> ProducerStamp:
        """Which write it is."""
        assert self.write.producer is not None, "only stamped writes are tries"
        return self.write.producer

    def outcome(self) -> asyncio.Future[AppendResult | None]:
        """Return what ends with the try's result, None when it was given up before the log had it,
        or what it raised.
        """
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        return self.waiting


class Sequences:
    """The highest sequence that each named producer was given or has drawn, over all terms."""

    def __init__(self) -> None:
        self._reached: dict[int, int] = {}

    def reach(self, producer_id: int, sequence: int) -> None:
        """Draw no sequence up to this one."""
        self._reached[producer_id] = max(sequence, self._reached.get(producer_id, 0))

    def after(self, producer_id: int, last_sequence: int) -> int:
        """Return the producer's next sequence; `last_sequence` is its highest in the log. Raises
        `InvalidArgument` when none is left.
        """
        reached = max(last_sequence, self._reached.get(producer_id, 0))
        if reached >= SEQUENCE_MAX:
            raise InvalidArgument(
                f"the producer has used sequence {SEQUENCE_MAX} — use another producer"
            )
        return reached + 1

    def forget(self, producer_id: int) -> None:
        """Forget a producer that is deleted."""
        self._reached.pop(producer_id, None)


class IdempotencyInterceptor(Interceptor):
    """Wraps the append path with the window of its log, which is recovered before the chain is
    built.
    """

    name = "idempotency"

    def __init__(self, window: Window, sequences: Sequences) -> None:
        self.window = window
        self._sequences = sequences
        self._under_way: dict[Write, _Try] = {}

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append writes that are not in the log yet, once. A retry is told what the try was told
        that it joined.
        """
        tries: list[_Try] = []
        while (other := self._look(pack, tries)) is not None:
            # its error is this one's, which may be repeated then
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
        """Return what a write came to, once a try that is under way has ended; None when it is not
        in the log.
        """
        while (attempt := self._under_way.get((stamp.producer_id, stamp.sequence))) is not None:
            with suppress(Exception):  # it is its appender's
                await asyncio.shield(attempt.outcome())
        return self.window.find(stamp)

    async def settled(self, producer_id: int) -> None:
        """Return once no write of this producer is under way; fence it first, or new ones may
        come.
        """
        while tries := [each for key, each in self._under_way.items() if key[0] == producer_id]:
            with suppress(Exception):  # it is its appender's; here only its end matters
                await asyncio.shield(tries[0].outcome())

    def _look(self, pack: Pack, tries: list[_Try]) -> _Try | None:
        """Begin the tries of a pack's named writes; those that are known are told, those under way
        wait for that outcome.

        Returns the other try when the pack is one such write alone, which waits here; others leave
        their pack for it.
        """
        for group in [group for group in pack.groups if group.producer is not None]:
            stamp = group.producer
            assert stamp is not None, "only those are looked at"
            try:
                known = None
                if stamp.sequence:
                    known = self.window.find(stamp)
                else:
                    # the producer's next write, whichever that will be, which nobody can have sent
                    # before
                    self.window.check_epoch(stamp)
            except StreamingNodeError as error:
                pack.leave(group, error)
                continue
            if group.settled:
                self.window.settle(stamp.producer_id, group.settled)
            other = (
                self._under_way.get((stamp.producer_id, stamp.sequence)) if stamp.sequence else None
            )
            # it left that pack, which is still under way
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
        """Let those leave whose producer may write no more, fenced since or at its last sequence;
        messages raise.
        """
        for attempt in tries:
            group = attempt.write
            stamp = attempt.stamp
            if group.pack is pack and not stamp.sequence:
                try:
                    self.window.check_epoch(stamp)  # `settled` knows only what is under way
                    self._next_sequence(stamp.producer_id)
                except StreamingNodeError as error:
                    if pack.messages:  # its session has to hear of it
                        raise
                    pack.leave(group, error)

    def _draw(self, tries: Sequence[_Try], pack: Pack) -> None:
        """Give writes their sequences, in the step of their pack's place in the log."""
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
        """End a try whose append returned: what it came to, or nothing, when it left its pack."""
        write = attempt.write
        # an attempt that is not under way came nowhere near the log
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
            self._end(attempt, None)  # it leaves no trace, and whoever waits for it comes next
        else:
            pack.ticket.durable.add_done_callback(partial(self._decided, attempt, results[write]))

    def _decided(self, attempt: _Try, result: AppendResult, durable: asyncio.Future[None]) -> None:
        """End a try that was cancelled after the log had it: its ticket alone decides."""
        error = (
            Indeterminate("nobody knows what became of it")
            if durable.cancelled()
            else durable.exception()
        )
        self._end(attempt, error or result)

    def _end(self, attempt: _Try, outcome: AppendResult | BaseException | None) -> None:
        stamp = attempt.stamp
        waiting = attempt.waiting
        assert attempt.key is not None, "what has no sequence is not under way"
        del self._under_way[attempt.key]
        if isinstance(outcome, AppendResult):
            self.window.add(stamp, outcome)
        if waiting is None:
            return
        if isinstance(outcome, BaseException):
            waiting.set_exception(outcome)
            waiting.exception()  # counts as heard: its waiters may all have been cancelled
        else:
            waiting.set_result(outcome)


def _results_in(pack: Pack) -> _Results:
    """Return the results of the groups of a pack once the log has it synced."""
    return dict(
        zip(pack.groups, [replace(result, durable=True) for result in pack.results()], strict=True)
    )


def _joined(
    group: AppendGroup,
    come_again: Callable[[AppendGroup], None],
    outcome: asyncio.Future[AppendResult | None],
) -> None:
    """Tell a group what the other try of its write came to, or let it look again."""
    error = None if outcome.cancelled() else outcome.exception()
    # the term ends: what becomes of the write is told in the next one
    if error is None or ends_of(error) is not Ends.CALL:
        group.doubt = error if isinstance(error, Indeterminate) else group.doubt
        come_again(group)
    else:
        assert isinstance(error, Exception), "a try ends with an error"
        group.settle(error)


class ProducerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is stored for a name: its id, drawn once, the epoch it was last opened with, and what
    its user noted.
    """

    producer_id: int
    epoch: int
    note: bytes = b""


class Producers:
    """The named producers of one pchannel, which outlive terms: each name's id, and its epoch,
    durable before it is used.

    `load` comes first, and `bind` in each term, with the interceptor whose window writes are
    checked against. What was begun here may still take place when its caller is cancelled.
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
        """Read the producers that earlier runs left. Raises `Corrupt` for one that cannot be
        read.
        """
        stored = await self._state.scan(self._prefix)
        self._records = {
            key.removeprefix(self._prefix): _decode(key, value) for key, value in stored.items()
        }

    def bind(self, interceptor: IdempotencyInterceptor) -> None:
        """Check against this interceptor's window from now on."""
        # rebuilt from the log, which does not say who was opened or deleted
        window = interceptor.window
        window.keep_only(self._live_ids())
        for record in self._records.values():
            window.fence(record.producer_id, record.epoch)
        self._interceptor = interceptor

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 when it has none."""
        return self._bound.window.last_sequence(producer_id)

    async def open(self, name: str) -> ProducerRecord:
        """Open a producer, made if it is new, and fence whoever opened it before; durable when this
        returns.

        Raises `Overloaded` when there are too many, and what the log store raises; the older one
        may be fenced then.
        """
        return await carry_on(self._open(name))

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """Note something with a name for its next opening. Raises `ProducerFenced` unless `epoch`
        is the last one.
        """
        await carry_on(self._put_note(name, epoch, note))

    async def delete(self, name: str) -> bool:
        """Forget a producer; return whether there was one. It is fenced when nobody knows whether
        the store forgot it.
        """
        return await carry_on(self._delete(name))

    async def _open(self, name: str) -> ProducerRecord:
        async with self._changing:
            record = self._next_record(name)
            await self._put(name, record)
            # so that `last_sequence` says all there will ever be of the older one
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
                # After a restart it may be unknown, and its retries new writes: so it writes
                # nothing any more.
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
        assert self._interceptor is not None, "bound before the log takes appends"
        return self._interceptor

    def _next_record(self, name: str) -> ProducerRecord:
        record = self._records.get(name)
        if record is not None:
            return ProducerRecord(record.producer_id, record.epoch + 1, record.note)
        if len(self._records) >= self.limits.producers_max:
            raise Overloaded(
                f"there are {len(self._records)} producers, the limit — delete_producer() those of "
                "no use"
            )
        # Drawn, 62 bits of it, and never counted up, because the log remembers the ids of deleted
        # ones.
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
