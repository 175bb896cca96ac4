"""Puts small concurrent inserts together before they are encoded: encoding one row costs what encoding fifty does.

Inserts of one turn of the event loop meet in a lane, one for each collection and partition, and go as one append group; each
gets its own result, and a bad one fails alone. One that comes when others do not goes at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from streamingnode.rows import DictRows, RowShape, dicts_to_batch
from streamingnode.writing.result import WriteResult, result_of, share_result
from streamingnode.writing.write import Write, Writes, append_rows, within
from wal.errors import Indeterminate, OnShutdown, StreamingNodeError
from wal.log import AppendGroup
from wal.runtime import Supervisor

_LANES_MAX = 1024
_ROW_BYTES, _CELL_BYTES = 512, 16
"""What Python has for a row that waits, and for each of its cells, beside texts and bytes."""


class _Insert:
    """One caller's rows; `taken` once they are in a group."""

    __slots__ = ("future", "rows", "size_bytes", "taken")

    def __init__(self, rows: DictRows, future: "asyncio.Future[WriteResult]") -> None:
        self.rows, self.future = rows, future
        self.taken = False
        try:
            self.size_bytes = sum([_ROW_BYTES + sum(map(_guess_bytes, row.values())) for row in rows])
        except (AttributeError, TypeError, RecursionError):  # no dict, or no row: it will be refused with its place
            self.size_bytes = _ROW_BYTES


@dataclass(slots=True)
class _Lane:
    """Inserts into one partition; `sending` tasks take from it, the next one is `starting`."""

    write: Write
    waiting: deque[_Insert] = field(default_factory=deque)
    sending: int = 0
    starting: bool = False
    together: bool = True
    """Whether the last group was several inserts; a new lane does not know yet."""

    def take(self, bytes_max: int) -> list[_Insert]:
        """Return the inserts of the next group, oldest first; some of their callers may be gone."""
        taken: list[_Insert] = []
        size_bytes = 0
        while self.waiting and (not taken or size_bytes + self.waiting[0].size_bytes <= bytes_max):
            insert = self.waiting.popleft()
            insert.taken = not insert.future.done()
            size_bytes += insert.size_bytes
            taken.append(insert)
        if taken:
            self.together = len(taken) > 1
        return taken


