"""Shards on the append path: the last look at a group before the log, and the place where its headers are completed.

In comes a group with its tick and transaction id; out goes the same group with segments, row offsets and cut numbers, to
the log end. Never suspends before the log has the group: rows without a segment are sent back with `Redo` while the
allocator makes one.
"""

from interceptors.redo import Redo
from interceptors.shard.allocator import SegmentAllocator
from interceptors.shard.manager import ShardManager
from interceptors.shard.seal_worker import SealWorker
from wal.append import Append, AppendGroup, AppendResult


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
