"""A log whose writes end when and how a test says; positions and tickets as any log gives them."""

import asyncio
from collections.abc import Callable

from tests.wal.packed import FakeTarget, lay_out, piece, rows_group
from wal.append import AppendGroup, AppendTicket, Pack
from wal.entry import LogEntry
from wal.errors import Indeterminate
from wal.headers import BeginTxnHeader, CommitTxnHeader, InsertHeader, MessageType, TimeTickHeader
from wal.message import MutableMessage
from wal.timetick import TickAllocator

A = "p0_1v0"
B = "p0_1v1"


class ManualLog:
    """Appends are queued; `write` acknowledges the oldest ones, `sync` makes them durable,
    `break_down` fails the rest.

    Not `held`, it does both at once. `admission` keeps appends out of the queue until it is done.
    """

    name = "p0"
    wal_name = "memory"

    def __init__(self, *, durability: str = "fsync") -> None:
        self._fsync = durability == "fsync"
        self.held = True
        self.queue: list[AppendTicket] = []
        self.written: list[AppendTicket] = []
        self.entries: list[bytes] = []
        """All that was ever queued, encoded."""
        self._placed: dict[int, LogEntry] = {}
        self._lost: list[AppendTicket] = []
        self.next_position = 1
        self.first_position = 1
        self.last_tick = 0
        self.refusal: Exception | None = None
        self.admission: asyncio.Future[None] | None = None

    @property
    def durable_position(self) -> int:
        return 0

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.admission is not None:
            await asyncio.shield(self.admission)

    def append(self, pack: Pack) -> AppendTicket:
        if self.refusal is not None:
            raise self.refusal
        if not pack.messages and not pack.message_counts:  # of a chain without shards
            lay_out(pack)
        pack.require_tick_above(self.last_tick)
        data = pack.encode(self.wal_name, first_position=self.next_position, previous_crc32c=0)
        self.last_tick = pack.time_tick
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = AppendTicket(self.next_position, written, durable)
        self.next_position += pack.message_count
        self.queue.append(ticket)
        self.entries.append(data)
        assert pack.entry is not None
        self._placed[ticket.first_position] = pack.entry
        if not self.held:
            self.write()
            self.sync()
        return ticket

    def write(self, count: int | None = None) -> None:
        count = len(self.queue) if count is None else count
        for _ in range(count):
            ticket = self.queue.pop(0)
            if self._fsync:
                ticket.durable.set_result(None)
            if not ticket.written.done():
                ticket.written.set_result(None)
            self.written.append(ticket)

    def sync(self) -> None:
        for ticket in self.written:
            if not ticket.durable.done():
                ticket.durable.set_result(None)

    def break_down(self) -> None:
        error = Indeterminate("the disk is gone")
        for ticket in self.queue:
            for outcome in (ticket.written, ticket.durable):
                if not outcome.done():
                    outcome.set_exception(error)
                    outcome.exception()
        self._lost = list(self.queue)
        self.queue.clear()
        self.refusal = error

    def mend(self, *, kept: int = 0) -> None:
        """Take appends again, and acknowledge them at once; of those that failed so many are
        there.
        """
        self.refusal = self.admission = None
        self.held = False
        if len(self._lost) > kept:
            self.next_position = self._lost[kept].first_position
        self._lost.clear()
        self.first_position = self.next_position  # as if it were new: opening a term reads nothing

    async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
        return [self._placed[position]]

    async def wait_beyond(self, position: int) -> None:
        raise NotImplementedError

    async def truncate(
        self, position: int, *, needed: Callable[[], int | None] | None = None
    ) -> None:
        raise NotImplementedError


class StillClock:
    """Milliseconds that move only when a test says."""

    def __init__(self, now_ms: int = 1_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


def allocator(clock: StillClock | None = None) -> TickAllocator:
    """Return ticks of a clock that is never found to leap."""
    clock = clock or StillClock()
    return TickAllocator(clock, clock)


_targets: dict[tuple[str, ...], FakeTarget] = {}


def insert(*vchannels: str, txn_id: int = 0) -> AppendGroup:
    """Return an insert of a row on each vchannel; with a transaction's id, the messages that are
    its bodies.
    """
    vchannels = vchannels or (A,)
    if txn_id:
        header = InsertHeader(1, 1, 1, 1)
        return AppendGroup(
            [
                MutableMessage(MessageType.INSERT, header, vchannel=v, txn_id=txn_id)
                for v in vchannels
            ]
        )
    # A collection of their own: one collection's rows share batches, and its vchannels.
    target = _targets.setdefault(
        vchannels, FakeTarget(collection_id=1 + len(_targets), vchannels=vchannels)
    )
    return rows_group(piece(target, *((shard, b"row") for shard in range(len(vchannels)))))


def begin() -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.BEGIN_TXN, BeginTxnHeader(1000))])


def commit(*vchannels: str, txn_id: int = 5) -> AppendGroup:
    return AppendGroup(
        [
            MutableMessage(
                MessageType.COMMIT_TXN, CommitTxnHeader(vchannels=vchannels), txn_id=txn_id
            )
        ]
    )


def time_tick() -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader())])


async def settle() -> None:
    """Let every task run until it waits for something that only the test can bring about."""
    for _ in range(10):
        await asyncio.sleep(0)
