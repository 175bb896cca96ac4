"""Puts small concurrent inserts together before they are encoded: encoding one row costs what encoding fifty does.

Inserts of one turn of the event loop meet in a lane, one for each collection and partition, and go as one append group; each
gets its own result, and a bad one fails alone. One that comes when others do not goes at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

import pyarrow as pa

from streamingnode.rows import DictRows, Routed, dicts_to_batch, route
from streamingnode.writing.result import WriteResult, result_of, share_result
from streamingnode.writing.write import (
    Progress,
    Writes,
    WriteTarget,
    append_batches,
    insert_messages,
    insert_of,
    within,
)
from wal.errors import Indeterminate, OnShutdown, StreamingNodeError
from wal.log import AppendGroup

Spawn = Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"]
"""Start a task that somebody owns."""

_LANES_MAX = 1024
_ROW_BYTES_GUESS_PER_CELL = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CoalescerLimits:
    """What is put together, and how much of it.

    Inserts of over `insert_rows_max` rows gain nothing and go alone. A group ends at `group_rows_max`, or at the rows that
    made `group_bytes` lately: larger ones hold the log's writer. With `groups_in_flight_max` groups of a lane on their
    way, inserts wait and are put together meanwhile.
    """

    insert_rows_max: int = 16
    group_rows_max: int = 2048
    group_bytes: int = 1 << 20
    groups_in_flight_max: int = 4


class _Insert:
    """One caller's rows; `taken` once they are in a group."""

    __slots__ = ("future", "rows", "size_bytes", "taken")

    def __init__(self, rows: DictRows, future: "asyncio.Future[WriteResult]") -> None:
        self.rows, self.future = rows, future
        self.size_bytes = sum(map(_guess_row_bytes, rows))
        self.taken = False

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Coalescer:
    """The lanes of one node; lives on the event loop. Waiting rows count as pending until their group has ended.

    An insert that is cancelled while it waits never happened; once it is in a group, its outcome is decided without its
    caller.
    """

    def __init__(self, spawn: Spawn, writes: Writes, limits: CoalescerLimits) -> None:
        self._spawn, self._writes, self._limits = spawn, writes, limits
        self._memory = writes.pending.rows
        self._group_bytes_max = writes.limits.group_bytes_max
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting_rows(self) -> int:
        """Rows that are in no group yet."""
        return sum(lane.waiting_rows for lane in self._lanes.values())

    @property
    def groups_in_flight(self) -> int:
        """Groups on their way to the log."""
        return len(self._tasks)

    def insert(
        self, target: WriteTarget, partition_id: int, rows: DictRows, *, timeout: float | None = None
    ) -> Awaitable[WriteResult]:
        """Insert a few dicts together with others; what is returned is awaited at once, for this insert's own result.

        That comes when the log acknowledges it. Raises `SchemaMismatch` for rows that do not fit, naming this insert's own
        row; errors of the append reach every insert of the group. With a `timeout`, raises as `deadline.within` does.
        """
        lane = self._lanes.get((target.info.id, partition_id)) or self._open_lane(target, partition_id, rows)
        lane.target = target
        if lane.lonely and timeout is None:
            return self._insert_now(lane, rows)
        insert = _Insert(rows, self._loop.create_future())
        if timeout is None:
            return self._join(lane, insert)
        return within(timeout, lambda: self._join(lane, insert), "the insert", begun=lambda: insert.taken)

    async def drain(self) -> None:
        """Return once every insert that came before has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _insert_now(self, lane: "_Lane", rows: DictRows) -> WriteResult:
        """Send an insert from its caller's own task: none came together with another lately, so none is waited for."""
        lane.sending += 1
        try:
            batch = dicts_to_batch(rows, lane.target.rows)
            _, group = lane.group_of(batch)
            if group.size_bytes > self._group_bytes_max:
                return await self._write_alone(lane, batch)
            return result_of(await self._writes.append(group))
        finally:
            lane.sending -= 1
            if lane.waiting:
                self._start(lane)

    def _join(self, lane: "_Lane", insert: _Insert) -> Awaitable[WriteResult]:
        if not self._memory.try_take(insert.size_bytes):
            return self._join_later(lane, insert)
        return self._wait_in(lane, insert)

    async def _join_later(self, lane: "_Lane", insert: _Insert) -> WriteResult:
        await self._memory.take(insert.size_bytes)
        return await self._wait_in(lane, insert)

    def _wait_in(self, lane: "_Lane", insert: _Insert) -> "asyncio.Future[WriteResult]":
        lane.waiting.append(insert)
        lane.waiting_rows += len(insert.rows)
        self._start(lane)
        return insert.future

    def _start(self, lane: "_Lane") -> None:
        """Have what waits sent in the next turn of the event loop, unless enough groups are on their way."""
        if not lane.starting and lane.sending < self._limits.groups_in_flight_max:
            lane.starting = True
            lane.sending += 1
            task = self._spawn(self._send_waiting(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _open_lane(self, target: WriteTarget, partition_id: int, rows: DictRows) -> "_Lane":
        """Make a lane; those of dropped collections go when it is one too many."""
        if len(self._lanes) >= _LANES_MAX:
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane.sending}
        lane = self._lanes[target.info.id, partition_id] = _Lane(target, partition_id, _guess_row_bytes(rows[0]))
        return lane

    async def _send_waiting(self, lane: "_Lane") -> None:
        """Send groups until nothing waits. Whatever ends it, nobody is left waiting: not those it has, nor those behind."""
        inserts: list[_Insert] = []
        try:
            lane.starting = False
            while inserts := lane.take(self._limits):
                try:
                    await self._send(lane, inserts)
                finally:
                    self._give_back(inserts)
        except asyncio.CancelledError:
            for insert in inserts:
                insert.fail(
                    Indeterminate("the node closed before the insert was acknowledged — read back after reopening")
                )
            while inserts := lane.take(self._limits):
                for insert in inserts:
                    insert.fail(OnShutdown("the node closed before the insert was begun — open it again"))
                self._give_back(inserts)
            raise
        finally:
            lane.sending -= 1
            if lane.waiting:  # a bug ended this task; it was in a group that is gone
                self._start(lane)

    def _give_back(self, inserts: list[_Insert]) -> None:
        self._memory.give_back(sum([insert.size_bytes for insert in inserts]))

    async def _send(self, lane: "_Lane", inserts: list[_Insert]) -> None:
        """Send one group, and tell each insert what became of it."""
        try:
            inserts, batch = _encode([insert for insert in inserts if not insert.future.done()], lane.target)
            if batch is None:
                return
            routed, group = lane.group_of(batch)
            size_bytes = group.size_bytes
            lane.learn_row_bytes(size_bytes // batch.num_rows)
            if size_bytes <= self._group_bytes_max:
                appended, counts = await self._writes.append(group), [len(insert.rows) for insert in inserts]
                results = share_result(appended, routed, lane.target.info.vchannels, counts)
            elif len(inserts) == 1:
                results = [await self._write_alone(lane, batch)]
            else:  # rows are larger than they were: halve the group
                half = len(inserts) // 2
                await self._send(lane, inserts[:half])
                await self._send(lane, inserts[half:])
                return
            for insert, result in zip(inserts, results, strict=True):
                if not insert.future.done():
                    insert.future.set_result(result)
        except Exception as error:
            for insert in inserts:
                insert.fail(error)
            if not isinstance(error, StreamingNodeError):  # a bug: whoever owns the task sees it, too
                raise

    async def _write_alone(self, lane: "_Lane", batch: pa.RecordBatch) -> WriteResult:
        """Insert what is more than one group."""
        return await append_batches(self._writes, insert_of(lane.target, lane.partition_id), [batch], Progress())


class _Lane:
    """Inserts into one partition; `sending` tasks take from it, the next one is `starting`."""

    def __init__(self, target: WriteTarget, partition_id: int, row_bytes: int) -> None:
        self.target, self.partition_id = target, partition_id
        self.waiting: deque[_Insert] = deque()
        self.waiting_rows = self.sending = 0
        self.starting = False
        self._row_bytes = row_bytes
        self._together = True

    @property
    def lonely(self) -> bool:
        """Whether nothing waits or is on its way, and the last group was one insert; a new lane does not know yet."""
        return not self.sending and not self.waiting and not self._together

    def group_of(self, batch: pa.RecordBatch) -> tuple[Routed, AppendGroup]:
        """Return the rows by shard, and the group that inserts them."""
        target = self.target
        routed = route(batch, key_index=target.key_index, shards=len(target.info.vchannels))
        return routed, AppendGroup(insert_messages(target, self.partition_id, routed))

    def take(self, limits: CoalescerLimits) -> list[_Insert]:
        """Return the inserts of the next group, oldest first; some of their callers may be gone."""
        rows_max = max(1, min(limits.group_rows_max, limits.group_bytes // self._row_bytes))
        taken: list[_Insert] = []
        rows = 0
        while self.waiting and (not rows or rows + len(self.waiting[0].rows) <= rows_max):
            insert = self.waiting.popleft()
            insert.taken = not insert.future.done()
            rows += len(insert.rows)
            taken.append(insert)
        self.waiting_rows -= rows
        if taken:
            self._together = len(taken) > 1
        return taken

    def learn_row_bytes(self, row_bytes: int) -> None:
        """Remember how large rows are lately: up at once, down slowly."""
        self._row_bytes = max(1, row_bytes, self._row_bytes - (self._row_bytes >> 3))


def _encode(inserts: list[_Insert], target: WriteTarget) -> tuple[list[_Insert], pa.RecordBatch | None]:
    """Return the inserts whose rows fit the schema, and these rows; the others have failed."""
    if not inserts:
        return [], None
    try:
        return inserts, dicts_to_batch([row for insert in inserts for row in insert.rows], target.rows)
    except StreamingNodeError as error:
        if len(inserts) == 1:
            inserts[0].fail(error)
            return [], None
    return _encode([insert for insert in inserts if _encode([insert], target)[0]], target)


def _guess_row_bytes(row: Mapping[str, object]) -> int:
    """Guess the size of a row: that of its text and bytes, however deep, and something for each other cell."""
    try:
        return sum(map(_guess_bytes, row.values())) or 1
    except (AttributeError, TypeError, RecursionError):  # no dict, or no row: it will be refused with its place
        return 1024


def _guess_bytes(cell: object) -> int:
    if isinstance(cell, (str, bytes)):
        return len(cell) + _ROW_BYTES_GUESS_PER_CELL
    if isinstance(cell, dict):
        return sum(map(_guess_bytes, cell.values()), _ROW_BYTES_GUESS_PER_CELL)
    if isinstance(cell, (list, tuple)):
        return sum(map(_guess_bytes, cell), _ROW_BYTES_GUESS_PER_CELL)
    return _ROW_BYTES_GUESS_PER_CELL
