"""The WAL of one pchannel: a log with a term, a lifecycle and an append path in front of it.

An append passes these checks in order: is the WAL available, does the group fit; then it gets the term and runs through the
chain, which waits for room behind the window of retries. A caller that is cancelled or times out stops waiting, and what it
began is finished or undone without it; closing waits for that. The WAL is given its chain and its readers; it knows neither
interceptors nor scanners.

Opening is staged: the first tick of the new term is durable before anything is recovered, so every earlier owner's
entries are below it; then state is rebuilt, then the chain is built on it, then appends pass.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import anyio

from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.errors import ChannelFenced, Indeterminate, InvalidArgument, StreamingNodeError, TooLarge
from wal.failpoint import failpoint
from wal.headers import DML, MessageType, TimeTickHeader
from wal.lifecycle import WalEvent, WalLifecycle, WalState, refusal
from wal.log import Append, AppendGroup, AppendObserver, AppendResult, Log, LogStore
from wal.message import LogEntry, MutableMessage, into_entry
from wal.position import message_id_kind
from wal.tasks import event_log
from wal.timetick import TickAllocator

_log = event_log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WalLimits:
    """Bounds of one append; a larger insert is split by whoever builds groups."""

    group_bytes_max: int = 4 << 20
    """Payloads and overhead of all messages of a group: what is copied, checksummed and written in one piece."""
    group_messages_max: int = MESSAGES_PER_ENTRY_MAX


class AppendChain(Protocol):
    """The append path a WAL is given; `append` is called concurrently, the rest once each, in this order."""

    @property
    def append(self) -> Append:
        """Append a group whose term is stamped."""

    async def ready(self) -> None:
        """Return once appends may pass."""

    async def close(self) -> None:
        """Send waiting appends away; new ones are already refused, and those on their way end by themselves. Idempotent."""


RecoveredT = TypeVar("RecoveredT")
PolicyT = TypeVar("PolicyT")
ReaderT = TypeVar("ReaderT")

Recover = Callable[[Log, LogEntry], Awaitable[RecoveredT]]
"""Rebuild state from the log, up to the first tick of this term (given as its entry)."""
BuildChain = Callable[[RecoveredT, Log, LogEntry, Append], AppendChain]
"""Build the append path from what was recovered, the log, the first tick of this term, and the log end."""


def log_end(log: Log) -> Append:
    """Return the innermost append: queue the group, wait until the log's durability mode acknowledges it.

    Up to the queue it does not suspend. Raises `Indeterminate` when nobody knows whether the group is in the log.
    """
    message_id = message_id_kind(log.wal_name)

    async def append_to_log(group: AppendGroup) -> AppendResult:
        if group.draw is not None:
            group.draw()  # in the step of the queue: so a producer's own sequences ascend with positions, without gaps
        ticket = group.ticket = log.append(group)
        failpoint("append.queued")
        await ticket.written
        last_confirmed = group.messages[0].last_confirmed
        first_position = ticket.first_position
        return AppendResult(
            first_message_id=message_id(first_position),
            count=len(group.messages),
            time_tick=group.time_tick,
            last_confirmed=message_id(first_position if last_confirmed is None else last_confirmed),
            row_offsets=group.row_offsets,
            durable=ticket.durable.done(),
        )

    return append_to_log


class Wal(Generic[PolicyT, ReaderT]):
    """One pchannel's log in one term. Made by `open`; all methods are called on the event loop."""

    def __init__(
        self,
        log: Log,
        term: int,
        *,
        read: Callable[[PolicyT], ReaderT],
        limits: WalLimits | None = None,
        observer: AppendObserver | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._log = log
        self._term = term
        self._open_reader = read
        self._limits = limits or WalLimits()
        self._observer = observer
        self._clock = clock
        self._lifecycle = WalLifecycle()
        self._chain: AppendChain | None = None
        self._in_flight: set[AppendGroup] = set()
        self._drained: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        store: LogStore,
        pchannel: str,
        *,
        ticks: TickAllocator,
        recover: Recover[RecoveredT],
        build_chain: BuildChain[RecoveredT],
        read: Callable[[PolicyT], ReaderT],
        limits: WalLimits | None = None,
        observer: AppendObserver | None = None,
    ) -> Self:
        """Return the WAL of `pchannel`, available, with the store's term.

        `ticks` starts above every tick an earlier term may have given out. When a stage fails or is cancelled, what it
        opened is closed; the store is the caller's. Raises what the stages raise.
        """
        log = await store.open_log(pchannel)
        wal = cls(log, store.term, read=read, limits=limits, observer=observer)
        try:
            end = log_end(log)
            first_tick = await wal._append_first_tick(end, ticks, store.node_id)
            failpoint("recovery.first_tick_durable")
            recovered = await recover(log, first_tick)
            failpoint("recovery.state_rebuilt")
            chain = wal._chain = build_chain(recovered, log, first_tick, end)
            await chain.ready()
            failpoint("recovery.chain_ready")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await wal.close()
            raise
        wal._lifecycle.apply(WalEvent.RECOVERED)
        return wal

    @property
    def pchannel(self) -> str:
        """Name of the log."""
        return self._log.name

    @property
    def term(self) -> int:
        """Number of this ownership."""
        return self._term

    @property
    def state(self) -> WalState:
        """What the WAL can do now."""
        return self._lifecycle.state

    @property
    def in_flight(self) -> int:
        """How many appends have begun and not ended, those without a listener too."""
        return len(self._in_flight)

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group, atomically, and return when the log has acknowledged it (after fsync unless configured less).

        Cancelling before the group is queued means that it never happened; after that its outcome is decided without the
        caller. Raises `OnShutdown`, `ChannelFenced` or `StorageFailed` when the WAL does not take appends,
        `InvalidArgument` or `TooLarge` for a group that does not fit, `Indeterminate` when nobody knows the outcome, and
        what the interceptors refuse.
        """
        if self._observer is None:
            return await self._append(group)
        started = self._clock()
        status = "error"
        try:
            result = await self._append(group)
            status = "ok"
            return result
        except asyncio.CancelledError:
            status = "cancel"
            raise
        finally:
            self._observer.append_ended(group, self._clock() - started, status)

    def read(self, policy: PolicyT) -> ReaderT:
        """Return a reader of this log that starts where `policy` says. Raises `OnShutdown` when the WAL is closed."""
        if self.state in (WalState.CLOSING, WalState.CLOSED):
            raise refusal(self.state, self.pchannel)
        return self._open_reader(policy)

    async def close(self) -> None:
        """Refuse new appends, let those in flight end, and let go of the chain; the log and its store stay open.

        Appends that wait are sent away. Idempotent: a second call waits for the first, or goes on where a cancelled one
        stopped. After it no append succeeds.
        """
        self._lifecycle.apply(WalEvent.CLOSE)
        async with self._closing:
            if self._chain is not None:
                await self._chain.close()
            await self._drain()
            self._chain = None  # not before: a detached append may still enter it
            if self.state is WalState.CLOSING:
                self._lifecycle.apply(WalEvent.DRAINED)

    async def _append(self, group: AppendGroup) -> AppendResult:
        self._check_available()
        self._check_fits(group)
        self._in_flight.add(group)
        if _has_books_to_close(group):
            return await self._run_detached(group)
        try:
            result = await self._append_in_chain(group)
        except asyncio.CancelledError:
            if group.ticket is None:  # it waited for room, a lock or a redo, and all of these leave no trace
                self._ended(group)
            else:
                group.ticket.durable.add_done_callback(lambda _: self._ended(group))
            raise
        except BaseException:
            self._ended(group)
            raise
        self._ended(group)
        return result

    async def _run_detached(self, group: AppendGroup) -> AppendResult:
        """Run an append in a task of its own, which ends whoever listens; cheaper than a shielded one."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[AppendResult] = loop.create_future()
        task = loop.create_task(self._run(group, outcome))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._task_ended(task, group))
        try:
            return await outcome
        except asyncio.CancelledError:
            if group.ticket is None:
                task.cancel()
            raise

    async def _run(self, group: AppendGroup, outcome: asyncio.Future[AppendResult]) -> None:
        try:
            result = await self._append_in_chain(group)
            if not outcome.done():
                outcome.set_result(result)
        except asyncio.CancelledError:
            outcome.cancel()
        except Exception as error:  # noqa: BLE001 - a task's border: the error is the caller's
            if not outcome.done():
                outcome.set_exception(error)
            elif not isinstance(error, StreamingNodeError):
                _log.exception("unattended_append_failed")

    def _task_ended(self, task: asyncio.Task[None], group: AppendGroup) -> None:
        self._tasks.discard(task)
        self._ended(group)

    def _ended(self, group: AppendGroup) -> None:
        self._in_flight.discard(group)
        if self._drained is not None and not self._in_flight and not self._drained.done():
            self._drained.set_result(None)

    async def _append_in_chain(self, group: AppendGroup) -> AppendResult:
        try:
            group.stamp_wal_term(self._term)
            assert self._chain is not None, "an available WAL has a chain"
            return await self._chain.append(group)
        except ChannelFenced:
            self._lifecycle.apply(WalEvent.FENCE)
            raise
        except Indeterminate as error:
            self._lifecycle.apply(WalEvent.WRITE_FAILED)
            if not group.begun:  # the log refused it because of an earlier write: this one did not happen
                raise refusal(self.state, self.pchannel) from error
            raise

    def _check_available(self) -> None:
        if self._lifecycle.state is not WalState.AVAILABLE:
            raise refusal(self._lifecycle.state, self.pchannel)

    def _check_fits(self, group: AppendGroup) -> None:
        assert group.ticket is None, "a group is appended once; build a new one to append again"
        if not group.messages:
            raise InvalidArgument("an append group without messages — skip the append")
        limits, count, size_bytes = self._limits, len(group.messages), group.size_bytes
        if count > limits.group_messages_max:
            raise TooLarge(f"{count} messages in one append group, {limits.group_messages_max} fit — split it")
        if size_bytes > limits.group_bytes_max:
            raise TooLarge(f"{size_bytes} bytes in one append group, {limits.group_bytes_max} fit — split it")

    async def _drain(self) -> None:
        while self._in_flight:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)

    async def _append_first_tick(self, end: Append, ticks: TickAllocator, source_id: str) -> LogEntry:
        """Append the tick that bounds recovery and comes before everything else of this term."""
        group = AppendGroup([MutableMessage(MessageType.TIME_TICK, TimeTickHeader(source_id=source_id))])
        last_confirmed = await _last_confirmed_of(self._log)
        await self._log.admit(group.size_bytes, makes_room=group.makes_room)
        group.stamp_wal_term(self._term)
        group.stamp_time_tick(ticks.allocate(), last_confirmed)
        await end(group)
        ticket = group.ticket
        assert ticket is not None
        await ticket.durable
        self._lifecycle.apply(WalEvent.FIRST_TICK_DURABLE)
        return into_entry(
            group.messages,
            wal_name=self._log.wal_name,
            first_position=ticket.first_position,
            crc32c=ticket.crc32c,
            size_bytes=ticket.size_bytes,
        )


def _has_books_to_close(group: AppendGroup) -> bool:
    """Whether the chain has something to do for the group after its place in the log's queue.

    Rows that are a whole by themselves need nothing more than their ticket, so they run in their caller's own task; a
    transaction's session, and who else has an exclusive message's vchannels, wait for the end of the append.
    """
    head = group.messages[0]
    if head.type is MessageType.BEGIN_TXN:
        return len(group.messages) == 1
    return bool(head.txn_id) or head.type not in DML


async def _last_confirmed_of(log: Log) -> int | None:
    """Return a position at or before the begin of every transaction the last term left open; None for an empty log.

    The last entry's own last-confirmed position is one: what was open then begins at or after it, and nothing came later.
    """
    if log.next_position == log.first_position:
        return None
    entries = await log.read(log.next_position - 1, bytes_max=1)
    return max(entries[0].last_confirmed_position, log.first_position)
