"""Many rows in few inserts, one reader for many workers, and writes that are tried again; of any
node, on its event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import NamedTuple, Self, TypeVar

import anyio
import stamina

from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from streamingnode.reader import CollectionReader
from streamingnode.writing.write import WriteResult
from wal.errors import InvalidArgument, OnShutdown, StreamingNodeError, TooLarge, shown
from wal.queue import Budget, Signal
from wal.runtime import outlast

T = TypeVar("T")
_Row = tuple[dict[str, object], "asyncio.Future[AppendedRow]"]
_CELL_BYTES = 16  # what a value takes in a batch beside its text, at most


class AppendedRow(NamedTuple):
    """A row that was written, and the result of its batch.

    Its offset is None unless the batch is in the log and went to one vchannel.
    """

    row_offset: int | None
    batch: WriteResult

    @property
    def time_tick(self) -> int:
        """That of the batch. Raises `InvalidArgument` where the batch is `spooled`."""
        return self.batch.time_tick


class AppenderStatistics(NamedTuple):
    """Inserts that took place, rows in them, and bytes that wait or are on their way."""

    batches: int
    rows: int
    pending_bytes: int


@dataclass(eq=False, repr=False)
class BatchAppender:
    """Puts rows of any number of tasks together into inserts:
    `async with BatchAppender(node, "orders") as appender`.

    A batch goes with `rows_max` rows or about `bytes_max` bytes (half an append group at most), at
    `flush`, or `linger_s` seconds after its first row; with 0, rows of one turn of the event loop
    go together. While `batches_in_flight_max` are on their way it grows until one of them ends.
    Rows keep their order within a batch; batches keep theirs if one is in flight.

    Each row has one outcome, told by its future alone. A failed insert fails its own rows only: of
    one refused for what is in it, by an `InvalidArgument`, all go in but the rows that are refused,
    in order; after other errors nothing is repeated. Leaving the block sends what was submitted and
    waits for it, also when the block raised; cancelled, it cancels rows that were not sent, and
    waits for those on their way.
    """

    node: Node
    collection: str
    _: KW_ONLY
    rows_max: int = 1_000
    bytes_max: int = 1 << 20
    linger_s: float = 0.005
    partition: str | None = None
    pending_bytes_max: int = 16 << 20
    batches_in_flight_max: int = 4

    def __post_init__(self) -> None:
        _check(
            **{name: given for name, given in vars(self).items() if name.endswith(("_max", "_s"))}
        )
        self.bytes_max = min(self.bytes_max, self.node.config.wal.group_bytes_max // 2)
        self._room, self._slots = (
            Budget(self.pending_bytes_max),
            asyncio.Semaphore(self.batches_in_flight_max),
        )
        self._batch: list[_Row] = []
        self._linger: asyncio.TimerHandle | None = None
        # batches on their way, and those that wait for a slot
        self._sending: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._given_up = asyncio.Event()
        self._batch_bytes = self._batches = self._rows = 0

    @property
    def statistics(self) -> AppenderStatistics:
        """What it did so far, and what it holds now."""
        return AppenderStatistics(self._batches, self._rows, self._room.held_bytes)

    async def __aenter__(self) -> Self:
        """Begin to take rows. Raises `CollectionNotFound`."""
        self.node.collection(self.collection)
        self._is_open = True
        self._given_up = asyncio.Event()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        self._room.changed.wake()  # who waits for room is refused
        if not issubclass(kind or Exception, Exception):
            self._given_up.set()
        await outlast(self.flush(), on_cancel=self._given_up.set)

    async def append(self, row: Mapping[str, object]) -> AppendedRow:
        """Submit a row and return when it is durable; raises what `submit` and its insert raise."""
        return await (await self.submit(row))

    async def submit(self, row: Mapping[str, object]) -> asyncio.Future[AppendedRow]:
        """Add a row, once at most `pending_bytes_max` bytes are pending with it, and return a
        future of its outcome.

        First come, first served. A call cancelled while it waits, and a row whose future is
        cancelled before it is sent, never were. The row is copied, lists and structs in it are not.
        Raises `TooLarge` for a row without room, `OnShutdown` outside of the block,
        `InvalidArgument`.
        """
        if not isinstance(row, Mapping):
            raise InvalidArgument(
                f"a row is no {type(row).__name__} — pass a dict of column name to value"
            )
        size_bytes = _bytes_of(cells := dict(row))
        bytes_max = self.pending_bytes_max
        if size_bytes > bytes_max:
            raise TooLarge(
                f"{size_bytes} bytes in one row, {bytes_max} may be pending — raise "
                "pending_bytes_max"
            )
        if not self._batch:
            await asyncio.sleep(0)  # a loop that submits without a pause gives way once a batch
        self._make_room(size_bytes)
        await self._room.take(size_bytes, check=lambda: self._make_room(size_bytes))
        if self._batch_bytes + size_bytes > self.bytes_max:
            self._end_batch()
        loop = asyncio.get_running_loop()
        self._batch.append((cells, told := loop.create_future()))
        self._batch_bytes += size_bytes
        if len(self._batch) >= self.rows_max or self._batch_bytes >= self.bytes_max:
            self._end_batch()
        elif self._linger is None:
            self._linger = loop.call_later(
                self.linger_s, self._end_batch, self.batches_in_flight_max
            )
        return told

    async def flush(self) -> None:
        """Send every row submitted before the call, and return when all of them are told; raises
        none of their errors.
        """
        self._end_batch()
        if self._sending:
            await asyncio.wait(list(self._sending))

    def _make_room(self, size_bytes: int) -> None:
        if not self._is_open:
            raise OnShutdown(
                "the appender is not open — use it inside `async with BatchAppender(...) as "
                "appender`"
            )
        if self._room.held_bytes + size_bytes > self.pending_bytes_max:
            self._end_batch()  # what lingers takes the room

    def _end_batch(self, sending_max: float = inf) -> None:
        if len(self._sending) >= sending_max:
            return  # it goes when one of them ends
        if self._linger is not None:
            self._linger.cancel()
        if self._batch:
            task = asyncio.get_running_loop().create_task(
                self._send(self._batch, self._batch_bytes)
            )
            self._sending.add(task)
            task.add_done_callback(self._end_sending)
        self._batch = []
        self._batch_bytes = 0
        self._linger = None

    def _end_sending(self, task: asyncio.Task[None]) -> None:
        self._sending.remove(task)
        if len(self._sending) + 1 >= self.batches_in_flight_max:
            self._end_batch()

    async def _send(self, batch: Sequence[_Row], size_bytes: int) -> None:
        parts = [batch]
        try:
            async with self._slots:
                while parts and not self._given_up.is_set():
                    # without those that were cancelled
                    if rows := [row for row in parts.pop() if not row[1].done()]:
                        parts += await self._insert(rows)
        finally:
            for _, told in batch:
                told.cancel()  # who was not told was given up
            self._room.give_back(size_bytes)

    async def _insert(self, rows: Sequence[_Row]) -> Sequence[Sequence[_Row]]:
        """Insert rows and tell each of them; return the halves, the first one last, of those
        refused for what is in one.
        """
        try:
            batch = await self.node.insert(
                self.collection, [cells for cells, _ in rows], partition=self.partition
            )
        except Exception as error:  # noqa: BLE001 - a task's border: the error is the callers'
            if len(rows) > 1 and isinstance(error, InvalidArgument):
                return rows[len(rows) // 2 :], rows[: len(rows) // 2]
            for told in (told for _, told in rows if not told.done()):
                told.set_exception(error)
            return ()
        self._batches, self._rows = self._batches + 1, self._rows + len(rows)
        has_offsets = not (batch.spooled or batch.groups) and len(batch.row_offsets) == 1
        first = next(iter(batch.row_offsets.values()))[0] if has_offsets else None
        for index, (_, told) in enumerate(rows):
            if not told.done():
                told.set_result(AppendedRow(None if first is None else first + index, batch))
        return ()


@dataclass(eq=False, repr=False)
class ParallelConsumer:
    """Has up to `workers` messages of an open reader worked off at a time:
    `await ParallelConsumer(reader, work).run()`.

    Messages of one key are worked off one after the other, in order, others side by side. The key
    is `key(message)`; without `key`, each of its vchannels is one: what concerns several comes
    after everything before it on each of them, a tick after everything. At most `in_flight_max`
    messages are held, from the oldest not worked off to the newest. A named reader is acknowledged
    up to the oldest, `ack_interval_s` seconds after that moved on, and at the end; the rest comes
    again.
    """

    reader: CollectionReader
    work: Callable[[ReadMessage], Awaitable[object]]
    _: KW_ONLY
    workers: int = 8
    key: Callable[[ReadMessage], Hashable] | None = None
    in_flight_max: int = 1_000
    ack_interval_s: float = 1.0

    def __post_init__(self) -> None:
        _check(
            workers=self.workers,
            in_flight_max=self.in_flight_max,
            ack_interval_s=self.ack_interval_s,
        )
        self._slots = asyncio.Semaphore(self.workers)
        self._ended = Signal()
        self._wait: anyio.CancelScope  # of each look for a message
        # whether each is worked off
        self._in_flight: OrderedDict[ReadMessage, bool] = OrderedDict()
        self._newest: dict[Hashable, asyncio.Task[None]] = {}  # by key, until it ends
        # to be acknowledged at `_ack_at_s` of the event loop's clock
        self._worked_off: ReadMessage | None = None
        self._ack_at_s = inf
        self._has_run = False
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Work until the reader ends and everything is worked off; once.

        The first error of `work`, `key` or the reader is raised as it is when all work under way
        has ended; no other begins. Cancelling it cancels the work. Each time, what was worked off
        before the first message that was not is acknowledged.
        """
        if self._has_run:
            raise InvalidArgument("a consumer runs once — open the reader again, and make another")
        self._has_run = True
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._read(tasks)
                except Exception as error:  # noqa: BLE001
                    # raised below: the group would cancel the work under way
                    self._fail(error)
        finally:
            await outlast(self._ack())
        if self._failure is not None:
            raise self._failure

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        has_more = True
        while self._failure is None and (has_more or self._in_flight):
            with anyio.CancelScope(deadline=self._ack_at_s) as self._wait:
                if not has_more or len(self._in_flight) >= self.in_flight_max:
                    await self._ended.wait()
                elif has_more := ((message := await anext(self.reader, None)) is not None):
                    self._begin(message, tasks)
            if asyncio.get_running_loop().time() >= self._ack_at_s:
                await self._ack()

    def _begin(self, message: ReadMessage, tasks: asyncio.TaskGroup) -> None:
        keys: Iterable[Hashable] = message.vchannels if self.key is None else (self.key(message),)
        before = (
            {self._newest[key] for key in keys if key in self._newest}
            if keys
            else {*self._newest.values()}
        )
        self._in_flight[message] = False
        self._newest |= dict.fromkeys(
            keys or (None,), tasks.create_task(self._do(message, keys or (None,), before))
        )

    async def _do(
        self, message: ReadMessage, keys: Iterable[Hashable], before: Iterable[asyncio.Task[None]]
    ) -> None:
        try:
            if before:
                await asyncio.wait(before)
            async with self._slots:
                if self._failure is None:
                    await self.work(message)
                    self._in_flight[message] = True
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
            # a task's border: `run` raises it
            self._fail(error)
        for key in [key for key in keys if self._newest.get(key) is asyncio.current_task()]:
            del self._newest[key]
        while next(iter(self._in_flight.values()), False):
            self._worked_off, _ = self._in_flight.popitem(last=False)
            if self._ack_at_s == inf:
                self._ack_at_s = self._wait.deadline = (
                    asyncio.get_running_loop().time() + self.ack_interval_s
                )
        self._ended.wake()

    def _fail(self, error: BaseException) -> None:
        self._failure = error if self._failure is None else self._failure
        self._wait.cancel()

    async def _ack(self) -> None:
        message = self._worked_off
        self._ack_at_s = inf
        try:
            if message is not None:
                await self.reader.ack(message)
        except InvalidArgument:  # a reader without a name keeps no place
            self.ack_interval_s = inf
        except StreamingNodeError as error:
            self._fail(error)


