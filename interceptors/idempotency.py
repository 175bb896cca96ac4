"""Recognises retries, in front of everything that costs something, and keeps the named producers whose writes they are.

A group whose write is in the window gets its first result back. While another try of it is under way, this one waits for
that outcome. Otherwise it passes, as the first try, and what becomes of it is remembered.
"""

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from interceptors.errors import ProducerFenced
from interceptors.window import Places, ProducerLimits, Window, Write
from wal.errors import Corrupt, Indeterminate, Overloaded
from wal.log import Append, AppendGroup, AppendResult, Interceptor, LogStore
from wal.position import NODE_PRODUCER_ID, MessageId, Place, ProducerStamp
from wal.runtime import carry_on


@dataclass(slots=True, eq=False)
class _Try:
    """A first try under way; `waiting` is made when somebody waits for it."""

    group: AppendGroup
    waiting: asyncio.Future[AppendResult | None] | None = None

    async def outcome(self) -> AppendResult | None:
        """Return the try's result, None when it was given up before the log had it. Raises what it raised."""
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.waiting)


class IdempotencyInterceptor(Interceptor):
    """Wraps the append path with the window of its log, which is recovered before the chain is built."""

    name = "idempotency"

    def __init__(self, window: Window, places: Places, message_id: type[MessageId]) -> None:
        self.window = window
        self._places = places
        self._message_id = message_id
        self._under_way: dict[Write, _Try] = {}

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append a write that is not in the log yet, once. A retry raises what the try raised that it joined."""
        stamp = group.producer
        if stamp is None:
            return await append(group)
        if stamp.sequence:
            known = self.window.find(stamp)
            while known is None and (other := self._under_way.get((stamp.producer_id, stamp.sequence))) is not None:
                group.other_try = other.group
                known = await other.outcome() or self.window.find(stamp)
            if known is not None:
                return known
            group.other_try = None
            attempt = self._under_way[stamp.producer_id, stamp.sequence] = _Try(group)
        else:  # the producer's next write, whichever that will be, which nobody can have sent before
            self.window.check_epoch(stamp)
            attempt = _Try(group)
            group.draw = partial(self._draw, attempt, stamp)
        try:
            result = await append(group)
        except BaseException as error:
            self._failed(attempt, error)
            raise
        self._end(attempt, result)
        return result

    async def settled(self, producer_id: int) -> None:
        """Return once no write of this producer is under way; fence it first, or new ones may come."""
        while tries := [each for key, each in self._under_way.items() if key[0] == producer_id]:
            with suppress(Exception):  # it is its appender's; here only its end matters
                await tries[0].outcome()

    def _draw(self, attempt: _Try, stamp: ProducerStamp) -> None:
        """Give a group its sequence, in the step of its place in the log."""
        self.window.check_epoch(stamp)  # it may have been fenced since, and `settled` knows only what is under way
        drawn = attempt.group.producer = self._places.draw(stamp.producer_id, stamp.epoch)
        attempt.group.draw = None
        self._under_way[drawn.producer_id, drawn.sequence] = attempt

    def _failed(self, attempt: _Try, error: BaseException) -> None:
        group = attempt.group
        ticket, stamp = group.ticket, group.producer
        assert stamp is not None, "only stamped groups are tries"
        if not stamp.sequence:
            group.draw = None  # it came nowhere near the log
            return
        if group.place is None or group.place.stamp is not stamp:
            # Its sequence was drawn, and its outcome may be open: from here on whoever has the group may send it again.
            group.place = self._places.hold(Place(stamp))
        if not isinstance(error, asyncio.CancelledError):
            self._end(attempt, error)
        elif ticket is None:
            self._end(attempt, None)  # it leaves no trace, and whoever waits for it comes next
        else:
            # Now, because whoever appended it may use its messages again; shards and offsets are stamped for good.
            result = replace(group.result(self._message_id), durable=True)
            ticket.durable.add_done_callback(partial(self._decided, attempt, result))

    def _decided(self, attempt: _Try, result: AppendResult, durable: asyncio.Future[None]) -> None:
        """End a try that was cancelled after the log had it: its ticket alone decides."""
        error = Indeterminate("nobody knows what became of it") if durable.cancelled() else durable.exception()
        self._end(attempt, error or result)

    def _end(self, attempt: _Try, outcome: AppendResult | BaseException | None) -> None:
        stamp, waiting = attempt.group.producer, attempt.waiting
        assert stamp is not None, "only stamped groups are tries"
        del self._under_way[stamp.producer_id, stamp.sequence]
        if isinstance(outcome, AppendResult):
            self.window.add(stamp, outcome)
            attempt.group.place = None  # now: frames of a `Redo` refer to the group until garbage is collected
        if waiting is None:
            return
        if isinstance(outcome, BaseException):
            waiting.set_exception(outcome)
            waiting.exception()  # counts as heard: its waiters may all have been cancelled
        else:
            waiting.set_result(outcome)


class ProducerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is stored for a name: its id, drawn once, the epoch it was last opened with, and what its user noted."""

    producer_id: int
    epoch: int
    note: bytes = b""


