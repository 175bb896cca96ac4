"""Named readers: each keeps a position in a log across restarts, and a lease that stops truncation
at it.

A reader belongs to one or several collections, and its name is unique in each of them. A position
moves forward, except by `move`. The lease follows the durable position, not one that is being
written: after a crash the reader resumes at the durable position.
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
    """A named reader: the ids of its collections, its position, and whether it is open or being
    opened, moved or deleted.
    """

    collections: frozenset[int]
    name: str
    position: ReaderPosition
    is_open: bool


class NamedReaders:
    """The named readers of all collections of one node. Lives on the event loop; call `load` first.

    `live` returns the names of the existing collections, by id. A reader whose collections are all
    gone holds no lease: it cannot be opened.
    """

    def __init__(self, state: StateMap, live: Callable[[], Mapping[int, str]]) -> None:
        self._state = state
        self._live = live
        self._positions: dict[str, ReaderPosition] = {}
        # None while a reader is being opened, moved or deleted
        self._open: dict[str, NamedReader | None] = {}
        self._in_doubt: set[str] = set()
        """Readers with a write of unknown outcome: the next opening saves them again; their lease
        stays until then.
        """

    async def load(self) -> None:
        """Read the stored positions. Raises `Corrupt` for one that does not decode."""
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
        """Return the durable position of the reader with this name and these collections; None
        without one.

        Raises `InvalidArgument` when a reader of this name is on one of them, but its existing
        collections are others.
        """
        return self._positions.get(self._key(collections, name))

    async def open(
        self, collections: Collection[int], name: str, *, start: ReaderPosition
    ) -> "NamedReader":
        """Return the reader at its stored position, or at `start` when it is new. It is durable on
        return.

        Raises `ReaderBusy` while the reader is open, and `InvalidArgument` as `find` does.
        """
        with self._reserved(key := self._key(collections, name)):
            if key not in self._positions or key in self._in_doubt:
                await self._put(key, self._positions.get(key, start))
            reader = self._open[key] = NamedReader(self, key, self._positions[key])
        return reader

    async def delete_reader(self, collection_id: int, name: str) -> bool:
        """Delete the reader that has this name on a collection, for all of its collections, and its
        lease; return whether it existed.

        Raises `ReaderBusy` while it is open. A cancelled call may still take effect.
        """
        return await carry_on(self._delete(collection_id, name))

    async def move(self, collection_id: int, name: str, to: ReaderPosition) -> None:
        """Set the position of a collection's reader to `to`, forward or back; durable on return.

        Raises `ReaderBusy` while the reader is open, `ReaderNotFound` when it does not exist. A
        cancelled call may still take effect.
        """
        await carry_on(self._move(collection_id, name, to))

    def known(self) -> Iterator[KnownReader]:
        """Yield every named reader."""
        for key, at in self._positions.items():
            yield KnownReader(_collection_ids(key), key.rpartition("/")[2], at, key in self._open)

    async def forget_dropped(self) -> None:
        """Delete the readers whose collections are all gone. Call it before any reader is open."""
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
        """Make a reader's position durable, then move its lease there."""
        await self._state.put({key: msgspec.msgpack.encode(position)})
        self._positions[key] = position
        self._in_doubt.discard(key)

    def release(self, key: str) -> None:
        """Allow a closed reader to be opened again."""
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
        """Set the position of a new or existing reader."""
        before = self._positions.get(key)
        was_in_doubt = key in self._in_doubt
        # After a crash the store may have either position, so the log must be kept from the lower
        # one. The lease stays there until the outcome is known: a cancelled or indeterminate write
        # leaves it open.
        self._positions[key] = min(before or to, to, key=lambda at: at.position)
        self._in_doubt.add(key)
        try:
            await self.save(key, to)
        except StreamingNodeError as error:
            # the write did not happen: restore the earlier state, in doubt or not
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
                    "another name, or delete it"
                )
            return key
        return _key(collections, name)

    def _key_of(self, collection_id: int, name: str) -> str:
        return next(self._keys_of({collection_id}, name), _key({collection_id}, name))

    def _keys_of(self, collections: Collection[int], name: str) -> Iterator[str]:
        """Yield the keys of readers with this name on one of these collections, stored or being
        opened.
        """
        for key in self._positions.keys() | self._open.keys():
            if key.endswith(f"/{name}") and not _collection_ids(key).isdisjoint(collections):
                yield key

    @contextmanager
    def _reserved(self, key: str) -> Iterator[None]:
        """Reserve a reader while it is opened, moved or deleted. Raises `ReaderBusy`."""
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
        """Resume from `position` above `tick` after a restart; returns once that is durable.

        A tick at or below the reader's changes nothing. Acks that arrive during a write share the
        next one. Cancelling leaves the outcome open. Raises `OnShutdown` when closed.
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
            writing.add_done_callback(mark_heard)  # this caller may be cancelled by then
            await asyncio.wait((writing,))
            writing.result()

    async def close(self) -> None:
        """Wait for the acks under way and their writes, then allow the name to be opened again.
        Idempotent.
        """
        self._closed = True
        while (writing := self._writing) is not None and not writing.done():
            # a waiting `ack` starts the next write before this task resumes
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
        raise Corrupt(f"the reader position stored under {key} does not decode: {error}") from error
