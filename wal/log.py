"""The contract of a log store, which those on RocksDB and in memory keep.

`tests/wal/log_contract.py` is the contract as tests; every store passes it.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from wal.append import AppendPack, AppendTicket, Pack
from wal.entry import LogEntry
from wal.failpoint import failpoint


class Log(Protocol):
    """One ordered log. Positions are dense from 1, ids ascend in append order, entries are atomic.

    All methods are called on the event loop; none blocks it.
    """

    name: str
    wal_name: str
    """The kind of log, as message ids name it."""
    first_position: int
    """Position of the earliest message still kept; `next_position` when none is."""
    next_position: int
    last_tick: int
    """Tick of the last entry in the log, 0 for an empty one."""

    @property
    def durable_position(self) -> int:
        """Position of the last message known to be synced; 0 when none is."""

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

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        """Return consecutive synced entries from the one that holds `position`, at least one if
        there is one.

        Stops after the entry that reaches `bytes_max`. Empty when `position` is past the last
        synced entry. Every entry is checked: checksum, chain, density. Raises `Truncated` below
        `first_position`, `Corrupt` with the range for damage or an early end.
        """

    async def wait_beyond(self, position: int) -> None:
        """Wait, without polling, until a message after `position` is synced. Raises `OnShutdown` on
        close.
        """

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        """Give up everything before the entry that holds `position`, and its disk space;
        idempotent.

        Nothing goes when by then something from before it is `needed`: who asks for less may have
        come meanwhile.
        """


class LogStore(Protocol):
    """Owner of a node's logs, one for each pchannel, and of the small map of state beside them."""

    node_id: str
    """Identity of the node's data, made at first open and kept for ever."""
    term: int
    """Number of this ownership, above every earlier one."""
    promised_tick: int
    """The highest tick any earlier term may have given to a reader; new ticks start above it."""

    @property
    def short_of_space(self) -> bool:
        """Whether log should be given up before appends have to be refused."""

    async def promise_tick(self, tick: int) -> None:
        """Remember that ticks up to `tick` may be given to readers without an entry in the log;
        durable on return.
        """

    async def open_log(self, name: str) -> Log:
        """Return the log of pchannel `name`, made if it is new, verified if not."""

    async def get_meta(self, key: str) -> bytes | None:
        """Return the value of `key`, None if it has none."""

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """Return all keys that start with `prefix`, and their values, in key order."""

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys (None removes) all at once; durable when it returns."""

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
        """Write what is queued, sync, and release the directory; idempotent."""


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
