"""The log store on RocksDB: opens or creates a node directory, owns its database, and provides its
logs and its state map.

After a failed write, the database is opened again from the disk under the next term, with a new
writer thread. The directory stays owned.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
from rocksdict import Checkpoint, Rdict

from wal.entry_log import Batch, Decode, E, OwnedLog
from wal.errors import (
    ChannelFenced,
    InvalidArgument,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)
from wal.failpoint import failpoint
from wal.log import SpaceLevel
from wal.position import POSITION_MAX
from wal.rocks.database import Engine, open_rocksdb
from wal.rocks.floor import LOGS_MAX, Floor
from wal.rocks.group_commit import BatchWrite, GroupCommit, Outcome, StoreState
from wal.rocks.layout import (
    DATABASE_NAME,
    META_PREFIX,
    META_VERSION_KEY,
    RocksOptions,
    encode_log_id,
    encode_number,
    entry_key,
    log_id_key,
    meta_key,
)
from wal.rocks.log import RocksEntryLog, RocksLog, load_ends
from wal.rocks.opening import (
    OwnedDirectory,
    open_for_reading,
    open_owned,
    take_directory,
)
from wal.rocks.recovery import Survey, scan_prefix
from wal.rocks.space import NOT_LOOKED, SpaceVerdict
from wal.rocks.writer import Writer
from wal.runtime import Holding, event_log, in_thread, outlast

_log = event_log(__name__)


async def open_rocks_store(
    path: str | os.PathLike[str], *, options: RocksOptions | None = None, brief: bool = False
) -> "RocksStore":
    """Open the node directory at `path`, or create it, and own it until `close`. Commands that soon
    end pass `brief`.

    Replays RocksDB's log up to three times, about 0.3 s for each 64 MiB of it. Cancelling waits for
    the end of that.

    Raises:
        AlreadyOwned: another process, or this one, has the directory open.
        InvalidArgument: the path is a file.
        Corrupt: acknowledged data is missing or damaged; nothing was changed.
        UnsupportedFormat: a newer release wrote the directory, or it holds something else.
        StorageFull: the disk has no room for replaying RocksDB's log, even with the reserve
            released.
        StorageFailed: the directory cannot be written.
    """

    async def open_store() -> RocksStore:
        taking = _Taking(
            partial(take_directory, Path(path), options or RocksOptions(), brief=brief)
        )
        return RocksStore(*await taking.take())

    opening = asyncio.ensure_future(open_store())
    try:
        return await outlast(opening)
    except asyncio.CancelledError:
        if opening.exception() is None:
            await opening.result().close()  # no other code has this store
        raise


class _Taking:
    """A directory that a thread takes, held until its store exists: the event loop may end before
    that.
    """

    def __init__(self, take: Callable[[], tuple[OwnedDirectory, Rdict, Survey]]) -> None:
        self._take = take
        self._taken: tuple[OwnedDirectory, Rdict, Survey] | None = None
        # a child drops the lock by itself
        self._held = Holding(self._let_go, in_child=lambda: None)

    async def take(self) -> tuple[OwnedDirectory, Rdict, Survey]:
        """Take the directory and return it; from then on it belongs to the caller."""
        try:
            await in_thread(self._run)
        except BaseException:  # also a cancellation, which is raised after the thread has ended
            if self._taken is not None:
                await in_thread(self._let_go)
            self._held.end()
            raise
        self._held.end()
        assert self._taken is not None, "the thread takes it, or it raises"
        return self._taken

    def _run(self) -> None:
        self._taken = self._take()

    def _let_go(self) -> None:
        if self._taken is not None:
            owned, database, _ = self._taken
            database.close()
            owned.release()


class RocksStateMap:
    """The state map of a `RocksStore`, which creates it.

    Each change increments its version. The floor records the version, so a lost change is detected
    like a lost entry.
    """

    def __init__(self, engine: Engine, commit: GroupCommit) -> None:
        self._engine = engine
        self._commit = commit
        self._version = 0
        self._logs = set[RocksEntryLog[Any]]()
        """The logs that their owners have not released."""

    def restart(self, version: int) -> None:
        """Continue from the version found when the database was opened."""
        self._version = version

    async def get(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""
        self._commit.check_settled()
        value = await self._engine.read(lambda: self._engine.database.get(meta_key(key)))
        assert value is None or isinstance(value, bytes)
        return value

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, in key order."""
        self._commit.check_settled()
        records = await self._engine.read(
            lambda: scan_prefix(self._engine.database, meta_key(prefix))
        )
        return {key[len(META_PREFIX) :].decode(): value for key, value in records.items()}

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys atomically (None removes a key); durable on return."""
        self._commit.check_admitted(makes_room=True)
        outcome = self.write(Batch(changes))
        failpoint("append.record_queued")
        await asyncio.shield(outcome)
        failpoint("append.record_durable")

    def owned_log(
        self,
        log_id: int,
        decode: Decode[E],
        *,
        first_position: int,
        last_position: int,
        title: str,
    ) -> RocksEntryLog[E]:
        """Return a log for its owner; see `wal.log.BatchMap`."""
        log = RocksEntryLog(
            self._engine,
            self._commit,
            log_id=log_id,
            title=title,
            decode=decode,
            first_position=first_position,
            last_position=last_position,
        )
        self._logs.add(log)
        return log

    def release(self, log: OwnedLog[Any]) -> None:
        """Release a log; see `wal.log.BatchMap`."""
        self._logs.discard(cast(RocksEntryLog[Any], log))

    def write(self, batch: Batch) -> Outcome:
        """Queue a batch; see `wal.log.BatchMap`.

        A batch is synced under every durability: so the version of the map also covers the batch's
        entries.
        """
        self._commit.check_writable()
        self._version += 1
        records: dict[bytes, bytes | None] = {
            meta_key(key): value for key, value in batch.records.items()
        }
        records[META_VERSION_KEY] = encode_number(self._version)
        entries = [(entry_key(log.log_id, position), data) for log, position, data in batch.entries]
        ends = {
            cast(RocksEntryLog[Any], log).synced: position for log, position, _ in batch.entries
        }
        outcome = self._commit.submit(
            BatchWrite(
                records, self._version, entries=entries, dropped=_dropped_keys(batch), ends=ends
            )
        )
        for log, position, _ in batch.entries:
            log.next_position = position + 1
        for log, position in batch.kept.items():
            log.first_position = position  # reads below are refused, so no read finds the gap
        return outcome

    async def reclaim(self, batch: Batch) -> None:
        """Reclaim the disk space of what a durable batch has deleted."""
        for begin, end in _dropped_keys(batch):
            await self._engine.compact(begin, end)

    def end(self, error: Exception) -> None:
        """End all waits for messages of the owned logs with `error`."""
        for log in self._logs:
            log.end(error)


def _dropped_keys(batch: Batch) -> list[tuple[bytes, bytes]]:
    """Return the key ranges that a batch deletes, end exclusive."""
    kept = [
        (entry_key(log.log_id, 0), entry_key(log.log_id, position))
        for log, position in batch.kept.items()
    ]
    removed = [(entry_key(log.log_id, 0), entry_key(log.log_id + 1, 0)) for log in batch.removed]
    return kept + removed


class RocksReader:
    """A node directory opened for reading. Its logs and its state map are those of a `RocksStore`,
    but refuse changes. Opening it changes nothing in the directory.

    `floor` is the content of the directory's floor file: the database is checked against it as at a
    start, and the caller keeps owners out meanwhile. Pass None while an owner has the directory
    open: then nothing is compared, reads may be slightly stale, and `Corrupt` may mean that a file
    was removed since it was listed.
    """

    def __init__(self, directory: Path, floor: Floor | None) -> None:
        """Open the directory; blocks. Raises as `wal.rocks.opening.open_for_reading`."""
        opened = open_for_reading(directory, floor)
        self.found = opened.found
        self.torn = opened.torn
        """The last whole position of each log with a torn tail, by name; the next owner drops those
        tails.
        """
        self.node_id = opened.found.node_id
        self._engine = Engine(directory / DATABASE_NAME, opened.database)
        self._commit = GroupCommit(directory, RocksOptions(), space=NOT_LOOKED)
        self._commit.refuse(StoreState.READ_ONLY)
        self.state = RocksStateMap(self._engine, self._commit)

    async def open_log(self, name: str) -> RocksLog:
        """Return the log of pchannel `name` after checking both of its ends. A log that does not
        exist is empty.
        """
        self._commit.check_readable()
        log_id = self.found.log_ids.get(name, 0)
        end = self.found.last_positions.get(log_id, 0)
        ends = await self._engine.read(load_ends, self._engine, log_id, name, end)
        return RocksLog(self._engine, self._commit, name=name, log_id=log_id, ends=ends)

    def table_names(self) -> frozenset[str]:
        """Return the names of the files of the database's tables. Blocks."""
        live = self._engine.run(self._engine.database.live_files)
        return frozenset(Path(str(each["name"])).name for each in live)

    async def close(self) -> None:
        """Close the database; idempotent."""
        self._commit.refuse(StoreState.CLOSED)
        await self._engine.close()


