"""The WAL of one pchannel while its node is open: the append from end to end, and the terms of its
log.

The WAL gets the chain of each term from outside and depends on neither interceptors nor scanners.
`wal.lifecycle` defines the states; `keep` drives them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import anyio

from wal.append import Append, AppendGroup, AppendObserver, AppendPack, AppendResult, Pack
from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.entry import LogEntry
from wal.errors import (
    Indeterminate,
    InvalidArgument,
    LogReopening,
    OnShutdown,
    StorageFull,
    StreamingNodeError,
    TooLarge,
)
from wal.failpoint import failpoint
from wal.headers import DML, MessageType, TimeTickHeader
from wal.lifecycle import (
    OBSTACLES,
    TRANSITIONS,
    LogState,
    LogStatus,
    ReopenOptions,
    is_final,
)
from wal.log import Log, LogStore, log_end
from wal.message import MutableMessage
from wal.packer import Packer
from wal.queue import Budget
from wal.runtime import Scope, event_log
from wal.timetick import TickAllocator

_log = event_log(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WalLimits:
    """Limits of one append; the code that builds groups splits larger inserts."""

    group_bytes_max: int = 4 << 20
    """The size of a group's rows with overhead, which is copied, checksummed and written in one
    piece.
    """
    group_messages_max: int = MESSAGES_PER_ENTRY_MAX


CONTROL_BYTES_MAX = 64 << 20
"""Limit for a group of messages without rows, which cannot be split: a schema goes to each shard. A
group of this size blocks the event loop for 0.3 s.
"""
PENDING_BYTES_MAX = 64 << 20
"""The default limit for the memory of rows that wait to be packed or are on their way."""


class Term(Protocol):
    """The parts of a log that live for one term: the chain and the background appends. It is
    created when the term's first tick is durable.
    """

    @property
    def append(self) -> AppendPack:
        """The chain's append, for a pack with its term stamped."""

    async def ready(self) -> None:
        """Wait until appends may pass."""

    async def work(self, append: Append, failed: Callable[[], Awaitable[None]]) -> None:
        """Append in the background until `failed` returns. Raises the error of a worker."""

    async def close(self) -> None:
        """Refuse waiting appends. New appends are already refused, and running ones end by
        themselves. Idempotent.
        """

    def end(self) -> None:
        """End all waits for ticks of this term and allocate none: its last append has ended.
        Idempotent.
        """


OpenTerm = Callable[[LogEntry, AppendPack], Awaitable[Term]]
"""Rebuilds state from the log up to the entry of the term's first tick, and builds the chain around
the log end. Leaves nothing open when it raises.
"""


