"""The contracts of a log store, of the state map beside its logs, and of the logs that users of
that map own. The stores on RocksDB and in memory implement all of them.

`tests/wal/log_contract.py`, `tests/wal/state_map_contract.py` and `tests/wal/owned_log_contract.py`
are the contracts as tests.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from enum import IntEnum, unique
from pathlib import Path
from typing import Any, Protocol

import msgspec

from wal.append import AppendPack, AppendTicket, Pack
from wal.entry import LogEntry
from wal.entry_log import Batch, Decode, E, EntryLog, OwnedLog
from wal.failpoint import failpoint


class Log(EntryLog[LogEntry], Protocol):
    """One ordered log of packs: an `EntryLog` with the codec of packs; each pack is one entry.

    Positions begin at 1, ids ascend in append order. All methods are called on the event loop; none
    blocks it.
    """

    name: str
    wal_name: str
    """The kind of log, as in message ids."""
    last_tick: int
    """Tick of the last entry in the log, 0 for an empty one."""

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait until the queue has space for `size_bytes`: back-pressure, first come, first served.

        Raises `StorageFull` when the disk is below its low-water mark; with `makes_room` only when
        no write is possible any more. Raises `OnShutdown` when closed, `LogReopening` when an
        earlier write failed and the store refuses writes. Cancelling releases the place in the
        queue.
        """

    def append(self, pack: Pack) -> AppendTicket:
        """Assign positions to a stamped pack and queue it; never suspends, so call order is
        position order.

        Entries become durable in call order; when one fails, all later ones fail, too. Raises the
        errors of `admit`, and `InvalidArgument` for a tick that is not above the previous one; then
        nothing is queued.
        """

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Delete everything before the entry that holds `position`, and free its disk space;
        idempotent.

        Deletes nothing when `needed` returns an earlier position at that moment: a reader that
        needs it may have arrived in the meantime.
        """


class StateMap(Protocol):
    """A small durable map beside the logs of a store, from text to bytes.

    It is meant for thousands of records of a few kilobytes, all held in memory. All methods are
    called on the event loop; none blocks it. After a failed write all methods raise `LogReopening`
    until the store is reopened, because the outcome of the last change is unknown until then. After
    `close` they raise `OnShutdown`.
    """

    async def get(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, ordered by the keys' UTF-8
        bytes.
        """

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys atomically (None removes a key); durable on return.

        Changes take effect in call order. Entries acknowledged before the call are durable on
        return, too. Cancelling the caller does not undo the change.
        """


class BatchMap(StateMap, Protocol):
    """A state map whose users also own logs; the same batches change both.

    The records of a user define where its logs begin and end.
    """

    def owned_log(
        self,
        log_id: int,
        decode: Decode[E],
        *,
        first_position: int,
        last_position: int,
        title: str,
    ) -> OwnedLog[E]:
        """Return a log with the ends in its owner's records; it is valid until `release`.

        `title` begins the texts of errors, before a position.
        """

    def release(self, log: OwnedLog[Any]) -> None:
        """Release a log; its entries stay. Idempotent."""

    def write(self, batch: Batch) -> asyncio.Future[None]:
        """Queue a batch; never suspends, so call order is the order on disk.

        The future completes when the batch is synced, in every durability mode, and its entries are
        visible to readers. It fails with `Indeterminate` when the write failed. Raises
        `LogReopening` or `OnShutdown` when the store takes no writes; then nothing is done. A low
        disk does not refuse a batch.
        """

    async def reclaim(self, batch: Batch) -> None:
        """Free the disk space of the data that a durable batch has deleted."""


@unique
class SpaceLevel(IntEnum):
    """How short of space the disk of a store is. From `SHORT` on the log should be truncated, from
    `FULL` on appends are refused, at `EXHAUSTED` every write is refused.
    """

    AMPLE = 0
    SHORT = 1
    FULL = 2
    EXHAUSTED = 3


class StoreSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of a store at its last check, in bytes.

    `needed_bytes` is the low-water mark, 0 without one. `free_bytes` excludes the reserve.
    `log_bytes` is the size of the store's own write-ahead log, `reserve_bytes` the intended size of
    the reserve.
    """

    level: SpaceLevel
    free_bytes: int
    log_bytes: int
    needed_bytes: int
    reserve_bytes: int


