"""Shards on the append path: the last look at a group before the log, and the place where its headers are completed.

In comes a group with its tick and transaction id; out goes the same group with segments, row offsets and cut numbers, to
the log end. Never suspends before the log has the group: rows without a segment are sent back with `Redo` while the
allocator makes one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import anyio

from interceptors.redo import Redo
from interceptors.shard.manager import ShardManager
from interceptors.shard.seal_policy import Seal, due_seals
from interceptors.shard.state import SegmentKey
from wal.errors import ChannelFenced, Indeterminate, OnShutdown, Overloaded, StorageFailed, StreamingNodeError
from wal.headers import FlushHeader, MessageType
from wal.log import Append, AppendGroup, AppendResult
from wal.message import MutableMessage
from wal.tasks import event_log

# --- allocator ---
#
# Makes segments for rows that have none: asked by inserts, which wait outside the chain until it is done.
#
# Requests that come together are written together, one group for all. Every wait ends: with the segment, with a typed error
# when it cannot be made within the bound, or with `OnShutdown`.


ATTEMPTS_MAX = 16
"""With the pauses below about ten seconds: longer than a disk hiccup, shorter than the wait of those who asked."""
RETRY_S_MIN = 0.01
RETRY_S_MAX = 1.0

FINAL = (OnShutdown, ChannelFenced, Indeterminate, StorageFailed)
"""Nothing this owner appends can succeed after one of these."""

_log = event_log(__name__)


class SegmentAllocator:
    """Appends CREATE_SEGMENT messages for `manager`; one for each channel."""

    def __init__(self, manager: ShardManager, *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep) -> None:
        self._manager = manager
        self._sleep = sleep
        self._wanted: dict[SegmentKey, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many segments are asked for and not made yet."""
        return len(self._wanted)

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
        pause_s, last_error = RETRY_S_MIN, "no attempt was made"
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._try(keys, append)
            except FINAL as error:
                self._end(keys, _unavailable(str(error)))
                return
            except StreamingNodeError as error:
                last_error = str(error)
                _log.debug("segments_delayed", segments=len(keys), error=str(error))
                await self._sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_S_MAX)
            else:
                self._end(keys, None)
                return
        _log.warning("segments_not_made", segments=len(keys), attempts=ATTEMPTS_MAX, error=last_error)
        self._end(keys, _unavailable(last_error))

    async def _try(self, keys: Sequence[SegmentKey], append: Append) -> None:
        # What was dropped meanwhile, or has a segment by now, is let through: its insert hears the reason itself.
        needed = [key for key in keys if self._manager.needs_segment(key)]
        if needed:
            await append(AppendGroup([self._manager.new_segment(key) for key in needed]))

    def _end(self, keys: Sequence[SegmentKey], error: StreamingNodeError | None) -> None:
        for key in keys:
            wanted = self._wanted.pop(key, None)
            if wanted is None:  # closed while its segment was on the way
                continue
            if error is None:
                wanted.set_result(None)
            else:
                wanted.set_exception(error)
                wanted.exception()  # whoever asked may have given up; then nobody is left to hear it


def _unavailable(reason: str) -> Overloaded:
    return Overloaded(f"no segment could be made for the rows: {reason} — try again")


# --- seal worker ---
#
# Seals segments that a policy calls due, by writing FLUSH messages; cuts seal the rest.
#
# Looks at an interval and whenever an insert meets a full segment. A seal that comes too late (a cut or a drop was first)
# is refused by the shard interceptor and not tried again.


SEAL_INTERVAL_S = 1.0
"""Policies count in minutes, except total growing bytes: a second of ingest is what may come on top of its high mark."""


class SealWorker:
    """Appends FLUSH messages for the due segments of `manager`; `last_tick` returns the newest tick handed out."""

    def __init__(
        self, manager: ShardManager, *, last_tick: Callable[[], int], interval_s: float = SEAL_INTERVAL_S
    ) -> None:
        self._manager = manager
        self._last_tick = last_tick
        self._interval_s = interval_s
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look now: a segment is full."""
        self._wake.set()

    async def run(self, append: Append) -> None:
        """Work until cancelled, or until the log takes no more."""
        while True:
            with anyio.move_on_after(self._interval_s):
                await self._wake.wait()
            self._wake.clear()
            try:
                await self.seal_due(append)
            except FINAL as error:
                _log.info("seals_ended", reason=str(error))
                return

    async def seal_due(self, append: Append) -> int:
        """Seal what is due now, in one group; return how many.

        Raises `OnShutdown`, `ChannelFenced`, `Indeterminate` or `StorageFailed`; any other refusal is left to the next look.
        """
        due = due_seals(self._manager.state.segments.values(), self._manager.limits, tick=self._last_tick())
        if not due:
            return 0
        try:
            await append(AppendGroup([_flush(seal) for seal in due]))
        except FINAL:
            raise
        except StreamingNodeError as error:
            _log.debug("seal_delayed", segments=len(due), error=str(error))
            return 0
        return len(due)


def _flush(seal: Seal) -> MutableMessage:
    segment = seal.segment
    header = FlushHeader(segment.collection_id, segment.partition_id, segment.segment_id, seal.reason)
    return MutableMessage(MessageType.FLUSH, header, segment.vchannel)


class ShardInterceptor:
    """Wraps the log end with the state of one channel."""

    name = "shard"

    def __init__(self, manager: ShardManager, allocator: SegmentAllocator, sealer: SealWorker) -> None:
        self._manager = manager
        self._allocator = allocator
        self._sealer = sealer

    async def do_append(self, group: AppendGroup, append: Append) -> AppendResult:
        """Check and stamp the group.

        Raises `CollectionNotFound`, `PartitionNotFound`, `AlreadyExists`, `InvalidArgument`, `SchemaMismatch` or
        `InvalidArgument` for what does not fit, `Redo` while a segment is being made; nothing is changed then.
        """
        missing = self._manager.admit(group)
        if missing:
            self._sealer.wake()  # rows without a segment are often rows behind a full one
            until = self._allocator.request(missing)
            raise Redo(until, waiting_for=f"a segment of collection {missing[-1].collection_id}")
        try:
            return await append(group)
        finally:
            self._manager.ended(group)

    async def ready(self) -> None:
        """Return at once: the state is recovered before the chain is built."""

    async def close(self) -> None:
        """End the waits for segments: nothing is appended any more."""
        self._allocator.close()
