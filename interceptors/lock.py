"""Locks of the append path: exclusive messages have their vchannels for themselves, everything else shares.

Each pchannel has one lock and each vchannel another. An ordinary append shares the pchannel and its vchannels; an exclusive
one shares the pchannel and has its vchannels; one that concerns every vchannel has the pchannel. All are taken in one
order, the pchannel first and then vchannels by name, so no two appends wait for each other.

After an exclusive append, and before its locks are released, the transactions on its vchannels are ended: no transaction
spans a change of what it writes to.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, unique

from interceptors.redo import Redo
from wal.log import Append, AppendGroup, AppendResult
from wal.message import ALL_VCHANNELS

# --- rwlock ---
#
# A lock that many share or one has for itself, first come first served, for tasks of one event loop.
#
# Free locks are taken without suspending. Nobody overtakes: once someone waits, everyone queues, so neither sharers nor
# exclusive holders starve. A lock is handed over at release, before the next holder runs; a holder that is cancelled
# between the two gives it on.


@unique
class Mode(Enum):
    """How a lock is held."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class RWLock:
    """One readers-writer lock; not reentrant, and does not know who holds it."""

    __slots__ = ("_exclusive", "_sharers", "_waiting")

    def __init__(self) -> None:
        self._sharers = 0
        self._exclusive = False
        self._waiting: deque[tuple[asyncio.Future[None], Mode]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self._sharers or self._exclusive or self._waiting)

    def try_acquire(self, mode: Mode) -> bool:
        """Take the lock if nobody is in the way or in the queue; say whether it was taken."""
        if self._waiting or not self._free_for(mode):
            return False
        self._take(mode)
        return True

    async def acquire(self, mode: Mode) -> None:
        """Take the lock, waiting behind everyone who came before. Cancelling while waiting leaves no trace."""
        if self.try_acquire(mode):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, mode))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._hand_over()  # those behind a cancelled exclusive waiter may be free to go
            else:  # cancelled after the lock was handed over and before this task ran
                self.release(mode)
            raise

    def release(self, mode: Mode) -> None:
        """Give up what `acquire` with the same mode took."""
        if mode is Mode.SHARED:
            assert self._sharers, "nobody shares this lock"
            self._sharers -= 1
        else:
            assert self._exclusive, "nobody has this lock exclusively"
            self._exclusive = False
        if self._waiting:
            self._hand_over()

    def _free_for(self, mode: Mode) -> bool:
        return not self._exclusive and (mode is Mode.SHARED or not self._sharers)

    def _take(self, mode: Mode) -> None:
        if mode is Mode.SHARED:
            self._sharers += 1
        else:
            self._exclusive = True

    def _hand_over(self) -> None:
        while self._waiting:
            granted, mode = self._waiting[0]
            if not granted.cancelled():
                if not self._free_for(mode):
                    return
                self._take(mode)
                granted.set_result(None)
            self._waiting.popleft()


ScopeOf = Callable[[AppendGroup], Sequence[str]]
"""The vchannels a group locks: those of its messages, for a commit those of its session. Order and repeats do not matter."""

FailTransactions = Callable[[Sequence[str], int], None]
"""End the transactions in flight on vchannels (`ALL_VCHANNELS` among them: on every one) because of the group at a tick."""

_PCHANNEL = ALL_VCHANNELS  # sorts before every vchannel, so one sorted plan covers both kinds of lock
_Plan = tuple[tuple[str, Mode], ...]
_Held = tuple[str, RWLock, Mode]
_PCHANNEL_SHARED = (_PCHANNEL, Mode.SHARED)
_PCHANNEL_EXCLUSIVE = (_PCHANNEL, Mode.EXCLUSIVE)


class LockInterceptor:
    """Holds the locks of a group while the rest of the chain runs; the only place of the append path where groups queue."""

    name = "lock"

    def __init__(self, *, fail_transactions: FailTransactions, scope_of: ScopeOf | None = None) -> None:
        self._fail_transactions = fail_transactions
        self._scope_of = scope_of or _vchannels_of
        self._locks: dict[str, RWLock] = {}

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Append under the group's locks. Cancelling while it waits means that the append never happened."""
        held: list[_Held] = []
        exclusive = group.exclusive
        try:
            plan = await self._acquire(group, held, exclusive=exclusive)
            if exclusive:
                return await self._append_exclusively(group, append, plan)
            return await append(group)
        finally:
            self._release(held, exclusive=exclusive)

    async def ready(self) -> None:
        """Appends may always pass."""

    async def close(self) -> None:
        """Nothing to do: waiters advance as those before them end."""

    async def _append_exclusively(self, group: AppendGroup, append: Append, plan: _Plan) -> AppendResult:
        redone = False
        try:
            return await append(group)
        except Redo:
            redone = True  # it will come again, and end the transactions then
            raise
        finally:
            if not redone:
                self._fail_transactions([name for name, mode in plan if mode is Mode.EXCLUSIVE], group.time_tick)

    async def _acquire(self, group: AppendGroup, held: list[_Held], *, exclusive: bool) -> _Plan:
        """Take all locks of the group's plan; a transaction that grew onto another vchannel meanwhile starts over."""
        while True:
            plan = _plan(self._scope_of(group), exclusive=exclusive)
            waited = False
            for name, mode in plan:
                lock = self._locks.get(name)
                if lock is None:
                    lock = self._locks[name] = RWLock()
                if not lock.try_acquire(mode):
                    waited = True
                    await lock.acquire(mode)
                held.append((name, lock, mode))
            if not waited or plan == _plan(self._scope_of(group), exclusive=exclusive):
                return plan
            self._release(held, exclusive=exclusive)

    def _release(self, held: list[_Held], *, exclusive: bool) -> None:
        while held:
            name, lock, mode = held.pop()
            lock.release(mode)
            if exclusive and lock.idle:  # a dropped vchannel must not leave its lock behind
                del self._locks[name]


def _vchannels_of(group: AppendGroup) -> Sequence[str]:
    return [message.vchannel for message in group.messages]


def _plan(scope: Sequence[str], *, exclusive: bool) -> _Plan:
    if not exclusive:
        if len(scope) == 1:  # most appends
            return (_PCHANNEL_SHARED, (scope[0], Mode.SHARED)) if scope[0] else (_PCHANNEL_SHARED,)
        return (_PCHANNEL_SHARED, *((name, Mode.SHARED) for name in sorted(set(scope)) if name))
    if ALL_VCHANNELS in scope:
        return (_PCHANNEL_EXCLUSIVE,)
    return (_PCHANNEL_SHARED, *((name, Mode.EXCLUSIVE) for name in sorted(set(scope))))