class Wal:
    """The log of one pchannel over all its terms; call `open` first. All methods are called on the
    event loop.
    """

    def __init__(
        self,
        store: LogStore,
        log: Log,
        open_term: OpenTerm,
        *,
        ticks: TickAllocator,
        memory: Budget | None = None,
        limits: WalLimits | None = None,
        reopen: ReopenOptions | None = None,
        observer: AppendObserver | None = None,
        explain: Callable[[StreamingNodeError], None] = lambda _: None,
    ) -> None:
        """`ticks` are above all ticks of earlier terms; `explain` raises a better error than the
        one it gets, if there is one.
        """
        self.state = LogState.RECOVERING
        self.term = store.term
        """The number of the current term, or of the last one."""
        self._store = store
        self._log = log
        self._ticks = ticks
        self._end = log_end(log)
        self._make_term = open_term
        self._limits = limits or WalLimits()
        self._reopening = reopen or ReopenOptions()
        self._observer = observer
        self._explain = explain
        self._term: Term
        self.in_flight: set[Pack] = set()
        """The running appends of this term, including those without a caller."""
        self.packer = Packer(self._append_pack, memory or Budget(PENDING_BYTES_MAX))
        self._doubtful: list[Pack] = []
        """The packs of the ended term whose writes failed; the next term finds out which of them
        are in the log.
        """
        self._drained = asyncio.Event()
        self._back: asyncio.Future[None] | None = None
        """Completes when a lost log is back, fails when it will not come back; None while the log
        is not lost.
        """
        self._final_error: Exception | None = None
        self._full: StorageFull | None = None
        """The reason why the log is not back, if it is a full disk. Calls then do not wait, because
        waiting does not free space.
        """
        self._kept: asyncio.Future[None] | None = None
        self._scope = Scope()
        self._reopened = self._attempts = 0
        self._last_error = ""

    async def open(self) -> None:
        """Open the store's term; afterwards the owner runs `keep`.

        Raises the errors of recovery and the log, and then leaves nothing open.
        """
        await self._open_term()
        self._become(LogState.OPEN)

    @property
    def status(self) -> LogStatus:
        """The current status of the log."""
        return LogStatus(
            pchannel=self._log.name,
            state=self.state.value,
            store=self._store.condition,
            term=self.term,
            reopened=self._reopened,
            attempts=self._attempts,
            last_error=self._last_error,
        )

    def asked_ms(self, txn_id: int) -> int | None:
        """Return when the waiting append of a transaction was requested, in ms of a steady clock;
        None when no append waits.
        """
        for pack in self.packer.messages:
            if pack.messages[0].txn_id == txn_id and not pack.groups[0].cancelled:
                return pack.asked_ms
        return None

    # --- the append, from end to end --------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group atomically and exactly once; await it at once. Returns when the log has
        acknowledged the group.

        Rows share an entry with other waiting rows; messages get their own entry. When the write
        fails, the outcome is unknown until the log is reopened: then the group is either in the
        log, or it is appended like a new one. A group that is cancelled before it is queued never
        happens; after that its outcome is decided without the caller. Raises `InvalidArgument` or
        `TooLarge` for a group that does not fit, `LogReopening`, `StorageFull` or `OnShutdown` when
        the log does not take it, `Indeterminate` when the log does not come back in time, and the
        errors of interceptors.
        """
        self._check_size(group)
        return self.packer.append(group)

    def append_once(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append messages like `append`, but raise `Indeterminate` at once for an unknown outcome,
        which the caller resolves itself.
        """
        self._check_size(group)
        return self.packer.append(group, self._try)

    def _check_size(self, group: AppendGroup) -> None:
        limits = self._limits
        size_bytes = group.size_bytes
        count = len(group.messages)
        if not size_bytes:
            raise InvalidArgument("an append group without messages — skip the append")
        if count > limits.group_messages_max:
            raise TooLarge(
                f"{count} messages in one append group, {limits.group_messages_max} fit — split it"
            )
        if size_bytes <= limits.group_bytes_max:
            return
        bytes_max = limits.group_bytes_max
        step = "split it"
        if count and group.messages[0].type not in DML:
            bytes_max = max(bytes_max, CONTROL_BYTES_MAX)
            step = "give it fewer shards, or fewer columns with shorter names"
        if size_bytes > bytes_max:
            raise TooLarge(f"{size_bytes} bytes in one append group, {bytes_max} fit — {step}")

    async def _append_pack(self, pack: Pack) -> None:
        """Append a pack. On return each of its groups is settled or has left to be appended again.
        Raises the errors of `append`.
        """
        try:
            while True:
                try:
                    return await self._try(pack)
                except Indeterminate as doubt:
                    if await self._is_in_log(pack, doubt):
                        return pack.settle()
                    pack.come_anew()
        except StreamingNodeError as error:
            self._explain(error)
            raise

    async def _is_in_log(self, pack: Pack, doubt: Indeterminate) -> bool:
        """Wait until the log is back and return whether it has a pack in doubt.

        Raises `doubt` when the log does not come back within `reopen.wait_s` seconds.
        """
        if not self._store.taking_writes:
            self._lose()
        if self._back is not None:
            await asyncio.wait((self._back,), timeout=self._reopening.wait_s)
        if pack.ticket is None and pack.wal_term < self.term:
            # it waited for another attempt of its write; the new term's window has the outcome of
            # that
            return False
        if pack.is_in_log is None:
            raise doubt
        return pack.is_in_log

    async def _try(self, pack: Pack) -> None:
        while True:
            if self.state is not LogState.OPEN:  # the log takes this pack now, later or never
                await self._wait_open()
            term = self._term
            status = "error"
            started = time.perf_counter()
            pack.stamp_wal_term(self.term)
            pack.refused = 0
            self.in_flight.add(pack)
            try:
                await term.append(pack)
                status = "ok"
                return
            except asyncio.CancelledError:
                status = "cancel"
                raise
            except StreamingNodeError:
                # A pack without a place in the log had no effect, so append it in the next term
                # like a new one. Call `_ends` first in any case: it notices a failed write, and
                # later appends must wait from here on.
                if (
                    not self._ends(term)
                    or pack.begun
                    or any(group.is_joined for group in pack.groups)
                ):
                    raise
            finally:
                self._ended(pack)
                if self._observer is not None:
                    self._observer.append_ended(pack, time.perf_counter() - started, status)

    def _ended(self, pack: Pack) -> None:
        if pack.has_failed:
            self._doubtful.append(pack)
        self.in_flight.discard(pack)
        if not self.in_flight:
            self._drained.set()

    # --- waiting for a failed log -----------------------------------------------------------------

    async def in_term(self, call: Callable[[], Awaitable[T]], *, settled: bool = False) -> T:
        """Return the result of `call`. It is called again in the next term when it failed because
        its term ended.

        With `settled` it is also called again when it succeeded in a term that ended, so that the
        outcome of a failed write is known in the end. Raises the errors of `wait_back` and of
        `call`; `Indeterminate` when one call may have taken effect and no later call could run.
        """
        doubt: Indeterminate | None = None
        while True:
            term: Term | None = None
            try:
                await self.wait_back()
                term = self._term
                result = await call()
                if not (settled and self._ends(term)):
                    return result
            except StreamingNodeError as error:
                doubt = error if isinstance(error, Indeterminate) else doubt
                if term is None or not self._ends(term):
                    if doubt is None or error is doubt or (error.decides and term is not None):
                        raise
                    raise doubt from error

    async def wait_back(self) -> None:
        """Wait until the log is back after a failed write; returns at once when it is not lost.

        Raises `LogReopening` when that takes longer than `reopen.wait_s`, `StorageFull` while a
        full disk prevents it, and the final error when the log will not come back.
        """
        while self._back is not None:
            if self._full is not None and not self._back.done():
                raise self._full.with_traceback(None)
            # `keep` reopens the log; without it waiting is useless
            back = self._back
            wait_s = self._reopening.wait_s if self._kept else 0
            done, _ = await asyncio.wait((back,), timeout=wait_s)
            if not done:
                raise LogReopening(
                    f"log {self._log.name} is {self.state.value} since a write failed, and was not "
                    f"back within {wait_s:g} s"
                )
            back.result()

    async def _wait_open(self) -> None:
        """Wait until the log takes packs. Raises the errors of `wait_back`, and `OnShutdown` when
        it takes none any more.
        """
        await self.wait_back()
        if self.state is not LogState.OPEN:
            raise OnShutdown(f"log {self._log.name} is {self.state.value} — open the node again")

    def _ends(self, term: Term) -> bool:
        """Notice a failed write, if any, and return whether `term` has ended, so that a call may be
        retried in the next one.

        Checked here, not only in `keep`, which notices it later: a caller must not retry in a busy
        loop.
        """
        if not self._store.taking_writes:
            self._lose()
        return term is not self._term or self._back is not None

    def _lose(self) -> None:
        if self.state is LogState.OPEN:
            self._become(LogState.ENDING)
            self._back = asyncio.get_running_loop().create_future()
            # a write that fails while the node closes makes no caller wait
            if self._final_error is not None:
                self._fail_waiting(self._final_error)

    def _fail_waiting(self, error: Exception) -> None:
        self._final_error = error
        if self._back is not None and not self._back.done():
            self._back.set_exception(error)
            self._back.exception()  # marks it as retrieved: no caller may be waiting

    def _become(self, state: LogState) -> None:
        if self.state is not LogState.CLOSED:  # after the close, running steps end by themselves
            assert state in TRANSITIONS[self.state], f"{state} after {self.state}"
            self.state = state

    # --- changing the term ------------------------------------------------------------------------

    async def keep(self) -> None:
        """Run the workers of each term, and open the next term after a failed write, until `close`.

        Raises the final error when that is impossible: damage, another owner, or a bug of a worker.
        """
        self._kept = asyncio.get_running_loop().create_future()
        try:
            with self._scope:
                while True:
                    await self._term.work(self.append_once, self._store.wait_failed)
                    await self._change_term()
        except Exception as error:
            self._become(LogState.FAILED)
            self._fail_waiting(error)
            raise
        finally:
            self._kept.set_result(None)

    async def _change_term(self) -> None:
        started = time.perf_counter()
        self._lose()
        _log.warning(
            "log_lost", pchannel=self._log.name, term=self.term, store=self._store.condition
        )
        failpoint("recovery.write_failed")
        await self._end_term()
        failpoint("recovery.term_ended")
        self._become(LogState.REOPENING)
        await self._reopen()
        self._reopened = self._reopened + 1
        self._attempts = 0
        self._full = None
        self._doubtful.clear()
        self._become(LogState.OPEN)
        back = self._back
        self._back = None
        if back is not None and not back.done():
            back.set_result(None)
        seconds = round(time.perf_counter() - started, 3)
        _log.warning("log_reopened", pchannel=self._log.name, term=self.term, seconds=seconds)

    async def _reopen(self) -> None:
        pause_s = self._reopening.first_pause_s
        obstacles_seen = 0
        while True:
            try:
                await self._store.reopen()
                self._become(LogState.RECOVERING)
                failpoint("recovery.reopened")
                return await self._open_term()
            except (StreamingNodeError, OSError) as error:
                obstacles_seen = obstacles_seen + 1 if isinstance(error, OBSTACLES) else 0
                if is_final(error, obstacles_seen=obstacles_seen):
                    raise
                self._become(LogState.WAITING)
                self._attempts += 1
                self._full = error if isinstance(error, StorageFull) else None
                self._last_error = text = f"{type(error).__name__}: {error}"
                _log.warning(
                    "log_not_reopened",
                    pchannel=self._log.name,
                    attempts=self._attempts,
                    pause_s=pause_s,
                    error=text,
                )
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._reopening.longest_pause_s)
            self._become(LogState.REOPENING)

    async def _open_term(self) -> None:
        """Open the store's term: append its first tick, rebuild state from the log, then build the
        chain.
        """
        # The first tick must be durable first, so that all entries of earlier owners are below it.
        first_tick = await self._append_first_tick()
        failpoint("recovery.first_tick_durable")
        await self._resolve_doubts()
        term = await self._make_term(first_tick, self._end)
        try:
            await term.ready()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await term.close()
                term.end()
            raise
        failpoint("recovery.chain_ready")
        self._term = term
        self.term = self._store.term

    async def _append_first_tick(self) -> LogEntry:
        log = self._log
        tick = MutableMessage(MessageType.TIME_TICK, TimeTickHeader(source_id=self._store.node_id))
        pack = Pack([AppendGroup([tick])])
        last_confirmed: int | None = None
        if log.next_position > log.first_position:
            # Use the last-confirmed position of the last entry. It is at or before the begin of
            # every transaction that the last term left open: these begin at or after it, and no
            # entry came later.
            last = (await log.read(log.next_position - 1, bytes_max=1))[0]
            last_confirmed = max(last.last_confirmed_position, log.first_position)
        await log.admit(pack.size_bytes, makes_room=True)
        pack.stamp_wal_term(self._store.term)
        pack.stamp(self._ticks.allocate(), last_confirmed)
        await self._end(pack)
        assert pack.ticket is not None, "the log end sets the ticket"
        await pack.ticket.durable
        assert pack.entry is not None, "an appended pack has its entry"
        return pack.entry

    async def _resolve_doubts(self) -> None:
        """Find out which packs of the ended term are in the log, by their ticks, which are unique.

        This happens now, because the log is not truncated before the first cut of the new term.
        """
        for pack in self._doubtful:
            ticket = pack.ticket
            assert ticket is not None, "a pack without a place is not in doubt"
            pack.is_in_log = False
            if ticket.first_position < self._log.next_position:
                found = (await self._log.read(ticket.first_position, bytes_max=1))[0]
                pack.is_in_log = found.time_tick == pack.time_tick

    # --- the end ----------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """Fail all calls that wait for the log to come back: the node is closing."""
        self._fail_waiting(
            OnShutdown(
                f"the node closed while a call waited for log {self._log.name} — open it again"
            )
        )

    async def drain(self) -> None:
        """Wait until every earlier write of rows has ended."""
        await self.packer.drain()

    async def close(self) -> None:
        """Take no more appends, refuse the waiting ones, and return when all running ones have
        ended; idempotent.
        """
        self._become(LogState.CLOSED)
        self.stop_waiting()
        self._scope.cancel()
        if self._kept is not None:
            await asyncio.wait((self._kept,))
        await self._end_term()

    async def _end_term(self) -> None:
        await self._term.close()
        while self.in_flight:
            self._drained.clear()
            await self._drained.wait()
        self._term.end()
