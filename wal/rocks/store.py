"""The door of RocksMQ: opens or makes a node directory, owns its database, and hands out its logs and its state map.

In: a directory. Out: a `RocksStore`, verified, with a term above all earlier ones; see `wal.log.LogStore` for the contract.
Opening goes: own the directory, make what is missing, verify without changing anything, open, check against the floor, take
the next term. Closing goes the other way round.
"""

import asyncio
import functools
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import anyio
import anyio.to_thread
from rocksdict import Rdict

from wal.errors import InvalidArgument, StorageFailed, StreamingNodeError
from wal.rocks.directory import DATABASE_NAME, make_directory, open_database, prepare_database, verify_database
from wal.rocks.engine import Engine
from wal.rocks.floor import LOGS_MAX, FloorFile
from wal.rocks.group_commit import CommitEvent, CommitState, GroupCommit
from wal.rocks.keys import (
    META_PREFIX,
    META_VERSION_KEY,
    TERM_KEY,
    encode_log_id,
    encode_number,
    log_id_key,
    meta_key,
)
from wal.rocks.log import RocksLog, load_ends
from wal.rocks.options import RocksOptions
from wal.rocks.ownership import DirectoryLock
from wal.rocks.recovery import Survey, scan_prefix
from wal.rocks.surroundings import Surroundings
from wal.rocks.write import RecordWrite, Write
from wal.rocks.writer import Writer


async def open_rocks_store(
    path: str | os.PathLike[str], *, options: RocksOptions | None = None, surroundings: Surroundings | None = None
) -> "RocksStore":
    """Open the node directory at `path`, or make it, and own it until `close`.

    Replays RocksDB's log up to three times, about 0.3 s for each 64 MiB of it. Cancelling waits for the end of that.

    Raises:
        AlreadyOwned: another process, or this one, has it open.
        Corrupt: something that was acknowledged is missing or damaged; nothing was changed.
        UnsupportedFormat: a newer release wrote it, or it holds something else.
        StorageFailed: it cannot be written.

    """
    options, surroundings = options or RocksOptions(), surroundings or Surroundings()
    owned = await anyio.to_thread.run_sync(_own, Path(path), options, surroundings)
    return RocksStore(owned, options, surroundings)