class LogReader(Protocol):
    """The logs of a node, one for each pchannel, and the state map beside them. A read-only store
    implements only this.
    """

    node_id: str
    """Identity of the node's data, created by the first opening and never changed."""

    @property
    def state(self) -> StateMap:
        """The state map; the same object for the lifetime of the store."""

    async def open_log(self, name: str) -> Log:
        """Return the log of pchannel `name`, verified; creates it if it is new."""


class LogStore(LogReader, Protocol):
    """The owner of a node's logs.

    `space`, `link_copy` and `topic_store` are None for a store without that feature.
    """

    term: int
    """The number of this ownership, a fencing token above all earlier ones."""
    promised_tick: int
    """The highest tick that an earlier term may have given to a reader; new ticks start above
    it.
    """

    @property
    def queued_bytes(self) -> int:
        """Bytes that are appended and not durable yet."""

    @property
    def short_of_space(self) -> bool:
        """Whether the log should be truncated, before appends must be refused."""

    @property
    def space(self) -> StoreSpace | None:
        """The disk that the store writes to; None when it writes to no disk of this machine."""

    @property
    def link_copy(self) -> Callable[[Path], Coroutine[Any, Any, None]] | None:
        """Copies all durable data to a new path on the same disk while the store runs; None when
        the store has no files on this machine.

        The copy never changes. Its files may share disk blocks with the original's.
        """

    @property
    def topic_store(self) -> "TopicStore | None":
        """This store as a store of topics; None when it has no topics."""

    async def promise_tick(self, tick: int) -> None:
        """Record that readers may get ticks up to `tick` without an entry in the log; durable on
        return.
        """

    @property
    def condition(self) -> str:
        """The store's own state, as text for people."""

    @property
    def taking_writes(self) -> bool:
        """Whether the store takes writes: it is open, and no write has failed since it was opened
        or reopened.
        """

    async def wait_failed(self) -> None:
        """Wait until the store stops taking writes, because one has failed or another owner has
        taken over.
        """

    async def reopen(self) -> None:
        """Take writes again after a failed one, under the next term; returns at once when the store
        takes writes.

        Everything is verified as at a start. Open logs stay the same objects: reads wait until it
        is done, and `append` continues after the entries that are found. Raises `Corrupt` when
        synced data is missing, `ChannelFenced` when another owner has taken over, and the errors of
        opening; after an error it may be called again. Cancellation is delayed until it ends.
        """

    async def close(self) -> None:
        """Write everything queued, sync, and release all resources; idempotent."""


class TopicStore(Protocol):
    """A log store with topics: the interface that the owner of the topics needs."""

    openings: int
    """The number of openings. A write of an earlier opening is stored completely or not at all."""

    @property
    def state(self) -> BatchMap:
        """The state map, and the logs of its users."""

    @property
    def taking_writes(self) -> bool:
        """Whether the store takes writes; see `LogStore`."""

    def check_admitted(self, *, makes_room: bool) -> None:
        """Raise unless the store takes writes; raise `StorageFull` when there is no space for this
        one.
        """


def is_needed(kept: int, needed: Callable[[], int | None] | None) -> bool:
    """Return whether anything before `kept`, the new first position of a log, is needed now. Call
    it in the same step as the truncation.
    """
    floor = None if needed is None else needed()
    return floor is not None and floor < kept


def log_end(log: Log) -> AppendPack:
    """Return the innermost append: it queues the pack and waits until the log's durability mode
    acknowledges it.

    It does not suspend before the pack is queued. Raises `Indeterminate` when the pack may or may
    not be in the log.
    """

    async def append_to_log(pack: Pack) -> None:
        # Draw in the same step that queues the pack, so that a producer's sequences ascend with
        # positions, without gaps.
        if pack.draw is not None:
            pack.draw(pack)
        ticket = pack.ticket = log.append(pack)
        failpoint("append.queued")
        await ticket.written
        pack.settle()

    return append_to_log