class Producers:
    """The named producers of one pchannel, which outlive terms: each name's id, and its epoch, durable before it is used.

    `load` comes first, and `bind` in each term, with the interceptor whose window writes are checked against. What was begun
    here may still take place when its caller is cancelled.
    """

    def __init__(self, store: LogStore, pchannel: str, limits: ProducerLimits) -> None:
        self.limits = limits
        self.places = Places()
        self._store = store
        self._prefix = f"producer/{pchannel}/"
        self._records: dict[str, ProducerRecord] = {}
        self._interceptor: IdempotencyInterceptor | None = None
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the producers that earlier runs left. Raises `Corrupt` for one that cannot be read."""
        stored = await self._store.scan_meta(self._prefix)
        self._records = {key.removeprefix(self._prefix): _decode(key, value) for key, value in stored.items()}

    def bind(self, interceptor: IdempotencyInterceptor) -> None:
        """Check against this interceptor's window from now on."""
        window = interceptor.window  # rebuilt from the log, which does not say who was opened or deleted
        window.keep_only(self._live_ids())
        window.fence(NODE_PRODUCER_ID, 0)
        for record in self._records.values():
            window.fence(record.producer_id, record.epoch)
        for producer_id in self._live_ids():
            self.places.reach(producer_id, window.last_sequence(producer_id))
        # What took its place while the window was rebuilt was not held there: it may be in the log, and forgotten again.
        for write in self.places.writes():
            if write not in window.held and window.has_forgotten(write):
                self.places.release(write)
        window.held = self.places
        self._interceptor = interceptor

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 when it has none."""
        return self._bound.window.last_sequence(producer_id)

    def place(self, producer_id: int, epoch: int, sequence: int) -> Place:
        """Return the place of a write: nothing of it is forgotten while something refers to that."""
        place = Place(ProducerStamp(producer_id, epoch, sequence))
        write = (producer_id, sequence)
        if write not in self.places and self._bound.window.has_forgotten(write):
            return place  # it keeps nothing, and the write will be refused
        return self.places.hold(place)

    async def open(self, name: str) -> ProducerRecord:
        """Open a producer, made if it is new, and fence whoever opened it before; durable when this returns.

        Raises `Overloaded` when there are too many, and what the log store raises; the older one may be fenced then.
        """
        return await carry_on(self._open(name))

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """Note something with a name for its next opening. Raises `ProducerFenced` unless `epoch` is the last one."""
        await carry_on(self._put_note(name, epoch, note))

    async def delete(self, name: str) -> bool:
        """Forget a producer; return whether there was one. It is fenced when nobody knows whether the store forgot it."""
        return await carry_on(self._delete(name))

    async def _open(self, name: str) -> ProducerRecord:
        async with self._changing:
            record = self._next_record(name)
            await self._put(name, record)
            await self._fence(record)  # so that `last_sequence` says all there will ever be of the older one
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
                await self._store.put_meta({self._prefix + name: None})
            except Indeterminate:
                # After a restart it may be unknown, and its retries new writes: so it writes nothing any more.
                self._records[name] = gone
                self._bound.window.fence(gone.producer_id, gone.epoch)
                raise
            del self._records[name]
            window = self._bound.window
            await self._fence(gone)
            window.keep_only(self._live_ids())
            self.places.forget(record.producer_id)
            return True

    async def _put(self, name: str, record: ProducerRecord) -> None:
        await self._store.put_meta({self._prefix + name: msgspec.msgpack.encode(record)})
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
            raise Overloaded(f"there are {len(self._records)} producers, the limit — delete_producer() those of no use")
        # Drawn, 62 bits of it, and never counted up, because the log remembers the ids of deleted ones.
        taken = {0} | self._live_ids()
        while (drawn := secrets.randbits(62)) in taken:
            pass
        return ProducerRecord(drawn, 1)

    def _live_ids(self) -> set[int]:
        return {NODE_PRODUCER_ID, *(record.producer_id for record in self._records.values())}


def _decode(key: str, value: bytes) -> ProducerRecord:
    try:
        return msgspec.msgpack.decode(value, type=ProducerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the producer under {key!r} does not decode: {error}") from error
