"""Helpers for any node, on its event loop: an appender in batches, a parallel consumer of one
reader, and retries of writes.
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
_CELL_BYTES = 16  # at most this much for a value in a batch, apart from its text


class AppendedRow(NamedTuple):
    """The result of an appended row: its offset and the result of its batch.

    The offset is None unless the batch is in the log and went to one vchannel.
    """

    row_offset: int | None
    batch: WriteResult

    @property
    def time_tick(self) -> int:
        """The tick of the batch. Raises `InvalidArgument` if the batch is `spooled`."""
        return self.batch.time_tick


class AppenderStatistics(NamedTuple):
    """Successful inserts, the rows in them, and the bytes that wait or are in flight."""

    batches: int
    rows: int
    pending_bytes: int


@dataclass(eq=False, repr=False)
class BatchAppender:
    """Collects rows of any number of tasks into inserts:
    `async with BatchAppender(node, "orders") as appender`.

    A batch is sent at `rows_max` rows or about `bytes_max` bytes (half an append group at most), at
    `flush`, or `linger_s` seconds after its first row; with 0, it has the rows of one turn of the
    event loop. While `batches_in_flight_max` are in flight, the lingering batch grows until one of
    them ends. Rows keep their order within a batch; batches keep their order if
    `batches_in_flight_max` is 1.

    Each row has one outcome, which its future returns. A failed insert fails only its own rows. If
    it fails with `InvalidArgument`, it is repeated in halves, so that all rows but the refused ones
    are inserted, in order; after other errors nothing is repeated. Leaving the block sends all
    submitted rows and waits for them, also when the block raised. When that is cancelled, it
    cancels rows that were not sent, and waits for those in flight.
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
        # batches in flight, and those that wait for a slot
        self._sending: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._given_up = asyncio.Event()
        self._batch_bytes = self._batches = self._rows = 0

    @property
    def statistics(self) -> AppenderStatistics:
        """The inserts so far, and the bytes held now."""
        return AppenderStatistics(self._batches, self._rows, self._room.held_bytes)

    async def __aenter__(self) -> Self:
        """Start accepting rows. Raises `CollectionNotFound`."""
        self.node.collection(self.collection)
        self._is_open = True
        self._given_up = asyncio.Event()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = False
        self._room.changed.wake()  # callers that wait for room are refused
        if not issubclass(kind or Exception, Exception):
            self._given_up.set()
        await outlast(self.flush(), on_cancel=self._given_up.set)

    async def append(self, row: Mapping[str, object]) -> AppendedRow:
        """Submit a row and return when it is durable; raises the errors of `submit` and of the
        insert.
        """
        return await (await self.submit(row))

    async def submit(self, row: Mapping[str, object]) -> asyncio.Future[AppendedRow]:
        """Add a row, once at most `pending_bytes_max` bytes are pending with it, and return a
        future of its outcome.

        Calls wait first come, first served. A call cancelled while it waits submits nothing; a row
        whose future is cancelled before it is sent is not written. The row is copied, but lists and
        structs in it are not. Raises `TooLarge` for a row over `pending_bytes_max`, `OnShutdown`
        outside of the block, and `InvalidArgument`.
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
            await asyncio.sleep(0)  # a loop without a pause lets other tasks run once a batch
        self._make_room(size_bytes)
        await self._room.take(size_bytes, check=lambda: self._make_room(size_bytes))
        if self._batch_bytes + size_bytes > self.bytes_max:
            self._end_batch()
        loop = asyncio.get_running_loop()
        self._batch.append((cells, outcome := loop.create_future()))
        self._batch_bytes += size_bytes
        if len(self._batch) >= self.rows_max or self._batch_bytes >= self.bytes_max:
            self._end_batch()
        elif self._linger is None:
            self._linger = loop.call_later(
                self.linger_s, self._end_batch, self.batches_in_flight_max
            )
        return outcome

    async def flush(self) -> None:
        """Send every row submitted before the call, and return when all of them have an outcome.

        The errors of rows are raised by their futures, not here.
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
            self._end_batch()  # the lingering batch holds room

    def _end_batch(self, sending_max: float = inf) -> None:
        if len(self._sending) >= sending_max:
            return  # the end of one of them sends it
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
                    # skip cancelled rows
                    if rows := [row for row in parts.pop() if not row[1].done()]:
                        parts += await self._insert(rows)
        finally:
            for _, outcome in batch:
                outcome.cancel()  # rows without an outcome were abandoned
            self._room.give_back(size_bytes)

    async def _insert(self, rows: Sequence[_Row]) -> Sequence[Sequence[_Row]]:
        """Insert rows and complete their futures.

        If the insert is refused as invalid, returns the rows in two halves to try, the first half
        last.
        """
        try:
            batch = await self.node.insert(
                self.collection, [cells for cells, _ in rows], partition=self.partition
            )
        except Exception as error:  # noqa: BLE001 - a task's border: the futures raise the error
            if len(rows) > 1 and isinstance(error, InvalidArgument):
                return rows[len(rows) // 2 :], rows[: len(rows) // 2]
            for outcome in (outcome for _, outcome in rows if not outcome.done()):
                outcome.set_exception(error)
            return ()
        self._batches, self._rows = self._batches + 1, self._rows + len(rows)
        has_offsets = not (batch.spooled or batch.groups) and len(batch.row_offsets) == 1
        first = next(iter(batch.row_offsets.values()))[0] if has_offsets else None
        for index, (_, outcome) in enumerate(rows):
            if not outcome.done():
                outcome.set_result(AppendedRow(None if first is None else first + index, batch))
        return ()


@dataclass(eq=False, repr=False)
class ParallelConsumer:
    """Processes up to `workers` messages of an open reader at a time:
    `await ParallelConsumer(reader, work).run()`.

    Messages of one key are processed one after the other, in order; messages of different keys run
    concurrently. The key is `key(message)`. Without `key`, each vchannel of a message is a key: a
    message on several vchannels waits for all earlier ones on each of them, and a tick waits for
    all earlier messages. At most `in_flight_max` messages are held, from the oldest unprocessed one
    to the newest. A named reader is acknowledged up to the oldest unprocessed message,
    `ack_interval_s` seconds after that moved, and at the end; the rest is delivered again.
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
        self._wait: anyio.CancelScope  # the scope of the current wait for a message
        # whether each message is processed, in their order
        self._in_flight: OrderedDict[ReadMessage, bool] = OrderedDict()
        self._newest: dict[Hashable, asyncio.Task[None]] = {}  # by key, until it ends
        # the message to be acknowledged at `_ack_at_s` of the event loop's clock
        self._worked_off: ReadMessage | None = None
        self._ack_at_s = inf
        self._has_run = False
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Run until the reader ends and everything is processed; it runs only once.

        After the first error of `work`, `key` or the reader no more work begins; the error is
        raised unchanged when all work under way has ended. Cancelling the call cancels the work.
        In every case, all messages before the first unprocessed one are acknowledged.
        """
        if self._has_run:
            raise InvalidArgument("a consumer runs once — open the reader again, and make another")
        self._has_run = True
        try:
            async with asyncio.TaskGroup() as tasks:
                try:
                    await self._read(tasks)
                except Exception as error:  # noqa: BLE001
                    # raised below: raised here, it would make the group cancel the work under way
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
    """Return the result of a call of a node; retry it while its error is `retryable` "yes", with
    pauses of up to 5 s.

    `exact` means that a repeated call cannot write twice, as with a producer's `sequence`; then
    "indeterminate" is retried too. No retry begins after `timeout_s` seconds or `attempts_max`
    attempts. Raises the last error. If an earlier attempt was indeterminate, raises that error,
    with the last one as its cause. stamina calls its hooks before each pause.
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
    """Return about the most bytes that a value takes in a batch."""
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
