"""Named readers: a position in a log that survives restarts, and the lease that keeps truncation
behind it.

A reader is of one collection or of several, and on each of them no other has its name. A position
only moves forward. The lease is what is durable, never what is being written: after a crash the
reader resumes there.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from scanner.deliver_policy import ReaderBusy, ReaderNotFound, StartingPoint
from wal.errors import Corrupt, InvalidArgument, OnShutdown, StreamingNodeError
from wal.log import StateMap
from wal.runtime import carry_on, mark_heard

_PREFIX = "reader/"


class ReaderPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where a named reader resumes: from `position` in log `pchannel`, above `tick`."""

    pchannel: str
    wal_name: str
    position: int
    tick: int

    @property
    def start(self) -> StartingPoint:
        """Where a scanner resumes."""
        return StartingPoint(self.position, self.tick)


class KnownReader(NamedTuple):
    """A named reader: the ids of its collections, where it resumes, and whether somebody has it
    open, or is about to.
    """

    collections: frozenset[int]
    name: str
    position: ReaderPosition
    is_open: bool


class NamedReaders:
    """The named readers of all collections of one node; lives on the event loop. `load` comes
    first.

    `live` gives the names of the collections that exist, by id. Readers without one hold nothing:
    nobody can open them.
    """

    def __init__(self, state: StateMap, live: Callable[[], Mapping[int, str]]) -> None:
        self._state = state
        self._live = live
        self._positions: dict[str, ReaderPosition] = {}
        # None while a reader is being opened or deleted
        self._open: dict[str, NamedReader | None] = {}
        self._in_doubt: set[str] = set()
        """Readers of which nobody knows whether the store has them: saved again when they are
        opened, held until then.
        """

    async def load(self) -> None:
        """Read the positions that earlier runs left. Raises `Corrupt` for one that cannot be
        read.
        """
        stored = await self._state.scan(_PREFIX)
        self._positions = {key: _decode_position(key, value) for key, value in stored.items()}

    def lease(self, pchannel: str) -> int | None:
        """Return the lowest position of a log that a named reader still needs; None without one."""
        live = self._live()
        needed = (
            at.position
            for key, at in self._positions.items()
            if at.pchannel == pchannel and _is_live(key, live)
        )
        return min(needed, default=None)

    def find(self, collections: Collection[int], name: str) -> ReaderPosition | None:
        """Return the durable position of the reader of these collections that has this name; None
        when there is none.

        Raises `InvalidArgument` when the reader that has this name on one of them has others that
        exist.
        """
        return self._positions.get(self._key(collections, name))

    async def open(
        self, collections: Collection[int], name: str, *, start: ReaderPosition
    ) -> "NamedReader":
        """Return the reader, at its stored position, or at `start` when it is new; durable when
        this returns.

        Raises `ReaderBusy` while it is open elsewhere, and `InvalidArgument` as `find` does.
        """
        with self._reserved(key := self._key(collections, name)):
            if key not in self._positions or key in self._in_doubt:
                await self._put(key, self._positions.get(key, start))
            reader = self._open[key] = NamedReader(self, key, self._positions[key])
        return reader

    async def delete_reader(self, collection_id: int, name: str) -> bool:
        """Forget a collection's reader, which may have others too, and its lease; returns whether
        there was one.

        Raises `ReaderBusy` while it is open. Cancelled, it may still take place.
        """
        return await carry_on(self._delete(collection_id, name))

    async def move(self, collection_id: int, name: str, to: ReaderPosition) -> None:
        """Have a collection's reader resume at `to`, ahead of its place or behind it; durable when
        this returns.

        Raises `ReaderBusy` while it is open, `ReaderNotFound` when there is none. Cancelled, it may
        still take place.
        """
        await carry_on(self._move(collection_id, name, to))

    def known(self) -> Iterator[KnownReader]:
        """Yield every reader that holds the log."""
        for key, at in self._positions.items():
            yield KnownReader(_collection_ids(key), key.rpartition("/")[2], at, key in self._open)

    async def forget_dropped(self) -> None:
        """Forget the readers without a collection that exists; none is open yet."""
        live = self._live()
        keys = [key for key in self._positions if not _is_live(key, live)]
        if keys:
            await self._state.put(dict.fromkeys(keys))
        for key in keys:
            del self._positions[key]

    async def close(self) -> None:
        """Close every reader; idempotent."""
        for reader in list(self._open.values()):
            if reader is not None:
                await reader.close()

    async def save(self, key: str, position: ReaderPosition) -> None:
        """Make a reader's position durable, and move its lease there."""
        await self._state.put({key: msgspec.msgpack.encode(position)})
        self._positions[key] = position
        self._in_doubt.discard(key)

    def release(self, key: str) -> None:
        """Let a closed reader be opened again."""
        self._open.pop(key, None)

    async def _delete(self, collection_id: int, name: str) -> bool:
        with self._reserved(key := self._key_of(collection_id, name)):
            if key not in self._positions:
                return False
            self._in_doubt.add(key)
            await self._state.put({key: None})
            del self._positions[key]
            self._in_doubt.discard(key)
            return True

    async def _move(self, collection_id: int, name: str, to: ReaderPosition) -> None:
        with self._reserved(key := self._key_of(collection_id, name)):
            if key not in self._positions:
                raise ReaderNotFound(f"there is no reader {name!r}")
            await self._put(key, to)

    async def _put(self, key: str, to: ReaderPosition) -> None:
        """Have a reader resume at `to`, whether it is new or not."""
        before = self._positions.get(key)
        was_in_doubt = key in self._in_doubt
        # Whichever the store has after a crash, the log has to be there: the lower one is held
        # until it is known, also when nobody knows whether the write took place: cancelled, or
        # indeterminate.
        self._positions[key] = min(before or to, to, key=lambda at: at.position)
        self._in_doubt.add(key)
        try:
            await self.save(key, to)
        except StreamingNodeError as error:
            # nothing was done: the store has what it had, known or not
            if error.retryable != "indeterminate":
                if before is None:
                    del self._positions[key]
                else:
                    self._positions[key] = before
                if not was_in_doubt:
                    self._in_doubt.discard(key)
            raise

    def _key(self, collections: Collection[int], name: str) -> str:
        live = self._live()
        for key in self._keys_of(collections, name):
            known = _collection_ids(key) & live.keys()
            if known != live.keys() & collections:
                names = ", ".join(live[each] for each in sorted(known))
                raise InvalidArgument(
                    f"reader {name!r} is of the collections {names} — open it with these, use "
                    "another name, or remove it"
                )
            return key
        return _key(collections, name)

    def _key_of(self, collection_id: int, name: str) -> str:
        return next(self._keys_of({collection_id}, name), _key({collection_id}, name))

    def _keys_of(self, collections: Collection[int], name: str) -> Iterator[str]:
        """Yield the readers of this name that have one of these collections, known or being
        opened.
        """
        for key in self._positions.keys() | self._open.keys():
            if key.endswith(f"/{name}") and not _collection_ids(key).isdisjoint(collections):
                yield key

    @contextmanager
    def _reserved(self, key: str) -> Iterator[None]:
        """Keep others from a reader while it is opened, moved or deleted."""
        if key in self._open:
            name = key.rpartition("/")[2]
            raise ReaderBusy(
                f"reader {name!r} is open, or being moved or deleted — close it first, or use "
                "another name"
            )
        self._open[key] = None
        try:
            yield
        finally:
            if self._open[key] is None:
                del self._open[key]


