"""Shards on the append path: the innermost interceptor, which keeps the live channel, and its two
workers.

Nothing suspends before the log has the group: rows without a segment leave with `Redo`, and come
again once the segment exists.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial

import anyio

from interceptors.chain import Interceptor, Redo, repeat
from interceptors.shard.catalog import Catalog
from interceptors.shard.decision import BodiesOf, check_target, decide, open_segments
from interceptors.shard.state import SegmentKey, SegmentLimits, ShardState, due_seals
from wal.append import Append, AppendGroup, AppendPack, Pack
from wal.errors import Ends, OnShutdown, Overloaded, StreamingNodeError
from wal.headers import CreateSegmentHeader, FlushHeader, MessageType
from wal.message import Change, MutableMessage
from wal.rows import RowTarget, encode_pieces, lay_out

ATTEMPTS_MAX = 100
RETRY_S = 0.1
"""The attempts take ten seconds: longer than a disk hiccup, shorter than the 30 s that appends
wait for a segment.
"""

AT_ONCE_MAX = 4096
"""The most segments that one entry of the log creates or seals."""
SEAL_INTERVAL_S = 1.0
"""Most policies are in minutes. Growing bytes may exceed their high mark by this much ingest."""


class ShardManager(Interceptor):
    """The live state of one channel; decides and stamps groups in the step that allocates their
    ticks.

    `bodies_of` returns the bodies of an open transaction.
    """

    name = "shard"

    def __init__(self, state: ShardState, *, bodies_of: BodiesOf, limits: SegmentLimits) -> None:
        self.limits = limits
        self.wanted: dict[SegmentKey, asyncio.Future[None]] = {}
        """The segments that appends wait for, with the future that completes the wait."""
        self.segment_wanted = asyncio.Event()
        self.segment_full = asyncio.Event()
        """Both wake a worker, which clears them."""
        self._state = state
        self._bodies_of = bodies_of
        self._next_id = 0
        self._closed = False
        self._pending: tuple[Pack, int, Sequence[Change] | None] | None = None
        """The last admitted pack, its number of messages, and their changes (None for packed rows).

        Its position is known once the log has queued it, and no other task runs before that.
        """

    @property
    def state(self) -> ShardState:
        """The channel as of the last group in the log's queue."""
        self._settle()
        return self._state

    @property
    def catalog(self) -> Catalog:
        """What exists as of the last group in the log's queue."""
        # packed rows do not change the catalog
        if self._pending is not None and self._pending[2] is not None:
            self._settle()
        return self._state.catalog

    def do_append(self, pack: Pack, append: AppendPack) -> Coroutine[object, None, None]:
        """Check and stamp a pack; one that does not fit, or lacks a segment, changes nothing."""
        if pack.check is not None:
            pack.check(pack)
        if pack.first_type is None:
            return self._append_rows(pack, append)
        changes, header, offsets, missing = decide(
            self.state, pack.messages, self._bodies_of, tick=pack.time_tick
        )
        if missing:
            raise self._redo(missing)
        if header is not None:
            pack.messages[0].header = header
        pack.row_offsets = (offsets,)
        if changes is not None:
            self._pending = (pack, len(pack.messages), changes)
        # nothing to do after the append: the next access to the state applies the pack
        return append(pack)

    async def _append_rows(self, pack: Pack, append: AppendPack) -> None:
        state = self.state
        pack.drop_cancelled()
        self._refuse_misfits(pack)
        if not pack.groups:
            return
        groups = pack.groups
        pieces = [group.pieces for group in groups]
        encoded = encode_pieces(pieces)
        segments, missing = open_segments(state, encoded)
        if missing:
            group_of = [group for group in groups for _ in group.pieces]
            waiting = {id(group_of[piece]) for batch in missing.values() for piece in batch.pieces}
            raise self._redo(tuple(missing), [group for group in groups if id(group) in waiting])
        # From here on nothing fails, and nothing suspends before the log has the pack.
        transactions = [group.is_transaction for group in groups]
        pack.take_rows(
            lay_out(
                pieces, transactions, encoded, next_offsets=state.next_offsets, segments=segments
            )
        )
        self._pending = (pack, pack.message_count, None)
        await append(pack)

    def _refuse_misfits(self, pack: Pack) -> None:
        """Remove the groups whose rows do not fit the catalog; all are checked before any is
        stamped.
        """
        errors: dict[RowTarget, StreamingNodeError] = {}
        for target in {piece.target for group in pack.groups for piece in group.pieces}:
            try:
                check_target(self._state, target)
            except StreamingNodeError as error:
                errors[target] = error
        if errors:
            for group in list(pack.groups):
                misfit = next(
                    (errors[piece.target] for piece in group.pieces if piece.target in errors), None
                )
                if misfit is not None:
                    pack.leave(group, misfit)

    async def close(self) -> None:
        """End all waits for segments with `OnShutdown` and take no more requests; idempotent."""
        self._closed = True
        self.end_waits(
            tuple(self.wanted), OnShutdown("the channel closed before the segment was made")
        )

    # --- ids and segments -------------------------------------------------------------------------

    def allocate_id(self) -> int:
        """Return an id for a new collection, partition or segment, higher than every one in the
        log.
        """
        number = self.next_id
        self._next_id = number + 1
        return number

    @property
    def next_id(self) -> int:
        """The id that `allocate_id` returns next."""
        return max(self._next_id, self.state.next_id)

    def skip_ids_below(self, next_id: int) -> None:
        """Allocate no id below `next_id`: an earlier term of this log used them in messages that
        may still come.
        """
        self._next_id = max(self._next_id, next_id)

    def needs_segment(self, key: SegmentKey) -> bool:
        """Whether rows for `key` may be written and no open segment takes them."""
        state = self.state
        is_writable = state.catalog.is_writable(key.vchannel, key.partition_id)
        return is_writable and state.open_segment(key.vchannel, key.partition_id) is None

    def new_segment(self, key: SegmentKey) -> MutableMessage:
        """Return a CREATE_SEGMENT message for `key`, with a new id each time."""
        header = CreateSegmentHeader(
            collection_id=key.collection_id,
            partition_id=key.partition_id,
            segment_id=self.allocate_id(),
            schema_version=self.catalog.collection(key.collection_id).schema_version,
            bytes_max=self.limits.bytes_max,
            rows_max=self.limits.rows_max,
        )
        return MutableMessage(MessageType.CREATE_SEGMENT, header, key.vchannel)

    def end_waits(self, keys: Iterable[SegmentKey], error: StreamingNodeError | None) -> None:
        """Complete the waits for these segments, or fail them with `error`."""
        for key in keys:
            wanted = self.wanted.pop(key, None)
            if wanted is None:  # the manager closed while the segment was being appended
                continue
            if error is None:
                wanted.set_result(None)
            else:
                wanted.set_exception(error)
                # marks the error as retrieved: the append may have been cancelled
                wanted.exception()

    def _settle(self) -> None:
        """Apply the pending pack once the log has it; the next pack replaces one that the log
        refused.
        """
        if self._pending is None or (ticket := self._pending[0].ticket) is None:
            return
        (pack, count, changes) = self._pending
        self._pending = None
        position = ticket.first_position + count - 1
        if changes is None:
            self._state.apply_rows(pack.batches, tick=pack.time_tick, position=position)
        else:
            self._state.apply(changes, tick=pack.time_tick, position=position)

    def _redo(self, missing: Sequence[SegmentKey], groups: Sequence[AppendGroup] = ()) -> Redo:
        """Request segments, and return a `Redo` that waits for the last of them."""
        self.segment_full.set()  # rows lack a segment mostly because the last one is full
        if self._closed:
            raise OnShutdown("the channel is closing and makes no more segments")
        for key in missing:
            if key not in self.wanted:
                self.wanted[key] = asyncio.get_running_loop().create_future()
                self.segment_wanted.set()
        last = missing[-1]
        return Redo(
            self.wanted[last],
            waiting_for=f"a segment of collection {last.collection_id}",
            groups=groups,
        )


