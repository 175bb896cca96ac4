"""The named producers of one log: an id for each name, and an epoch that each opening raises, durable before it is used.

In come names; out go opened producers. The names outlive terms of the log; the window they are checked against is that of
the interceptor of the present term, which `bind` brings. A window that was rebuilt knows only what the log says, so `bind`
also tells it which epochs were given out since, and which producers are gone. The places of writes that
somebody may still send are kept here, too.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from interceptors.errors import ProducerFenced
from interceptors.idempotency.interceptor import IdempotencyInterceptor
from interceptors.idempotency.window import Places, ProducerLimits
from wal.errors import Corrupt, Indeterminate, Overloaded
from wal.log import LogStore
from wal.outlast import carry_on
from wal.producer_stamp import NODE_PRODUCER_ID, Place, ProducerStamp

_ID_BITS = 62


class ProducerRecord(msgspec.Struct, frozen=True, array_like=True):
    """What is stored for a name: its id, drawn once, the epoch it was last opened with, and what its user noted."""

    producer_id: int
    epoch: int
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class OpenedProducer:
    """A producer as it was opened; `last_sequence` is its highest sequence in the log, 0 for none."""

    producer_id: int
    epoch: int
    last_sequence: int
    note: bytes


class Producers:
    """The producers of one pchannel; lives on the event loop. `load` and `bind` come first."""

    def __init__(
        self,
        store: LogStore,
        pchannel: str,
        limits: ProducerLimits | None = None,
        *,
        draw_id: Callable[[], int] = lambda: secrets.randbits(_ID_BITS),
    ) -> None:
        self.limits = limits or ProducerLimits()
        self.places = Places()
        self._store = store
        self._prefix = f"producer/{pchannel}/"
        self._draw_id = draw_id
        self._records: dict[str, ProducerRecord] = {}
        self._interceptor: IdempotencyInterceptor | None = None
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the producers that earlier runs left. Raises `Corrupt` for one that cannot be read."""
        stored = await self._store.scan_meta(self._prefix)
        self._records = {key.removeprefix(self._prefix): _decode(key, value) for key, value in stored.items()}

    def bind(self, interceptor: IdempotencyInterceptor) -> None:
        """Check against this interceptor's window from now on."""
        window = interceptor.window
        window.keep_only(self._live_ids())
        window.fence(NODE_PRODUCER_ID, 0)
        for record in self._records.values():
            window.fence(record.producer_id, record.epoch)
        for producer_id in self._live_ids():
            self.places.reach(producer_id, window.last_sequence(producer_id))
        # What took its place while the window was rebuilt was not held there: it may be in the log, and forgotten again.
        for write in self.places.writes():
            if write not in window.held and window.has_forgotten(write):
                self.places.let_go(write)
        window.held = self.places
        self._interceptor = interceptor

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all producers, sorted."""
        return tuple(sorted(self._records))

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 when it has none."""
        return self._bound.window.last_sequence(producer_id)

    def place(self, producer_id: int, epoch: int, sequence: int) -> Place:
        """Return the place of a write: nothing of it is forgotten, and no floor refuses it, while something refers to that.

        A write that is forgotten already gets a place that keeps nothing, and will be refused.
        """
        place = Place(ProducerStamp(producer_id, epoch, sequence))
        write = (producer_id, sequence)
        if write not in self.places and self._bound.window.has_forgotten(write):
            return place
        return self.places.hold(place)

    async def open(self, name: str) -> OpenedProducer:
        """Open a producer, made if it is new, and fence whoever opened it before; durable when this returns.

        What an older one still has under way is waited for, so that `last_sequence` says all there will ever be of it.
        Raises `Overloaded` when there are too many, and what the log store raises; then the older one may be fenced, as it
        may when the call is cancelled.
        """
        return await carry_on(self._open(name))

    async def put_note(self, name: str, epoch: int, note: bytes) -> None:
        """Note something with a name for its next opening; durable when this returns.

        Raises `ProducerFenced` unless `epoch` is the last one, and what the log store raises. Cancelled, it may still take
        place.
        """
        await carry_on(self._put_note(name, epoch, note))

    async def delete(self, name: str) -> bool:
        """Forget a producer; return whether there was one. A later one of this name starts anew.

        Cancelled, it may still take place. Raises what the log store raises; the producer is fenced when nobody knows
        whether the store has forgotten it.
        """
        return await carry_on(self._delete(name))

    async def _open(self, name: str) -> OpenedProducer:
        async with self._changing:
            record = self._next_record(name)
            await self._store.put_meta({self._prefix + name: msgspec.msgpack.encode(record)})
            self._records[name] = record
            self._bound.window.fence(record.producer_id, record.epoch)
            await self._bound.settled(record.producer_id)
            last_sequence = self.last_sequence(record.producer_id)
            return OpenedProducer(record.producer_id, record.epoch, last_sequence, record.note)

    async def _put_note(self, name: str, epoch: int, note: bytes) -> None:
        async with self._changing:
            record = self._records.get(name)
            if record is None or record.epoch != epoch:
                raise ProducerFenced(epoch, None if record is None else record.epoch)
            noted = ProducerRecord(record.producer_id, epoch, note)
            await self._store.put_meta({self._prefix + name: msgspec.msgpack.encode(noted)})
            self._records[name] = noted

    async def _delete(self, name: str) -> bool:
        async with self._changing:
            record = self._records.get(name)
            if record is None:
                return False
            try:
                await self._store.put_meta({self._prefix + name: None})
            except Indeterminate:
                # After a restart it may be unknown, and its retries new writes: so it writes nothing any more.
                self._records[name] = ProducerRecord(record.producer_id, record.epoch + 1)
                self._bound.window.fence(record.producer_id, record.epoch + 1)
                raise
            del self._records[name]
            window = self._bound.window
            window.fence(record.producer_id, record.epoch + 1)
            await self._bound.settled(record.producer_id)
            window.keep_only(self._live_ids())
            self.places.forget(record.producer_id)
            return True

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
        return ProducerRecord(self._new_id(), 1)

    def _new_id(self) -> int:
        """Draw an id that no producer has: never counted up, because the log remembers the ids of deleted ones."""
        taken = {0} | self._live_ids()
        while (drawn := self._draw_id()) in taken:
            pass
        return drawn

    def _live_ids(self) -> set[int]:
        return {NODE_PRODUCER_ID, *(record.producer_id for record in self._records.values())}


def _decode(key: str, value: bytes) -> ProducerRecord:
    try:
        return msgspec.msgpack.decode(value, type=ProducerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the producer under {key!r} does not decode: {error}") from error