class RocksStore:
    """A node directory in use, opened by `open_rocks_store`; see `wal.log.LogStore` for the
    contract.
    """

    def __init__(self, owned: OwnedDirectory, database: Rdict, found: Survey) -> None:
        self._owned = owned
        self._directory = owned.directory
        self.node_id = found.node_id
        self.promised_tick = owned.floor.known.tick
        self._engine = Engine(owned.directory / DATABASE_NAME, database)
        self._commit = GroupCommit(owned.directory, owned.options, space=owned.space.verdict)
        self.admit = self._commit.admit
        self.check_admitted = self._commit.check_admitted
        self.state = RocksStateMap(self._engine, self._commit)
        self._logs: dict[str, RocksLog] = {}
        self._opening = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._promising = asyncio.Lock()
        # own limiter: ticks do not wait for the program's other threads
        self._promiser = anyio.CapacityLimiter(1)
        self._closed = False
        self.openings = 0
        """How often the database was opened; data read before the last opening may be out of date.
        """
        self._begin(found)
        self._held = Holding(self._let_go, in_child=self._leave)

    @property
    def queued_bytes(self) -> int:
        """Bytes that were appended and are not yet synced."""
        return self._commit.admission.held_bytes

    @property
    def space(self) -> SpaceVerdict:
        """How near the disk is to full, as of the writer thread's last look."""
        return self._owned.space.verdict

    @property
    def short_of_space(self) -> bool:
        """Whether the log should be truncated to make room; see `wal.log.LogStore`."""
        return self._commit.space.level is not SpaceLevel.AMPLE

    @property
    def topic_store(self) -> "RocksStore":
        """This store: it keeps topics."""
        return self

    async def promise_tick(self, tick: int) -> None:
        """Record a tick in the floor file; durable on return. A thread of its own writes and syncs
        one page, so appends do not wait.
        """
        # before taking the lock, which may belong to the parent of this forked process
        self._commit.check_promising()
        # closing takes the same lock, so that the descriptor is not reused for another file
        # meanwhile
        async with self._promising:
            self._commit.check_promising()
            try:
                await outlast(in_thread(self._owned.floor.promise, tick, limiter=self._promiser))
            except OSError as error:
                if not self._commit.reopening:  # the next term tries again
                    self._commit.failed([], error)
                raise StorageFailed(
                    f"the floor file of {self._directory} cannot be written: {error} — check the "
                    "disk"
                ) from error

    async def open_log(self, name: str) -> RocksLog:
        """Return the log of pchannel `name` after checking both of its ends; creates it if it does
        not exist.
        """
        async with self._opening:
            if name not in self._logs:
                self._commit.check_writable()
                log_id = self._log_ids.get(name) or await self._make_log(name)
                ends = await self._engine.read(load_ends, self._engine, log_id, name, POSITION_MAX)
                self._logs[name] = RocksLog(
                    self._engine, self._commit, name=name, log_id=log_id, ends=ends
                )
            return self._logs[name]

    async def link_copy(self, target: Path) -> None:
        """Create a database at `target`, on the same disk, with all that was acknowledged before
        the call. It does not change later.

        Its tables are hard links, so both share a flipped bit: copy the bytes for a backup.
        """

        def link() -> None:
            # Flush first, with the event loop running: then the checkpoint, which blocks the loop,
            # has almost nothing to flush.
            self._engine.entries.flush()
            self._engine.database.flush()
            Checkpoint(self._engine.database).create_checkpoint(os.fsencode(target).decode())

        self._commit.check_readable()
        await self._engine.read(link)

    @property
    def condition(self) -> str:
        """The state, for people."""
        return "reopening" if self._commit.reopening else self._commit.state.name.lower()

    @property
    def taking_writes(self) -> bool:
        """Whether writes are taken."""
        return self._commit.state is StoreState.OPEN

    async def wait_failed(self) -> None:
        """Wait until a write has failed, or another owner has taken over."""
        await self._commit.lost.wait()

    async def reopen(self) -> None:
        """Close the database after a failed write, verify it, and continue under the next term; see
        `wal.log.LogStore`.
        """
        await outlast(self._reopen())

    async def close(self) -> None:
        """Write what is queued, sync, and release the directory. Idempotent; a cancellation does
        not interrupt it.
        """
        if self._commit.state < StoreState.CLOSED:
            self._commit.refuse(StoreState.CLOSED)
            for log in self._logs.values():
                log.end(self._commit.refusal())
            self.state.end(self._commit.refusal())
        await outlast(self._release())

    def _leave(self) -> None:
        """Refuse all calls from now on: this process is a fork of the owner, where RocksDB would
        accept writes and lose them.
        """
        self._commit.refuse(StoreState.FORKED)
        self._engine.leave_in_child()
        self._owned.floor.close()

    def _let_go(self) -> None:
        """Close without the event loop, which has ended. Unacknowledged writes may still be
        written.
        """
        self._commit.close_without_loop()
        self._writer.stop()
        try:
            if self._commit.taken_over:
                self._engine.leave()
            self._engine.let_go()
        finally:
            self._closed = True
            self._owned.release()

    # --- the database and the next ----------------------------------------------------------------

    def _begin(self, found: Survey) -> None:
        """Start a term on the installed database from its survey, with a new writer thread."""
        owned = self._owned
        self.term = owned.floor.token_term
        self._log_ids = dict(found.log_ids)
        self.state.restart(found.meta_version)
        # reopening judged the disk while there was no writer to report it
        self._commit.space_changed(owned.space.verdict)
        self._writer = Writer(self._engine, owned, self._commit)
        self._commit.hand_over = self._writer.submit
        self.openings += 1

    async def _reopen(self) -> None:
        async with self._closing:
            if self.taking_writes:
                return
            if self._commit.state is not StoreState.FAILED:
                raise self._commit.refusal()
            try:
                # Check before closing the database: closing would remove files of the owner that
                # took over.
                await in_thread(self._owned.floor.check_owner)
                self._commit.reopening = True
                await in_thread(self._writer.stop)
                if self._commit.taken_over:  # the last batch found another owner's token
                    raise self._commit.refusal()
                # RocksDB repeats the failure here; the appends have already failed with it
                with suppress(StreamingNodeError):
                    await self._engine.close()
                failpoint("recovery.database_released")
                try:
                    await self._install_next()
                finally:
                    self._engine.resume()
            except ChannelFenced:
                self._commit.refuse(StoreState.FENCED)
                raise
            finally:
                self._commit.reopening = False

    async def _install_next(self) -> None:
        """Verify the database on the disk and open it under the next term. If that fails, open it
        for reading only.
        """
        # The token's term may come from an attempt that failed before it was opened.
        spent = self._commit.has_acknowledged and self._owned.floor.token_term == self.term
        engine = self._engine
        options = self._owned.options
        try:
            database, found = await in_thread(lambda: open_owned(self._owned, term_is_spent=spent))
            engine.install(database)
            ends = [
                (
                    log,
                    await in_thread(
                        engine.run, load_ends, engine, log.log_id, log.name, POSITION_MAX
                    ),
                )
                for log in self._logs.values()
            ]
        except BaseException:
            with suppress(StreamingNodeError):
                await engine.close()
            with suppress(StreamingNodeError):
                engine.install(await in_thread(open_rocksdb, engine.path, options))
            raise
        for log, end in ends:
            log.restart(end)
        self._begin(found)
        self._commit.resume()

    async def _release(self) -> None:
        async with self._closing:
            if self._closed:
                return
            await in_thread(self._writer.stop)
            failpoint("append.closing_written")
            is_closed = True
            try:
                if self._commit.taken_over:
                    await in_thread(self._engine.leave)
                await self._engine.close()
            except StorageFull as error:
                # RocksDB flushes its log into tables when it closes. Without room the synced log
                # stays for the next open.
                _log.warning(
                    "closed_on_full_disk", directory=str(self._directory), error=str(error)
                )
            except StreamingNodeError:
                # After a failed write RocksDB repeats the failure here; the appends have already
                # failed with it.
                if self._commit.cause is None:
                    raise
            # the event loop is ending: `_let_go` continues from here
            except asyncio.CancelledError:
                is_closed = False
                raise
            finally:
                if is_closed:
                    failpoint("append.closing_database_closed")
                    self._closed = True
                    self._held.end()
                    async with self._promising:
                        self._owned.release()

    async def _make_log(self, name: str) -> int:
        if len(self._log_ids) >= LOGS_MAX:
            raise InvalidArgument(
                f"{self._directory} has {LOGS_MAX} logs, the maximum of a node — use another "
                "directory"
            )
        log_id = 1 + max(self._log_ids.values(), default=0)
        # before the write: a cancelled caller leaves the record being written
        self._log_ids[name] = log_id
        failpoint("recovery.log_named")
        await asyncio.shield(
            self._commit.submit(BatchWrite({log_id_key(name): encode_log_id(log_id)}))
        )
        failpoint("recovery.log_made")
        return log_id