class SegmentAllocator:
    """Appends CREATE_SEGMENT messages, in one group for all waiting requests.

    Every wait ends: with the segment, with `Overloaded` when it cannot be made within the bound, or
    with `OnShutdown`.
    """

    def __init__(
        self, manager: ShardManager, *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    ) -> None:
        self._manager = manager
        self._sleep = sleep

    async def run(self, append: Append) -> None:
        """Work until cancelled."""
        try:
            while True:
                await self._manager.segment_wanted.wait()
                self._manager.segment_wanted.clear()
                while keys := tuple(self._manager.wanted)[:AT_ONCE_MAX]:
                    self._manager.end_waits(keys, await self._allocate(keys, append))
        finally:
            await self._manager.close()

    async def _allocate(self, keys: Sequence[SegmentKey], append: Append) -> Overloaded | None:
        reason = ""
        for _ in range(ATTEMPTS_MAX):
            # Skip partitions that were dropped meanwhile or have a segment by now. Their inserts
            # come again, and succeed or raise the reason.
            needed = [key for key in keys if self._manager.needs_segment(key)]
            try:
                if needed:
                    await append(AppendGroup([self._manager.new_segment(key) for key in needed]))
                return None
            except StreamingNodeError as error:
                reason = str(error)
                if error.ends is not Ends.CALL:
                    break
                await self._sleep(RETRY_S)
        return Overloaded(f"no segment could be made for the rows: {reason} — try again")


class SealWorker:
    """Appends FLUSH messages for the segments that are due by a policy; `last_tick` returns the
    newest allocated tick.
    """

    def __init__(self, manager: ShardManager, *, last_tick: Callable[[], int]) -> None:
        self._manager = manager
        self._last_tick = last_tick

    async def run(self, append: Append) -> None:
        """Work until cancelled, or until the log takes no more."""
        await repeat(partial(self.seal_due, append), self._manager.segment_full, SEAL_INTERVAL_S)

    async def seal_due(self, append: Append) -> int:
        """Seal the segments that are due now, in one group; return how many.

        Raises the errors of an append, for example when a cut sealed one of them first.
        """
        self._manager.segment_full.clear()
        segments = self._manager.state.segments.values()
        messages = []
        for segment, reason in due_seals(segments, self._manager.limits, tick=self._last_tick()):
            header = FlushHeader(
                segment.collection_id, segment.partition_id, segment.segment_id, reason
            )
            messages.append(MutableMessage(MessageType.FLUSH, header, segment.vchannel))
        if messages := messages[:AT_ONCE_MAX]:
            await append(AppendGroup(messages))
        return len(messages)