class RocksStore:
    """A node directory in use; see `wal.log.LogStore` for the contract. `open_rocks_store` makes it."""

    def __init__(self, owned: "_OwnedDirectory", options: RocksOptions, surroundings: Surroundings) -> None:
        found, self._directory = owned.found, owned.directory
        self.node_id, self.term, self.promised_tick = found.node_id, owned.term, owned.promised_tick
        self._lock, self._floor = owned.lock, owned.floor
        self._engine = Engine(owned.directory / DATABASE_NAME, owned.database)
        self._log_ids = dict(found.log_ids)
        self._meta_version = found.meta_version
        self._logs: dict[str, RocksLog] = {}
        self._opening, self._closing = anyio.Lock(), anyio.Lock()
        self._closed = False
        queue: SimpleQueue[Write | None] = SimpleQueue()
        self._commit = GroupCommit(owned.directory, options, queue.put)
        self._writer = Writer(
            self._engine,
            self._floor,
            options.sync,
            queue=queue,
            listener=self._commit,
            tell=asyncio.get_running_loop().call_soon_threadsafe,
            surroundings=surroundings,
        )
        self._writer.start()
        _guard_forks(self)

    @property
    def state(self) -> CommitState:
        """Whether the store takes writes."""
        return self._commit.state

    @property
    def queued_bytes(self) -> int:
        """Bytes that were appended and are not synced yet."""
        return self._commit.queued_bytes

    def promise_tick(self, tick: int) -> None:
        """Remember a tick across a kill, without a sync: one page write, some microseconds."""
        self._commit.check_writable()
        try:
            self._floor.promise(tick)
        except OSError as error:
            raise StorageFailed(f"the floor file of {self._directory} cannot be written: {error}") from error

    async def open_log(self, name: str) -> RocksLog:
        """Return the log of pchannel `name`, made if it is new; both of its ends are checked."""
        async with self._opening:
            if name not in self._logs:
                self._commit.check_writable()
                log_id = self._log_ids.get(name) or await self._make_log(name)
                ends = await self._engine.read(load_ends, self._engine, log_id, name)
                self._logs[name] = RocksLog(self._engine, self._commit, name=name, log_id=log_id, ends=ends)
            return self._logs[name]

    async def get_meta(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""
        self._commit.check_readable()
        return await self._engine.read(self._engine.get, meta_key(key))

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, in key order."""
        self._commit.check_readable()
        records = await self._engine.read(scan_prefix, self._engine.database, meta_key(prefix))
        return {key[len(META_PREFIX) :].decode(): value for key, value in records.items()}

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys (None removes) all at once; durable when it returns. Cancelling does not undo it."""
        self._commit.check_writable()
        self._meta_version += 1
        records = {meta_key(key): value for key, value in changes.items()}
        records[META_VERSION_KEY] = encode_number(self._meta_version)
        await self._put(records, meta_version=self._meta_version)

    async def close(self) -> None:
        """Write what is queued, sync, and let go of the directory; idempotent, and not cut short by cancellation."""
        if self._commit.state in (CommitState.OPEN, CommitState.POISONED):
            self._commit.apply(CommitEvent.CLOSE_ASKED)
            for log in self._logs.values():
                log.end(self._commit.refusal())
        with anyio.CancelScope(shield=True):
            async with self._closing:
                if not self._closed:
                    await self._let_go()

    def abandon(self) -> None:
        """Refuse everything from now on: this process is a fork of the owner. Called in the child, by the fork guard."""
        self._commit.apply(CommitEvent.PROCESS_FORKED)
        self._lock.release()
        self._floor.close()

    async def _let_go(self) -> None:
        await anyio.to_thread.run_sync(self._writer.stop)
        try:
            await self._engine.close()
        except StreamingNodeError:
            # After a failed write RocksDB repeats the failure here; its appenders have heard of it.
            if not self._commit.poisoned:
                raise
        finally:
            self._closed = True
            self._floor.close()
            self._lock.release()

    async def _make_log(self, name: str) -> int:
        if len(self._log_ids) >= LOGS_MAX:
            raise InvalidArgument(f"{self._directory} has {LOGS_MAX} logs, which is as many as one node can have")
        log_id = 1 + max(self._log_ids.values(), default=0)
        self._log_ids[name] = log_id  # at once: should this be cancelled, the record is written all the same
        await self._put({log_id_key(name): encode_log_id(log_id)})
        return log_id

    async def _put(self, records: Mapping[bytes, bytes | None], *, meta_version: int = 0) -> None:
        done = asyncio.get_running_loop().create_future()
        self._commit.submit(RecordWrite(self._engine.meta_family, records, done, done, meta_version=meta_version))
        await asyncio.shield(done)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnedDirectory:
    directory: Path
    lock: DirectoryLock
    database: Rdict
    floor: FloorFile
    found: Survey
    term: int
    promised_tick: int


def _own(directory: Path, options: RocksOptions, surroundings: Surroundings) -> _OwnedDirectory:
    make_directory(directory)
    with ExitStack() as undo:
        lock = DirectoryLock(directory)
        undo.callback(lock.release)
        floor = prepare_database(directory, options, surroundings.make_node_id)
        verify_database(directory, options, floor)
        database, found = open_database(directory, options, floor)
        undo.callback(database.close)
        term = 1 + max(found.term, floor.term)
        floor_file = FloorFile(directory, floor)
        undo.callback(floor_file.close)
        _take_term(database, floor_file, found, term)
        undo.pop_all()
    return _OwnedDirectory(
        directory=directory,
        lock=lock,
        database=database,
        floor=floor_file,
        found=found,
        term=term,
        promised_tick=floor.tick,
    )


def _take_term(database: Rdict, floor: FloorFile, found: Survey, term: int) -> None:
    """Make the new term durable in both places before anything is done under it."""
    database.put(TERM_KEY, encode_number(term))
    database.flush_wal(sync=True)
    # What a killed owner wrote without acknowledging is part of the log now, and readers may see it.
    floor.record(found.last_positions, term=term, meta=found.meta_version)
    floor.sync()


_open_stores: "weakref.WeakSet[RocksStore]" = weakref.WeakSet()


def _guard_forks(store: RocksStore) -> None:
    """Have `store` refuse everything in a forked child: RocksDB takes writes there and loses them."""
    _open_stores.add(store)
    _register_fork_guard()


@functools.cache
def _register_fork_guard() -> None:
    os.register_at_fork(after_in_child=_abandon_stores)


def _abandon_stores() -> None:
    for store in _open_stores:
        store.abandon()
