"""The append path as one callable, and what an append may wait for on it: room, a redo, its locks.

ADR 0003 gives the order of the interceptors. Only these wait: further in nothing suspends until the
log has the group. An append that is cancelled while it waits here never happened.
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

"""Nothing that this owner appends can succeed after one of these."""


async def repeat(
    step: Callable[[], Awaitable[object]], wanted: asyncio.Event, interval_s: float
) -> None:
    """Take a worker's step when it is wanted, and at an interval, whatever it raises, until the log
    takes no more.
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

    Only redo and lock may suspend before they call `append`; from the tick on, everything up to the
    log's queue runs in one step, so that position order is tick order. An interceptor that would
    have to wait raises `Redo` instead.
    """

    name: str
    """What measurements call it."""

    @abstractmethod
    def do_append(self, pack: Pack, append: AppendPack) -> Coroutine[object, None, None]:
        """Do this concern's part before and after `append`."""

    async def ready(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Return once appends may pass: at once unless said otherwise."""

    async def close(self) -> None:  # noqa: B027 - nor anybody to send away
        """Send away who waits; new appends are already refused, and what waits for nothing ends by
        itself. Idempotent.
        """


class Chain:
    """`interceptors`, outermost first, around the log's end; with an observer each of them is
    timed.
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
        """Return once every interceptor lets appends pass; they are waited for outermost first."""
        for interceptor in self._interceptors:
            await interceptor.ready()

    async def close(self) -> None:
        """Close every interceptor, even after one raised; what waits outside is told before what it
        waits for.
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
        called_at = called_at or clock()  # redo calls more than once; the first time counts
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
    """Lets bodies in as there is room in `memory`, which is the node's, and all as there is in the
    log's queue.
    """

    name = "room"

    def __init__(self, admit: Callable[..., Awaitable[None]], memory: Budget) -> None:
        self._admit = admit
        self._memory = memory
        self._closing = False

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append once there is room; bodies count until the log has acknowledged them, or they
        failed.
        """
        size_bytes = pack.size_bytes
        # Rows that go together hold theirs since they came to wait. Appends that hold room wait for
        # those without rows: a segment that is made, a commit or a schema change that ends. If
        # these waited in turn, nobody would go on.
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
        """Send away who waits, each as its turn comes: those before them end by themselves."""
        self._closing = True


class Redo(Exception):
    """An append that can go on only after `until`; never leaves the chain.

    `until` is shared, so nobody who waits for it cancels it; an exception it ends with is the
    append's. `waiting_for` completes the sentence "the append waited for ..." and is shown to
    people. `groups` are those that wait, when others of their pack need not; all of them, when
    there are none.
    """

    def __init__(
        self, until: asyncio.Future[None], *, waiting_for: str, groups: Sequence[AppendGroup] = ()
    ) -> None:
        self.until = until
        self.waiting_for = waiting_for
        self.groups = groups
        super().__init__(waiting_for)


class RedoInterceptor(Interceptor):
    """Runs the rest of the chain again for as long as it asks for that, with a new tick each time,
    up to `wait_s_max`.

    Groups of a pack that others need not wait for leave it, and come again with those that wait
    then.
    """

    name = "redo"

    def __init__(self, *, wait_s_max: float = 30.0) -> None:
        self._wait_s_max = wait_s_max  # longer than a busy disk, shorter than patience
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def do_append(self, pack: Pack, append: AppendPack) -> None:
        """Append, and append again after each `Redo`. Raises `Overloaded` at the bound."""
        while True:
            try:
                return await append(pack)
            except Redo as redo:
                # Its traceback refers to this frame, which refers to it: without it nothing waits
                # for garbage collection.
                signal = redo.with_traceback(None)
            assert pack.ticket is None, "what has its place in the log is never redone"
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
                for group in overdue:  # others of the pack have come later
                    pack.leave(group, error)
            pack.drop_cancelled()
            if not pack.groups:
                return None

    async def close(self) -> None:
        """Send every waiting append away with `OnShutdown`; one that is past its wait ends by
        itself.
        """
        if not self._stopping.done():
            self._stopping.set_result(None)
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _send_back(
        self, pack: Pack, come_again: Callable[[AppendGroup], None], signal: Redo
    ) -> None:
        """Take the groups that wait out of their pack, which does not wait for them."""
        groups = list(signal.groups)
        for group in groups:
            pack.leave(group)

        async def wait() -> None:
            give_up_at_s = self._give_up_at_s(groups)
            try:
                await self._wait(signal, give_up_at_s)
            except StreamingNodeError as error:
                # The term ends, or may do so: whether the log takes the groups is asked when they
                # come again.
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
        # whoever owned it gave up without a verdict: the next attempt will tell
        if not until.cancelled():
            until.result()


class RWLock:
    """A lock that many share or one has for itself, for tasks of one event loop; not reentrant.

    A free lock is taken without suspending. Nobody overtakes: once someone waits, everyone queues,
    so neither sharers nor exclusive holders starve.
    """

    __slots__ = ("_holders", "_waiting")

    def __init__(self) -> None:
        self._holders = 0  # how many share it; -1 when one has it for itself
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self._holders or self._waiting)

    @property
    def shareable(self) -> bool:
        """Whether who shares it gets it at once."""
        return not self._waiting and self._holders >= 0

    def try_acquire(self, *, exclusive: bool) -> bool:
        """Take the lock if nobody is in the way or in the queue; say whether it was taken."""
        if self._waiting or (self._holders if exclusive else self._holders < 0):
            return False
        self._holders = -1 if exclusive else self._holders + 1
        return True

    async def acquire(self, *, exclusive: bool) -> None:
        """Take the lock, waiting behind everyone who came before. Cancelling while waiting leaves
        no trace.
        """
        if self.try_acquire(exclusive=exclusive):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((granted, exclusive))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._hand_over()  # those behind a cancelled exclusive waiter may be free to go
            else:  # cancelled after the lock was handed over and before this task ran
                self.release()
            raise

    def release(self) -> None:
        """Give up what `acquire` took."""
        assert self._holders, "nobody holds this lock"
        self._holders = 0 if self._holders < 0 else self._holders - 1
        if self._waiting:
            self._hand_over()

    def _hand_over(self) -> None:
        # Taken here, before the next holder runs, so that nobody slips in between.
        while self._waiting:
            granted, exclusive = self._waiting[0]
            if not granted.cancelled():
                if self._holders if exclusive else self._holders < 0:
                    return
                self._holders = -1 if exclusive else self._holders + 1
                granted.set_result(None)
            self._waiting.popleft()


