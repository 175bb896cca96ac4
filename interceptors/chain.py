"""The append path as one callable, and the three interceptors where an append may wait: room, redo
and lock.

ADR 0003 gives the order of the interceptors. The interceptors inside these three never suspend
before the log has the group. An append that is cancelled while it waits here never happened.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial

import anyio

from wal.append import AppendGroup, AppendObserver, AppendPack, Pack
from wal.errors import (
    Ends,
    OnShutdown,
    Overloaded,
    StreamingNodeError,
)
from wal.failpoint import failpoint
from wal.headers import DDL, DML, MAKES_ROOM
from wal.queue import Budget


async def repeat(
    step: Callable[[], Awaitable[object]], wanted: asyncio.Event, interval_s: float
) -> None:
    """Run a worker's step whenever `wanted` is set, and at least once an interval.

    An error that ends only its call is ignored; any other typed error ends the loop.
    """
    while True:
        with anyio.move_on_after(interval_s):
            await wanted.wait()
        try:
            await step()
        except StreamingNodeError as error:
            if error.ends is not Ends.CALL:
                return


class Interceptor(ABC):
    """One concern of the append path, wrapped around the rest of it.

    Only room, redo and lock may suspend before they call `append`. From the tick on, everything up
    to the log's queue runs in one step, so that position order is tick order. An interceptor that
    would have to wait raises `Redo` instead.
    """

    name: str
    """The interceptor's name in measurements."""

    @abstractmethod
    def do_append(self, pack: Pack, append: AppendPack) -> Coroutine[object, None, None]:
        """Do this concern's part before and after `append`."""

    async def ready(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Return once appends may pass; by default at once."""

    async def close(self) -> None:  # noqa: B027 - nor any appends that wait
        """Fail the appends that wait in this interceptor; idempotent.

        The caller already refuses new appends. Appends past their wait end by themselves.
        """


class Chain:
    """`interceptors`, outermost first, around `end`, the log; an `observer` receives the time each
    of them took.
    """

    def __init__(
        self,
        interceptors: Sequence[Interceptor],
        end: AppendPack,
        *,
        observer: AppendObserver | None = None,
    ) -> None:
        self._interceptors = tuple(interceptors)
        self.append = end
        for interceptor in reversed(self._interceptors):
            if observer is None:
                self.append = partial(interceptor.do_append, append=self.append)
            else:
                self.append = partial(_timed, interceptor, self.append, observer)

    async def ready(self) -> None:
        """Return once every interceptor lets appends pass; waits for the outermost first."""
        for interceptor in self._interceptors:
            await interceptor.ready()

    async def close(self) -> None:
        """Close every interceptor, outermost first, even after one raised.

        An outer interceptor may wait for an inner one, so its appends fail first.
        """
        async with AsyncExitStack() as steps:
            for interceptor in reversed(self._interceptors):
                steps.push_async_callback(interceptor.close)


async def _timed(
    interceptor: Interceptor, inner: AppendPack, observer: AppendObserver, pack: Pack
) -> None:
    clock = time.perf_counter
    called_at = returned_at = 0.0

    async def append(pack: Pack) -> None:
        nonlocal called_at, returned_at
        called_at = called_at or clock()  # redo calls more than once; the first call counts
        try:
            await inner(pack)
        finally:
            returned_at = clock()

    started = clock()
    try:
        await interceptor.do_append(pack, append)
    finally:
        ended = clock()
        before_s, after_s = (
            (called_at - started, ended - returned_at) if called_at else (ended - started, 0.0)
        )
        observer.interceptor_timed(interceptor.name, before_s, after_s, failed_before=not called_at)


class RoomInterceptor(Interceptor):
    """Lets an append pass once the log's queue has room for it, and, if it holds bodies of a
    transaction, the node's `memory` too.
    """

    name = "room"

    def __init__(self, admit: Callable[..., Awaitable[None]], memory: Budget) -> None:
        self._admit = admit
        self._memory = memory
        self._closing = False

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append once there is room; bodies count until the log has acknowledged them or they have
        failed.
        """
        size_bytes = pack.size_bytes
        # Packed rows hold their room since they were queued, so they take none here. Appends that
        # hold room wait for appends without rows: a segment to be made, a commit or a schema change
        # to end. If those waited for room in turn, it would be a deadlock.
        held_bytes = size_bytes if pack.first_type in DML else 0
        if held_bytes:
            await self._memory.take(held_bytes)
        try:
            await self._admit(size_bytes, makes_room=pack.first_type in MAKES_ROOM)
            failpoint("append.admitted")
            if self._closing:
                raise OnShutdown(
                    "the log closed while the append waited for room — reopen the node"
                )
            await append(pack)
        finally:
            if held_bytes:
                self._memory.give_back(held_bytes)

    async def close(self) -> None:
        """Fail each waiting append with `OnShutdown` when its turn comes; those that have room end
        by themselves.
        """
        self._closing = True


class Redo(Exception):
    """An append that can go on only after `until`; never leaves the chain.

    `until` is shared, so no waiter cancels it. If it ends with an exception, the append raises
    that. `waiting_for` completes the sentence "the append waited for ..." in errors. `groups` are
    the groups of the pack that have to wait; empty means all of them.
    """

    def __init__(
        self, until: asyncio.Future[None], *, waiting_for: str, groups: Sequence[AppendGroup] = ()
    ) -> None:
        self.until = until
        self.waiting_for = waiting_for
        self.groups = groups
        super().__init__(waiting_for)


class RedoInterceptor(Interceptor):
    """Runs the inner chain again after each `Redo`, with a new tick each time, for up to
    `wait_s_max`.

    If only some groups of a pack have to wait, they leave it, and join a later pack.
    """

    name = "redo"

    def __init__(self, *, wait_s_max: float = 30.0) -> None:
        self._wait_s_max = wait_s_max  # longer than a busy disk stalls, shorter than callers wait
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append, and append again after each `Redo`. Raises `Overloaded` at the bound."""
        while True:
            try:
                return await append(pack)
            except Redo as redo:
                # The traceback refers to this frame, and this frame to the error. Dropping the
                # traceback breaks the cycle, so no memory waits for garbage collection.
                signal = redo.with_traceback(None)
            assert pack.ticket is None, "a pack that has its place in the log is never redone"
            if pack.come_again is not None and 0 < len(signal.groups) < len(pack.groups):
                self._send_back(pack, pack.come_again, signal)
                continue
            give_up_at_s = self._give_up_at_s(pack.groups)
            try:
                await self._wait(signal, give_up_at_s)
            except Overloaded as error:
                overdue = [group for group in pack.groups if group.waits_until_s <= give_up_at_s]
                if (
                    len(overdue) == len(pack.groups)
                    or asyncio.get_running_loop().time() < give_up_at_s
                ):
                    raise
                for group in overdue:  # other groups of the pack came later and wait on
                    pack.leave(group, error)
            pack.drop_cancelled()
            if not pack.groups:
                return None

    async def close(self) -> None:
        """Fail every waiting append with `OnShutdown`; an append past its wait ends by itself."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _send_back(
        self, pack: Pack, come_again: Callable[[AppendGroup], None], signal: Redo
    ) -> None:
        """Take the groups that have to wait out of their pack, so that the others go on."""
        groups = list(signal.groups)
        for group in groups:
            pack.leave(group)

        async def wait() -> None:
            give_up_at_s = self._give_up_at_s(groups)
            try:
                await self._wait(signal, give_up_at_s)
            except StreamingNodeError as error:
                # An error that ends more than this call does not settle the groups: they come
                # again, and the log accepts or refuses them then.
                if error.ends is Ends.CALL and asyncio.get_running_loop().time() >= give_up_at_s:
                    for group in groups:
                        group.settle(error)
                    return
            for group in reversed(groups):
                come_again(group)

        task = asyncio.get_running_loop().create_task(wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up_at_s(self, groups: Sequence[AppendGroup]) -> float:
        now_s = asyncio.get_running_loop().time()
        for group in groups:
            group.waits_until_s = group.waits_until_s or now_s + self._wait_s_max
        return min(group.waits_until_s for group in groups)

    async def _wait(self, signal: Redo, deadline: float) -> None:
        until = signal.until
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        await asyncio.wait(
            (until, self._stopping), timeout=left, return_when=asyncio.FIRST_COMPLETED
        )
        if self._stopping.done():
            raise OnShutdown(
                f"the log closed while the append waited for {signal.waiting_for} — reopen the node"
            )
        if not until.done() or not left:
            raise Overloaded(
                f"the append waited {self._wait_s_max:g} s for {signal.waiting_for} — try again "
                "later"
            )
        # a cancelled `until` has no result: the next attempt decides
        if not until.cancelled():
            until.result()


class RWLock:
    """A shared or exclusive lock for tasks of one event loop; not reentrant.

    Taking a free lock does not suspend. The queue is first in, first out: once one task waits, all
    later ones queue behind it, so neither shared nor exclusive holders starve.
    """

    __slots__ = ("_holders", "_waiting")

    def __init__(self) -> None:
        self._holders = 0  # the number of shared holders; -1 while one task holds it exclusively
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def idle(self) -> bool:
        """Whether the lock has no holder and no waiter."""
        return not (self._holders or self._waiting)

    @property
    def shareable(self) -> bool:
        """Whether a shared acquire succeeds at once."""
        return not self._waiting and self._holders >= 0

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Take the lock if it is free for this use and its queue is empty; return whether it was
        taken.
        """
        if self._waiting or (self._holders if exclusive else self._holders < 0):
            return False
        self._holders = -1 if exclusive else self._holders + 1
        return True

    async def acquire(self, *, exclusive: bool) -> None:
        """Take the lock, after all earlier callers.

        A call that is cancelled while it waits leaves the lock as it was.
        """
        if self.try_acquire(exclusive=exclusive):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, exclusive))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._hand_over()  # waiters behind a cancelled exclusive one may be able to share
            else:  # cancelled after the lock was handed over and before this task ran
                self.release()
            raise

    def release(self) -> None:
        """Release the lock that `acquire` took."""
        assert self._holders, "a lock is released by its holder"
        self._holders = 0 if self._holders < 0 else self._holders - 1
        if self._waiting:
            self._hand_over()

    def _hand_over(self) -> None:
        # The lock is taken here for the next holder, before that task runs, so that no other task
        # can take it in between.
        while self._waiting:
            granted, exclusive = self._waiting[0]
            if not granted.cancelled():
                if self._holders if exclusive else self._holders < 0:
                    return
                self._holders = -1 if exclusive else self._holders + 1
                granted.set_result(None)
            self._waiting.popleft()


class LockInterceptor(Interceptor):
    """Locks the vchannels of an append: exclusively for a schema change, shared for all others.

    `scope_of` returns the vchannels a pack concerns; for a commit these are its session's.
    `overtake` ends the transactions on vchannels that an exclusive append at a tick has changed.
    """

    name = "lock"

    def __init__(
        self,
        scope_of: Callable[[Pack], Sequence[str]],
        overtake: Callable[[Sequence[str], int], None],
    ) -> None:
        self._scope_of = scope_of
        self._overtake = overtake
        self._locks: dict[str, RWLock] = {}

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append under the pack's locks.

        If only some groups' locks are busy, raises `Redo` for these, and the others go on.
        """
        held: list[tuple[str, RWLock]] = []
        exclusive = pack.first_type in DDL
        count = len(pack.groups)
        if pack.come_again is not None and (busy := self._busy_in(pack)):
            freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            freed.set_result(None)
            raise Redo(freed, waiting_for="a schema change of its collection", groups=busy)
        try:
            await self._acquire(pack, held, exclusive=exclusive)
            try:
                await append(pack)
            finally:
                # This runs before the locks are released: no transaction spans a schema change of
                # a collection that it writes to.
                if exclusive and pack.ticket is not None:
                    self._overtake([name for name, _ in held], pack.time_tick)
        finally:
            # Idle locks are deleted where a vchannel may be gone: after a schema change, and after
            # a pack or some of its groups were refused.
            self._release(
                held, idle_go=exclusive or pack.ticket is None or len(pack.groups) < count
            )

    def _busy_in(self, pack: Pack) -> Sequence[AppendGroup]:
        """Return the groups of a pack that have busy locks; empty when none or all do."""
        scopes = {piece.target.vchannels for group in pack.groups for piece in group.pieces}
        locks = self._locks
        busy = {
            scope
            for scope in scopes
            if any(name in locks and not locks[name].shareable for name in scope)
        }
        if not busy:
            return ()
        groups = [
            group
            for group in pack.groups
            if any(piece.target.vchannels in busy for piece in group.pieces)
        ]
        return groups if len(groups) < len(pack.groups) else ()

    async def _acquire(
        self, pack: Pack, held: list[tuple[str, RWLock]], *, exclusive: bool
    ) -> None:
        while True:
            names = self._names_of(pack)
            waited = False
            for name in names:
                lock = self._locks.get(name)
                if lock is None:
                    lock = self._locks[name] = RWLock()
                if not lock.try_acquire(exclusive=exclusive):
                    waited = True
                    await lock.acquire(exclusive=exclusive)
                held.append((name, lock))
            if not waited or names == self._names_of(pack):
                return
            # during the wait, a transaction wrote to another vchannel, or ended
            self._release(held, idle_go=True)

    def _names_of(self, pack: Pack) -> Sequence[str]:
        scope = self._scope_of(pack)
        # All appends lock in the same order, so that no two wait for each other.
        return scope if len(scope) == 1 else sorted(set(scope))

    def _release(self, held: list[tuple[str, RWLock]], *, idle_go: bool) -> None:
        while held:
            name, lock = held.pop()
            lock.release()
            if idle_go and lock.idle:
                del self._locks[name]
