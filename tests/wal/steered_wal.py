"""A WAL with the real redo, lock and time tick interceptors on a log that a test steers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from interceptors.chain import (
    Chain,
    Interceptor,
    LockInterceptor,
    Redo,
    RedoInterceptor,
    RoomInterceptor,
)
from interceptors.timetick import AckManager, MvccManager, TimeTickInterceptor
from tests.wal.manual_log import A, ManualLog, allocator, settle
from wal.adaptor import Wal, WalLimits
from wal.append import Append, AppendGroup, AppendObserver, AppendPack, AppendResult, Pack
from wal.entry import LogEntry
from wal.errors import StreamingNodeError
from wal.headers import DropCollectionHeader, MessageType
from wal.lifecycle import ReopenOptions
from wal.live_tail import LiveTail
from wal.message import MutableMessage
from wal.queue import Budget
from wal.timetick import TICK_MAX


class Store:
    """The part of a log store that a WAL needs; it fails, and cannot be reopened, when a test says
    so.
    """

    node_id = "node-1"
    term = 7
    condition = "open"

    def __init__(self) -> None:
        self.taking_writes = True
        self.failed = asyncio.Event()
        self.may_reopen = asyncio.Event()
        self.refusals: list[Exception] = []

    def fail(self) -> None:
        self.taking_writes = False
        self.failed.set()

    async def wait_failed(self) -> None:
        await self.failed.wait()

    async def reopen(self) -> None:
        await self.may_reopen.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.term += 1
        self.taking_writes = True
        self.failed.clear()


class Gatekeeper(Interceptor):
    """Stands for the innermost interceptors: refuses groups, and sends back those `waiting` for
    `until`, or all.
    """

    name = "gatekeeper"

    def __init__(self) -> None:
        self.until: asyncio.Future[None] | None = None
        self.waiting: list[AppendGroup] = []
        self.refusal: Exception | None = None
        self.refused: dict[AppendGroup, StreamingNodeError] = {}
        self.packs: list[Pack] = []
        """Those that came, and how often."""
        self.closed = 0

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        self.packs.append(pack)
        if self.refusal is not None:
            raise self.refusal
        last_tick = pack.time_tick
        if not pack.messages:
            pack.drop_cancelled()
        for group in list(pack.groups):
            if (error := self.refused.get(group)) is not None:
                pack.leave(group, error)
        if not pack.groups:
            return
        if self.until is not None and not self.until.done():
            waiting = [group for group in pack.groups if group in self.waiting]
            if waiting or not self.waiting:
                raise Redo(self.until, waiting_for="the gate", groups=waiting)
        pack.stamp(last_tick, pack.last_confirmed)
        await append(pack)

    async def ready(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1


class SteeredTerm:
    """A term of the real redo, lock and time tick interceptors, without workers."""

    def __init__(self, steered: "SteeredWal", first_tick: LogEntry, end: AppendPack) -> None:
        log = steered.log
        confirmed_tick = first_tick.time_tick
        steered.tail.start(
            next_position=first_tick.last_position + 1, confirmed_tick=confirmed_tick
        )
        self.acks = AckManager(
            steered.ticks,
            confirmed_tick=confirmed_tick,
            tail=steered.tail,
            mvcc=MvccManager(confirmed_tick),
        )
        self.acks.promised_tick = TICK_MAX
        self.lock = LockInterceptor(
            vchannels_of, lambda vchannels, _tick: steered.failed.append(vchannels)
        )
        timetick = TimeTickInterceptor(acks=self.acks, oldest_open_begin=lambda: None)
        redo = RedoInterceptor(wait_s_max=5)
        room = RoomInterceptor(log.admit, steered.room)
        chain = Chain([room, redo, self.lock, timetick, steered.gatekeeper], end)
        self.append = chain.append
        self.ready = chain.ready
        self.close = chain.close

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None:
        await failed()

    def end(self) -> None:
        self.acks.end()


class SteeredWal:
    def __init__(
        self,
        *,
        observer: AppendObserver | None = None,
        limits: WalLimits | None = None,
        reopen: ReopenOptions | None = None,
    ) -> None:
        self.log = ManualLog()
        self.store = Store()
        self.ticks = allocator()
        self.tail = LiveTail()
        self.gatekeeper = Gatekeeper()
        self.failed: list[Sequence[str]] = []
        self.memory = Budget(1 << 20)
        self.room = Budget(1 << 30)
        self.wal = Wal(
            self.store,  # type: ignore[arg-type]  # a WAL needs only this much of a store
            self.log,
            self._open_term,
            ticks=self.ticks,
            memory=self.memory,
            observer=observer,
            limits=limits,
            reopen=reopen,
        )

    async def open(self) -> "SteeredWal":
        self.log.held = False
        await self.wal.open()
        self.log.held = True
        return self

    async def _open_term(self, first_tick: LogEntry, end: AppendPack) -> SteeredTerm:
        self.first_tick = first_tick
        self.term = SteeredTerm(self, first_tick, end)
        return self.term

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any append: no task, no pending tick, no held lock, no
        memory.
        """
        locks_free = all(lock.idle for lock in self.term.lock._locks.values())
        held_bytes = self.memory.held_bytes + self.room.held_bytes
        return not (self.wal.in_flight or self.term.acks.pending or held_bytes) and locks_free


def vchannels_of(pack: Pack) -> list[str]:
    """Return the vchannels a pack concerns."""
    of_rows = [piece.target.vchannels for group in pack.groups for piece in group.pieces]
    return sorted(
        {name for names in of_rows for name in names}
        | {message.vchannel for message in pack.messages}
    )


def drop(vchannel: str = A) -> AppendGroup:
    return AppendGroup(
        [MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=vchannel)]
    )


async def start(wal: Wal, group: AppendGroup) -> "asyncio.Task[AppendResult]":
    task = asyncio.ensure_future(wal.append(group))
    await settle()
    return task
