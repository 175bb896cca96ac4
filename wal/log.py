"""The contracts of a log store, of the map of state beside its logs, and of the logs that users of
that map keep. The stores on RocksDB and in memory keep all of them.

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
    """One ordered log of packs, which are its entries: an `EntryLog` and the codec of packs.

    Positions begin at 1, ids ascend in append order. All methods are called on the event loop; none
    blocks it.
    """

    name: str
    wal_name: str
    """The kind of log, as message ids name it."""
    last_tick: int
    """Tick of the last entry in the log, 0 for an empty one."""

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        """Wait until the queue has room for `size_bytes`; back-pressure, first come first served.

        Raises `StorageFull` when the disk is below its low-water mark (what `makes_room` only when
        nothing can be written any more), `OnShutdown` when closed, `LogReopening` when an earlier
        write failed and the store refuses more. Cancelling gives the place in the queue back.
        """

    def append(self, pack: Pack) -> AppendTicket:
        """Give a stamped pack its positions and queue it; never suspends, so call order is position
        order.

        Entries become durable in call order; when one fails, all after it fail too. Raises as
        `admit` does, and `InvalidArgument`, before anything is queued, for a tick that is not above
        the one before it.
        """

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Give up everything before the entry that holds `position`, and its disk space;
        idempotent.

        Nothing goes when by then something from before it is `needed`: who asks for less may have
        come meanwhile.
        """


class StateMap(Protocol):
    """A small durable map beside the logs of a store: keys are text, values are bytes.

    It is meant for thousands of records of some kilobytes, all of which fit in memory. All methods
    are called on the event loop; none blocks it. After a failed write all raise `LogReopening`
    until the store is reopened, since nobody knows then whether the last change is there; after
    `close` they raise `OnShutdown`.
    """

    async def get(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""

    async def scan(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, ordered by the keys' UTF-8
        bytes.
        """

    async def put(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys (None removes), all at once or none; durable on return.

        Changes take effect in call order. An entry that was acknowledged before the call is durable
        on return, too. Cancelling the caller does not undo the change.
        """


class BatchMap(StateMap, Protocol):
    """A map of state beside which its users keep logs of their own, changed by the same batches.

    A user's records say where its logs begin and end.
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
        """Return a log as its owner's records describe it, until `release`.

        `title` begins the text of errors, before a position.
        """

    def release(self, log: OwnedLog[Any]) -> None:
        """Let go of a log; its entries stay. Idempotent."""

    def write(self, batch: Batch) -> asyncio.Future[None]:
        """Queue a batch; never suspends, so call order is the order on disk.

        The future is done when the batch is synced, whatever the durability, and readers see its
        entries. It fails with `Indeterminate` when the write failed. Raises what the store's state
        says when nothing was done; a low disk refuses nothing here.
        """

    async def reclaim(self, batch: Batch) -> None:
        """Give back the disk space of what a durable batch has deleted."""


@unique
class SpaceLevel(IntEnum):
    """How short the disk of a store is: from `SHORT` on, log should be truncated; from `FULL` on,
    appends are refused; at `EXHAUSTED`, every write is.
    """

    AMPLE = 0
    SHORT = 1
    FULL = 2
    EXHAUSTED = 3


class StoreSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of a store as of its last look, in bytes.

    `needed_bytes` is the low-water mark, 0 without one. `free_bytes` does not count the reserve,
    `log_bytes` is the store's own write-ahead log, `reserve_bytes` what the reserve should have.
    """

    level: SpaceLevel
    free_bytes: int
    log_bytes: int
    needed_bytes: int
    reserve_bytes: int


class LogReader(Protocol):
    """The logs of a node and the map of state beside them, one log for each pchannel; a store that
    was opened for reading only is no more than that.
    """

    node_id: str
    """Identity of the node's data, made at first open and kept for ever."""

    @property
    def state(self) -> StateMap:
        """The map of state beside the logs; the same object for as long as the store lives."""

    async def open_log(self, name: str) -> Log:
        """Return the log of pchannel `name`, verified, and made if it is new."""


class LogStore(LogReader, Protocol):
    """The owner of a node's logs.

    What not every store has is None: `space`, `link_copy` and `topic_store`.
    """

    term: int
    """Number of this ownership, above every earlier one."""
    promised_tick: int
    """The highest tick any earlier term may have given to a reader; new ticks start above it."""

    @property
    def queued_bytes(self) -> int:
        """Bytes that were appended and are not durable yet."""

    @property
    def short_of_space(self) -> bool:
        """Whether log should be truncated before appends have to be refused."""

    @property
    def space(self) -> StoreSpace | None:
        """The disk the store writes to; None when it writes to none of this machine's."""

    @property
    def link_copy(self) -> Callable[[Path], Coroutine[Any, Any, None]] | None:
        """Makes a copy of all that is durable at a new path of the same disk while the store runs;
        None when the store has no files on this machine.

        The copy does not change any more. Its files may share bytes with the original's.
        """

    @property
    def topic_store(self) -> "TopicStore | None":
        """This store as one that keeps topics; None when it keeps none."""

    async def promise_tick(self, tick: int) -> None:
        """Remember that ticks up to `tick` may be given to readers without an entry in the log;
        durable on return.
        """

    @property
    def condition(self) -> str:
        """The store's own state, for people."""

    @property
    def taking_writes(self) -> bool:
        """Whether writes are taken: no write has failed since the store was opened, or reopened,
        and it is not closed.
        """

    async def wait_failed(self) -> None:
        """Wait until the store takes no writes because one has failed, or because another owner has
        taken over.
        """

    async def reopen(self) -> None:
        """Take writes again after one failed, under the next term; returns at once when writes are
        taken.

        Everything is verified as at a start. Logs that were opened stay the same objects: reads
        wait meanwhile, `append` goes on behind what is found. Raises `Corrupt` when something that
        was synced is missing, `ChannelFenced` when another owner has taken over, and what opening
        raises; it may be called again then. Not cut short by cancellation.
        """

    async def close(self) -> None:
        """Write what is queued, sync, and release what the store owns; idempotent."""


class TopicStore(Protocol):
    """A log store that can keep topics: what their owner needs of it."""

    openings: int
    """How often it was opened: what was being written before is there as a whole or not at all."""

    @property
    def state(self) -> BatchMap:
        """The map of state, and the logs of its users."""

    @property
    def taking_writes(self) -> bool:
        """Whether writes are taken; see `LogStore`."""

    def check_admitted(self, *, makes_room: bool) -> None:
        """Raise unless writes are taken, and `StorageFull` when there is no room for this one."""


def is_needed(kept: int, needed: Callable[[], int | None] | None) -> bool:
    """Whether something before the position that a log would be cut to is needed now; asked in the
    step of the cut.
    """
    floor = None if needed is None else needed()
    return floor is not None and floor < kept


def log_end(log: Log) -> AppendPack:
    """Return the innermost append: queue the pack, wait until the log's durability mode
    acknowledges it.

    Up to the queue it does not suspend. Raises `Indeterminate` when nobody knows whether the pack
    is in the log.
    """

    async def append_to_log(pack: Pack) -> None:
        # In the step of the queue: so a producer's own sequences ascend with positions, without
        # gaps.
        if pack.draw is not None:
            pack.draw(pack)
        ticket = pack.ticket = log.append(pack)
        failpoint("append.queued")
        await ticket.written
        pack.settle()

    return append_to_log
