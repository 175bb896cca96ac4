"""A WAL with the real redo, lock and time tick interceptors on a log that a test steers."""

import asyncio
from collections.abc import Sequence

from interceptors.chain import Chain, LockInterceptor, Redo, RedoInterceptor, RoomInterceptor
from interceptors.timetick import AckManager, MvccManager, TimeTickInterceptor
from tests.wal.manual_log import A, ManualLog, allocator, settle
from wal.adaptor import Wal, WalLimits
from wal.headers import DropCollectionHeader, MessageType
from wal.live_tail import LiveTail
from wal.log import Append, AppendGroup, AppendObserver, AppendResult, Log
from wal.message import LogEntry, MutableMessage
from wal.queue import Budget
from wal.timetick import TICK_MAX


class Store:
    """The part of a log store that opening a WAL needs."""

    node_id = "node-1"
    term = 7

    def __init__(self, log: ManualLog) -> None:
        self.log = log

    async def open_log(self, name: str) -> ManualLog:
        return self.log


class Gatekeeper:
    """Stands for the innermost interceptors: sends appends back until `until` is done, when there is one."""

    name = "gatekeeper"

    def __init__(self) -> None:
        self.until: asyncio.Future[None] | None = None
        self.refusal: Exception | None = None
        self.closed = 0

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        if self.refusal is not None:
            raise self.refusal
        if self.until is not None and not self.until.done():
            raise Redo(self.until, waiting_for="the gate")
        return await append(group)

    async def ready(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1


class SteeredWal:
    def __init__(self, *, observer: AppendObserver | None = None, limits: WalLimits | None = None) -> None:
        self.log = ManualLog()
        self.ticks = allocator()
        self.tail = LiveTail()
        self.gatekeeper = Gatekeeper()
        self.failed: list[Sequence[str]] = []
        self._observer = observer
        self._limits = limits

    async def open(self) -> "SteeredWal":
        self.log.held = False
        self.wal: Wal[str, str] = await Wal.open(
            Store(self.log),  # type: ignore[arg-type]  # opening needs only this much of a store
            "p0",
            ticks=self.ticks,
            recover=self._recover,
            build_chain=self._build,
            read=lambda policy: f"reader of {policy}",
            observer=self._observer,
            limits=self._limits,
        )
        self.log.held = True
        return self

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any append: no task, no pending tick, no held lock."""
        locks_free = all(lock.idle for lock in self.lock._locks.values())
        return not self.wal.in_flight and not self.acks.pending and locks_free

    async def _recover(self, log: Log, first_tick: LogEntry) -> int:
        return first_tick.time_tick

    def _build(self, recovered: int, log: Log, first_tick: LogEntry, end: Append) -> Chain:
        self.first_tick = first_tick
        self.tail.start(next_position=first_tick.last_position + 1, confirmed_tick=recovered)
        self.acks = AckManager(self.ticks, confirmed_tick=recovered, tail=self.tail, mvcc=MvccManager(recovered))
        self.acks.promised_tick = TICK_MAX
        self.lock = LockInterceptor(
            lambda group: [message.vchannel for message in group.messages],
            lambda vchannels, _tick: self.failed.append(vchannels),
        )
        timetick = TimeTickInterceptor(wal_name=log.wal_name, acks=self.acks, oldest_open_begin=lambda: None)
        redo = RedoInterceptor(wait_s_max=5)
        room = RoomInterceptor(log.admit, Budget(1 << 30))
        return Chain([room, redo, self.lock, timetick, self.gatekeeper], end)


def drop(vchannel: str = A) -> AppendGroup:
    return AppendGroup([MutableMessage(MessageType.DROP_COLLECTION, DropCollectionHeader(1), vchannel=vchannel)])


async def start(wal: Wal[str, str], group: AppendGroup) -> "asyncio.Task[AppendResult]":
    task = asyncio.ensure_future(wal.append(group))
    await settle()
    return task