async def append_with_retry(
    call: Callable[[], Awaitable[T]],
    *,
    timeout_s: float = 30.0,
    attempts_max: int | None = None,
    exact: bool = False,
) -> T:
    """Return what a call of a node returns, tried again while its error is `retryable` "yes", with
    pauses of up to 5 s.

    `exact` says that repeating it cannot write twice, as a producer's write with a `sequence`: then
    "indeterminate" is tried again, too. No pause begins after `timeout_s` seconds or `attempts_max`
    tries. Raises the last error, or that of a try which may have taken place, with the last as its
    cause. stamina's hooks hear of each pause.
    """
    _check(timeout_s=timeout_s, attempts_max=1 if attempts_max is None else attempts_max)
    doubts: list[Exception] = []

    def helps(error: Exception) -> bool:
        retryable = error.retryable if isinstance(error, StreamingNodeError) else "no"
        if retryable == "indeterminate":
            doubts.append(error)
        return retryable == "yes" or (exact and retryable == "indeterminate")

    try:
        attempts = attempts_max if timeout_s else 1  # stamina warns of a timeout of 0
        return await stamina.AsyncRetryingCaller(attempts=attempts, timeout=timeout_s or None)(
            helps, call
        )
    except StreamingNodeError as error:
        if doubts and error is not doubts[-1]:
            raise doubts[-1] from error
        raise


def _bytes_of(value: object) -> int:
    """Return about what a value takes in a batch, at most."""
    if isinstance(value, str):
        return _CELL_BYTES + len(value) * (1 if value.isascii() else 4)
    if isinstance(value, (dict, list, tuple)):
        return _CELL_BYTES + sum(
            map(_bytes_of, value.values() if isinstance(value, dict) else value)
        )
    return _CELL_BYTES + (len(value) if isinstance(value, bytes) else getattr(value, "nbytes", 0))


def _check(**bounds: float) -> None:
    for name, bound in bounds.items():
        kinds, least = ((int, float), 0) if name.endswith("_s") else (int, 1)
        if isinstance(bound, bool) or not isinstance(bound, kinds) or not least <= bound <= 1e300:
            raise InvalidArgument(
                f"{name}={shown(bound)} — pass a {'whole ' * least}number of at least {least}"
            )
