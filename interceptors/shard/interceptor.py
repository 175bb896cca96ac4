"""Shards on the append path: the last look at a group before the log, and what makes and seals its segments.

In comes a group with its tick and transaction id; out goes the same group with segments, row offsets and cut numbers, to
the log end. Never suspends before the log has the group: rows without a segment are sent back with `Redo` while the
allocator makes one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio

from interceptors.chain import FINAL, BaseInterceptor, Redo
from interceptors.shard.manager import ShardManager
from interceptors.shard.state import SegmentKey, due_seals
from wal.errors import OnShutdown, Overloaded, StreamingNodeError
from wal.headers import FlushHeader, MessageType
from wal.log import Append, AppendGroup, AppendResult
from wal.message import MutableMessage
from wal.runtime import event_log

ATTEMPTS_MAX = 16
"""With the pauses below about ten seconds: longer than a disk hiccup, shorter than the wait of those who asked."""
RETRY_S_MIN = 0.01
RETRY_S_MAX = 1.0

SEAL_INTERVAL_S = 1.0
"""Policies count in minutes, except total growing bytes: a second of ingest is what may come on top of its high mark."""

_log = event_log(__name__)


class SegmentAllocator:
    """Appends CREATE_SEGMENT messages for `manager`, for all requests that come together in one group.

    Every wait ends: with the segment, with a typed error when it cannot be made within the bound, or with `OnShutdown`.
    """

    def __init__(self, manager: ShardManager, *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep) -> None:
        self._manager = manager
        self._sleep = sleep
        self._wanted: dict[SegmentKey, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def request(self, keys: Sequence[SegmentKey]) -> asyncio.Future[None]:
        """Ask for segments and return a shared future that ends with the last of them.

        It fails with `Overloaded` when the segment cannot be made. Raises `OnShutdown` when closed.
        """
        if self._closed:
            raise OnShutdown("the channel is closing and makes no more segments")
        for key in keys:
            if key not in self._wanted:
                self._wanted[key] = asyncio.get_running_loop().create_future()
                self._wake.set()
        return self._wanted[keys[-1]]

    async def run(self, append: Append) -> None:
        """Work until cancelled, which ends all waits with `OnShutdown`."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._allocate(tuple(self._wanted), append)
        finally:
            self.close()

    def close(self) -> None:
        """End all waits with `OnShutdown` and take no more requests; idempotent."""
        self._closed = True
        self._end(tuple(self._wanted), OnShutdown("the channel closed before the segment was made"))

    async def _allocate(self, keys: Sequence[SegmentKey], append: Append) -> None:
        pause_s, reason = RETRY_S_MIN, ""
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._try(keys, append)
            except StreamingNodeError as error:
                reason = str(error)
                if isinstance(error, FINAL):
                    break
                _log.debug("segments_delayed", segments=len(keys), error=reason)
                await self._sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_S_MAX)
            else:
                self._end(keys, None)
                return
        else:
            _log.warning("segments_not_made", segments=len(keys), attempts=ATTEMPTS_MAX, error=reason)
        self._end(keys, Overloaded(f"no segment could be made for the rows: {reason} — try again"))

    async def _try(self, keys: Sequence[SegmentKey], append: Append) -> None:
        # What was dropped meanwhile, or has a segment by now, is let through: its insert hears the reason itself.
        if needed := [key for key in keys if self._manager.needs_segment(key)]:
            await append(AppendGroup([self._manager.new_segment(key) for key in needed]))

    def _end(self, keys: Iterable[SegmentKey], error: StreamingNodeError | None) -> None:
        for key in keys:
            wanted = self._wanted.pop(key, None)
            if wanted is None:  # closed while its segment was on the way
                continue
            if error is None:
                wanted.set_result(None)
            else:
                wanted.set_exception(error)
                wanted.exception()  # whoever asked may have given up; then nobody is left to hear it


class SealWorker:
    """Appends FLUSH messages for the segments of `manager` that a policy calls due; cuts seal the rest.

    It looks at an interval, and at once when an insert meets a full segment. `last_tick` returns the newest tick handed out.
    """

    def __init__(self, manager: ShardManager, *, last_tick: Callable[[], int]) -> None:
        self._manager = manager
        self._last_tick = last_tick
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look now: a segment is full."""
        self._wake.set()

    async def run(self, append: Append) -> None:
        """Work until cancelled, or until the log takes no more."""
        while True:
            with anyio.move_on_after(SEAL_INTERVAL_S):
                await self._wake.wait()
            self._wake.clear()
            try:
                await self.seal_due(append)
            except FINAL as error:
                _log.info("seals_ended", reason=str(error))
                return

    async def seal_due(self, append: Append) -> int:
        """Seal what is due now, in one group; return how many.

        Raises the errors of `FINAL`; any other refusal (a cut or a drop was first) is left to the next look.
        """
        due = due_seals(self._manager.state.segments.values(), self._manager.limits, tick=self._last_tick())
        messages = []
        for segment, reason in due:
            header = FlushHeader(segment.collection_id, segment.partition_id, segment.segment_id, reason)
            messages.append(MutableMessage(MessageType.FLUSH, header, segment.vchannel))
        if not messages:
            return 0
        try:
            await append(AppendGroup(messages))
        except FINAL:
            raise
        except StreamingNodeError as error:
            _log.debug("seal_delayed", segments=len(due), error=str(error))
            return 0
        return len(due)


class ShardInterceptor(BaseInterceptor):
    """Wraps the log end with the state of one channel, which is recovered before the chain is built."""

    name = "shard"

    def __init__(self, manager: ShardManager, allocator: SegmentAllocator, sealer: SealWorker) -> None:
        self._manager = manager
        self._allocator = allocator
        self._sealer = sealer

    def do_append(self, group: AppendGroup, append: Append) -> Awaitable[AppendResult]:
        """Check and stamp the group; there is nothing to do afterwards, so the caller awaits the append itself.

        Raises `CollectionNotFound`, `PartitionNotFound`, `AlreadyExists`, `SchemaMismatch` or `InvalidArgument` for what
        does not fit, `Redo` while a segment is being made; nothing is changed then.
        """
        missing = self._manager.admit(group)
        if missing:
            self._sealer.wake()  # rows without a segment are often rows behind a full one
            until = self._allocator.request(missing)
            raise Redo(until, waiting_for=f"a segment of collection {missing[-1].collection_id}")
        return append(group)

    async def close(self) -> None:
        """End the waits for segments: nothing is appended any more."""
        self._allocator.close()