class LockInterceptor(Interceptor):
    """Gives an exclusive append its vchannels for itself, lets all others share theirs.

    `scope_of` names the vchannels a pack concerns, for a commit those of its session; `overtake`
    ends the transactions on vchannels that an exclusive append at a tick has changed.
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
        """Append under the pack's locks. Groups whose lock is busy come again when others of the
        pack need not wait.
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
                # Before anybody else gets the vchannels: no transaction spans a change of what it
                # writes to.
                if exclusive and pack.ticket is not None:
                    self._overtake([name for name, _ in held], pack.time_tick)
        finally:
            # locks of dropped vchannels go: by who drops them, and by who leaves because that was
            # first
            self._release(
                held, idle_go=exclusive or pack.ticket is None or len(pack.groups) < count
            )

    def _busy_in(self, pack: Pack) -> Sequence[AppendGroup]:
        """Return the groups of a pack whose locks are busy, none when all are."""
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
            # a transaction grew onto another vchannel meanwhile, or ended
            self._release(held, idle_go=True)

    def _names_of(self, pack: Pack) -> Sequence[str]:
        scope = self._scope_of(pack)
        # One order for all, so that no two appends wait for each other.
        return scope if len(scope) == 1 else sorted(set(scope))

    def _release(self, held: list[tuple[str, RWLock]], *, idle_go: bool) -> None:
        while held:
            name, lock = held.pop()
            lock.release()
            if idle_go and lock.idle:
                del self._locks[name]
