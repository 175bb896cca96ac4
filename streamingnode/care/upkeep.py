"""What a running node does for its own data: verify it, back it up. The disk is used in threads, the log on the event loop.

What retention takes meanwhile is not missed. Where the log is damaged the reading of it ends: what is readable behind that
is for `streamingnode verify`, when the node is closed.
"""

import asyncio
import shutil
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import from_thread, to_thread

from flusher.cuts import LEASE_BYTES_MAX, LEASES, decode_first_kept, kept_cuts_key
from flusher.directory import cut_numbers
from flusher.flusher import Flusher
from streamingnode.care.backup import make_backup, new_directory
from streamingnode.care.database import STATE_MAP, STEP_BYTES, check_records, check_topics, read_topic
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord, floor_of
from streamingnode.care.verify import LogFacts, check_cuts, check_leases
from streamingnode.channel import Channel, flush
from wal.errors import Corrupt, InvalidArgument, Truncated
from wal.files import disk_errors_typed, make_directory, read_regular, write_file
from wal.rocks.layout import DATABASE_NAME, meta_key
from wal.rocks.store import RocksStore
from wal.rocksmq.messages import TopicEntry
from wal.rocksmq.topic import PREFIX, Topic, decode_records
from wal.runtime import outlast

T = TypeVar("T")

LINKS = "backup.tmp"
"""In the node directory while a backup of the running node is made: hard links need the same disk."""


class Upkeep:
    """The upkeep of the node at `path`, None for one in memory: that one's calls are refused."""

    def __init__(self, path: Path | None, channel: Channel, flusher: Flusher) -> None:
        store = channel.store
        if path is None or not isinstance(store, RocksStore):
            raise InvalidArgument("a node in memory has nothing to verify or to back up — open one in a directory")
        self._path, self._store, self._channel, self._flusher = path, store, channel, flusher
        self._loop = asyncio.get_running_loop()
        self._backing_up = anyio.Lock()

    async def verify(self) -> Report:
        """Check everything the node has, as fast as the disk goes; see `Node.verify`."""
        with disk_errors_typed(self._path):
            return await _in_own_task(to_thread.run_sync(self._verify))

    def _verify(self) -> Report:
        """Check log, cuts and leases; not the floor file, which is written all the time, nor what nothing names yet."""
        log, report = self._channel.log, Report(on_step=_check_cancelled)
        try:
            stored = self._on_loop(self._store.scan_meta(""))
            topics = check_records(((meta_key(key), value) for key, value in stored.items()), report).topics
            check_topics(topics, self._read_topic, report)
        except Corrupt as error:
            report.error(STATE_MAP, error)
        self._check_log(report)
        facts = LogFacts(node_id=self._store.node_id, checkpoint=self._flusher.checkpoint, running=True)
        numbers = cut_numbers(self._path)
        # Asked for after the cuts were listed: it goes up before a cut goes.
        facts.first_kept = decode_first_kept(self._on_loop(self._store.get_meta(kept_cuts_key(log.name))))
        check_cuts(self._path, numbers, facts, report)
        check_leases(self._path, facts.node_id, report)
        return report

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        # Not in the caller's scope, as by `anyio.from_thread.run`: when that was cancelled before, `work` spins for ever.
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _read_topic(self, topic: Topic, at: int) -> list[TopicEntry]:
        """Return entries of a topic, none when it was destroyed or shortened meanwhile."""
        engine = self._store.engine
        try:
            return self._on_loop(engine.read(lambda: read_topic(engine.entries, topic, at)))
        except Corrupt:
            _, now = decode_records(self._on_loop(self._store.scan_meta(PREFIX)))
            if any((each.log_id, each.begin_id) == (topic.log_id, topic.begin_id) for each in now.values()):
                raise
            return []

    def _check_log(self, report: Report) -> None:
        """Read from the first entry kept to the last one synced now."""
        log = self._channel.log
        position, end = log.first_position, log.durable_position
        while position <= end:
            try:
                entries = self._on_loop(log.read(position, bytes_max=STEP_BYTES))
            except Truncated:
                position = log.first_position
                continue
            except Corrupt as error:
                report.error(f"log {log.name!r}, from position {position}", error)
                return
            position = entries[-1].last_position + 1
            report.count("log entries", len(entries))
            report.count("log positions", sum(entry.count for entry in entries))
            report.read("log", sum(entry.size_bytes for entry in entries))

    async def back_up(self, path: Path) -> BackupRecord:
        """Make a verified backup, one at a time; see `Node.backup`."""
        made: list[BackupRecord] = []

        async def run() -> None:
            async with self._backing_up, self._flusher.retention.hold_cuts():
                await flush(self._channel, self._flusher)
                made.append(await to_thread.run_sync(self._back_up, path))

        try:
            with disk_errors_typed(self._path):
                await _in_own_task(run())
        except asyncio.CancelledError:
            if made:  # too late to be stopped; its caller knows nothing of it, and would meet it in its way
                await outlast(to_thread.run_sync(shutil.rmtree, path))
            raise
        return made[0]

    def _back_up(self, path: Path) -> BackupRecord:
        """Link the database beside the node's own, in one step that costs no copying; then copy its bytes at leisure."""
        links = self._path / LINKS
        with new_directory(path, self._path) as building:
            try:
                shutil.rmtree(links, ignore_errors=True)  # a crash left it
                # Floor and leases as they are before the database is linked: what they say is in the copy for certain.
                make_directory(links)
                make_directory(links / LEASES)
                for lease in sorted((self._path / LEASES).glob("*.json")):
                    with suppress(FileNotFoundError):  # its table was given up meanwhile
                        write_file(links / LEASES / lease.name, read_regular(lease, bytes_max=LEASE_BYTES_MAX))
                floor = floor_of(self._path)
                self._on_loop(self._store.link_copy(links / DATABASE_NAME))
                return make_backup(self._path, links, floor, building, _check_cancelled, cuts_ahead=0)
            finally:
                shutil.rmtree(links, ignore_errors=True)


def _check_cancelled(_part: str, _bytes: int) -> None:
    from_thread.check_cancelled()


async def _in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; when the caller is cancelled, so is it, and its threads are waited for."""
    scope, result = anyio.CancelScope(), list[T]()

    async def run() -> None:  # in a task of its own that only its scope can cancel
        with scope:
            result.append(await work)

    await outlast(run(), on_cancel=scope.cancel)
    return result[0]