class Coalescer:
    """The lanes of one node; lives on the event loop. Waiting rows count as pending until their group has ended."""

    rows_max = 16
    """Inserts of more rows gain nothing and go alone."""
    group_bytes_max = 1 << 20
    """As rows that wait are counted, so 2,048 rows: larger groups hold the log's writer."""
    groups_in_flight_max = 4
    """Of one lane; with as many on their way, inserts wait and are put together meanwhile."""

    def __init__(self, supervisor: Supervisor, writes: Writes) -> None:
        self._supervisor, self._writes = supervisor, writes
        self._memory = writes.pending.rows
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def insert(self, write: Write, rows: DictRows, *, timeout: float | None = None) -> Awaitable[WriteResult]:
        """Insert a few dicts together with others; what is returned is awaited at once, for this insert's own result.

        Raises `SchemaMismatch` with this insert's own row; errors of the append reach every insert of the group.
        """
        key = write.target.info.id, write.partition_id
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= _LANES_MAX:  # those of dropped collections go, too
                self._lanes = {key: lane for key, lane in self._lanes.items() if lane.sending}
            lane = self._lanes[key] = _Lane(write)
        lane.write = write
        if timeout is None and not (lane.together or lane.sending or lane.waiting):
            return self._insert_now(lane, rows)
        insert = _Insert(rows, self._loop.create_future())
        return within(timeout, partial(self._join, lane, insert), "the insert", begun=lambda: insert.taken)

    async def drain(self) -> None:
        """Return once every insert that came before has ended."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _insert_now(self, lane: _Lane, rows: DictRows) -> WriteResult:
        """Send an insert from its caller's own task: none came together with another lately, so none is waited for."""
        lane.sending += 1
        try:
            batch = dicts_to_batch(rows, lane.write.target.rows)
            group = lane.write.group(batch)
            if group.size_bytes > self._writes.limits.group_bytes_max:
                return await append_rows(self._writes, lane.write, batch, timeout=None)
            return result_of(await self._writes.append(group))
        finally:
            self._sent(lane)

    async def _join(self, lane: _Lane, insert: _Insert) -> WriteResult:
        await self._memory.take(insert.size_bytes)
        lane.waiting.append(insert)
        self._start(lane)
        return await insert.future

    def _start(self, lane: _Lane) -> None:
        """Have what waits sent in the next turn of the event loop, unless enough groups are on their way."""
        if not lane.starting and lane.sending < self.groups_in_flight_max:
            lane.starting = True
            lane.sending += 1
            task = self._supervisor.spawn(self._send_waiting(lane))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _sent(self, lane: _Lane) -> None:
        lane.sending -= 1
        if lane.waiting:
            self._start(lane)

    async def _send_waiting(self, lane: _Lane) -> None:
        """Send groups until nothing waits. Whatever ends it, nobody is left waiting: not those it has, nor those behind."""
        inserts: list[_Insert] = []
        lane.starting = False
        try:
            while inserts := lane.take(self.group_bytes_max):
                try:
                    await self._send(lane.write, inserts)
                finally:
                    self._give_back(inserts)
        except asyncio.CancelledError:
            _fail(
                inserts, Indeterminate("the node closed before the insert was acknowledged — read back after reopening")
            )
            while inserts := lane.take(self.group_bytes_max):
                _fail(inserts, OnShutdown("the node closed before the insert was begun — open it again"))
                self._give_back(inserts)
            raise
        finally:
            self._sent(lane)  # what waits behind a bug goes by another task

    def _give_back(self, inserts: list[_Insert]) -> None:
        self._memory.give_back(sum([insert.size_bytes for insert in inserts]))

    async def _send(self, write: Write, inserts: list[_Insert]) -> None:
        """Send one group, and tell each insert what became of it."""
        try:
            inserts, batch = _encode([insert for insert in inserts if not insert.future.done()], write.target.rows)
            if batch is None:
                return
            routed = write.route(batch)
            group = AppendGroup(write.messages(routed))
            if group.size_bytes <= self._writes.limits.group_bytes_max:
                appended, counts = await self._writes.append(group), [len(insert.rows) for insert in inserts]
                results = share_result(appended, routed, write.target.info.vchannels, counts)
            elif len(inserts) == 1:
                results = [await append_rows(self._writes, write, batch, timeout=None)]
            else:  # rows are larger than was guessed: halve the group
                half = len(inserts) // 2
                await self._send(write, inserts[:half])
                await self._send(write, inserts[half:])
                return
            for insert, result in zip(inserts, results, strict=True):
                if not insert.future.done():
                    insert.future.set_result(result)
        except Exception as error:
            _fail(inserts, error)
            if not isinstance(error, StreamingNodeError):  # a bug: whoever owns the task sees it, too
                raise


def _fail(inserts: list[_Insert], error: Exception) -> None:
    for insert in inserts:
        if not insert.future.done():
            insert.future.set_exception(error)


def _encode(inserts: list[_Insert], shape: RowShape) -> tuple[list[_Insert], pa.RecordBatch | None]:
    """Return the inserts whose rows fit the schema, and these rows; the others have failed."""
    if not inserts:
        return [], None
    try:
        return inserts, dicts_to_batch([row for insert in inserts for row in insert.rows], shape)
    except StreamingNodeError as error:
        if len(inserts) == 1:
            _fail(inserts, error)
            return [], None
    return _encode([insert for insert in inserts if _encode([insert], shape)[0]], shape)


def _guess_bytes(value: object) -> int:
    """Guess the size of a value: that of its text and bytes, however deep, and something for each other cell."""
    if isinstance(value, (str, bytes)):
        return len(value) + _CELL_BYTES
    if isinstance(value, dict):
        return sum(map(_guess_bytes, value.values()), _CELL_BYTES)
    if isinstance(value, (list, tuple)):
        return sum(map(_guess_bytes, value), _CELL_BYTES)
    nbytes: int = getattr(value, "nbytes", 0)  # of a vector of numpy's
    return _CELL_BYTES + nbytes