class NamedReader:
    """One open named reader; made by `NamedReaders.open`."""

    def __init__(self, readers: NamedReaders, key: str, position: ReaderPosition) -> None:
        self._readers = readers
        self._key = key
        self._wanted = position
        self._writing: asyncio.Task[None] | None = None
        self._closed = False
        self.position = position
        """The durable position; a scan starts here."""

    async def ack(self, position: int, tick: int) -> None:
        """Resume from `position` above `tick` from now on; returns when that is durable.

        A tick below the position's changes nothing. Acks that come in during a write share the next
        one. Cancelling leaves the outcome open. Raises `OnShutdown` when closed.
        """
        if self._closed:
            raise OnShutdown("the named reader is closed")
        if tick > self._wanted.tick:
            position = max(position, self._wanted.position)
            self._wanted = msgspec.structs.replace(self._wanted, position=position, tick=tick)
        while self.position.tick < tick:
            writing = self._writing = self._writing or asyncio.get_running_loop().create_task(
                self._write()
            )
            writing.add_done_callback(mark_heard)  # this caller may be gone by then
            await asyncio.wait((writing,))
            writing.result()

    async def close(self) -> None:
        """Wait for the acks under way, each with its write, and let the name be opened again;
        idempotent.
        """
        self._closed = True
        while (writing := self._writing) is not None and not writing.done():
            # who waits for the next write begins it before this goes on
            await asyncio.wait((writing,))
        self._readers.release(self._key)

    async def _write(self) -> None:
        wanted = self._wanted
        try:
            await self._readers.save(self._key, wanted)
            self.position = wanted
        finally:
            self._writing = None


def _key(collections: Collection[int], name: str) -> str:
    return f"{_PREFIX}{'+'.join(map(str, sorted(collections)))}/{name}"


def _collection_ids(key: str) -> frozenset[int]:
    return frozenset(map(int, key.removeprefix(_PREFIX).partition("/")[0].split("+")))


def _is_live(key: str, live: Collection[int]) -> bool:
    return any(each in live for each in _collection_ids(key))


def _decode_position(key: str, value: bytes) -> ReaderPosition:
    try:
        return msgspec.msgpack.decode(value, type=ReaderPosition)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the position stored under {key} is no reader position: {error}") from error
