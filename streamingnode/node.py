"""The open node: a program's calls for collections, rows, transactions, readers and cuts."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import partial
from typing import TypeVar

import pyarrow as pa

from interceptors.errors import CollectionNotFound
from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from streamingnode.backend import Backend, ReadRequest
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord
from streamingnode.channel import FlushResult
from streamingnode.collection_calls import CollectionCalls
from streamingnode.collections import READ_COLLECTIONS_MAX, check_name, check_text
from streamingnode.config import NodeConfig
from streamingnode.holders import ReaderInfo, TransactionInfo
from streamingnode.reader import CollectionReader, check_types
from streamingnode.rows import Keys, Rows
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.streams.channels import ChannelService
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import (
    Transaction,
    begin_group,
    check_keepalive_ms,
    commit_group,
    rollback_group,
)
from streamingnode.writing.write import (
    Deadline,
    WriteResult,
    Writes,
    append_rows,
    check_txn_id,
    within,
)
from wal.append import AppendGroup, AppendResult
from wal.errors import InvalidArgument, OnShutdown, StorageFailed, nearest, shown
from wal.files import check_path
from wal.headers import MessageType
from wal.rocks.layout import Durability
from wal.rocksmq.contract import MessageQueue
from wal.runtime import Holding, Supervisor, in_thread, let_go_of_ended, outlast
from wal.timetick import tick_given

T = TypeVar("T")

ALL = DeliverPolicy.all()


class Node(CollectionCalls):
    """An open node; made by `open_node`, used on its event loop by any number of tasks.

    Every write returns when it is durable (see `durability`), or raises. `timeout=` is in seconds:
    past it, a write that may already be in the log raises `DeadlineExceeded` (a `TimeoutError`),
    and any other write raises `Overloaded`. Cancelling a call works alike: a write cancelled before
    the log has it never happened; after that the log decides its outcome without the caller. After
    the node closed, every call that needs its data raises `OnShutdown`.
    """

    def __init__(self, backend: Backend, supervisor: Supervisor, closing: AsyncExitStack) -> None:
        self._backend = backend
        self._supervisor = supervisor
        self._parts = closing
        self._writes = Writes(backend, self._info)
        self._closing: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._held = Holding(self._end_with_loop, in_child=lambda: None)

    def __repr__(self) -> str:
        state = "failed" if self._supervisor.failure else "open"
        if self._closing is not None and state == "open":
            state = "closed" if self._closing.done() else "closing"
        if self._loop.is_closed() and state in {"open", "closing"}:
            state = "closed with its event loop"
        return f"<Node {self.path or 'in memory'} {state}>"

    # --- properties: they answer at once, also after the node closed ------------------------------

    @property
    def path(self) -> str | None:
        """The node's directory; None for one in memory."""
        return self._backend.path

    @property
    def node_id(self) -> str:
        """The identity of the node's data, created when it was first opened."""
        return self._backend.node_id

    @property
    def durability(self) -> Durability:
        """How durable an acknowledged write is: `fsync`, or `os` if the node was opened so."""
        return self.config.log.durability

    @property
    def config(self) -> NodeConfig:
        """The settings the node runs with."""
        return self._backend.config

    @property
    def spool(self) -> SpoolStatistics | None:
        """What waits in the spool of `connect(spool=)`, also while the node is away; None without a
        spool.
        """
        return self._backend.spool

    def statistics(self) -> Awaitable[NodeStatistics]:
        """Return an awaitable of all counts and measurements of the node.

        It takes up to 1 ms, so call it once a second, not once an insert.
        """
        self._check_loop()
        return self._backend.statistics()

    @property
    def mq(self) -> MessageQueue:
        """The node's topics, for messages that consumer groups share; they close with the node.

        Raises `InvalidArgument` for a node in memory. When a connection is lost, the messages that
        its client holds are delivered again; over a connection `produce` takes up to 8 MiB.
        """
        self._check_open()
        if self._backend.mq is None:
            raise InvalidArgument("this node has no topics — open one with a directory")
        return self._backend.mq

    @property
    def channels(self) -> ChannelService:
        """The node's channel service, which allocates topics as channels for streams. Raises as
        `mq` does.
        """
        self._check_open()
        return self._backend.channels

    # --- rows -------------------------------------------------------------------------------------

    async def insert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """Add rows (dicts, a `RecordBatch` or a `Table`) and return when they are durable; a key
        may exist already.

        A nullable column is null where a dict lacks it.

        All rows of a call appear at one tick, unless they exceed one append group (4 MiB): then
        groups follow each other, and the result lists each. With `txn_id` they are one group, and
        appear at the commit of that transaction; rows over one group raise `TooLarge`.

        Raises `SchemaMismatch` (with column and row), `CollectionNotFound`, `PartitionNotFound`,
        `TooLarge`, `StorageFull`, `Indeterminate`. Rows that do not fit leave nothing in the log. A
        call over one append group that fails later leaves its earlier groups in the log, and raises
        `Indeterminate` for any failure.
        """
        write = self._writes.write("insert", collection, partition, txn_id=txn_id)
        return await append_rows(self._writes, write, rows, timeout=timeout)

    async def upsert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """Add rows that replace all earlier ones of the same keys, in one transaction; raises as
        `insert` does.

        Rows are replaced whole: a column that a dict lacks becomes null. If several rows have the
        same key, only the last is added. Over one append group, each group is a transaction of its
        own.
        """
        write = self._writes.write("upsert", collection, partition, txn_id=txn_id)
        return await append_rows(self._writes, write, rows, timeout=timeout)

    async def delete(
        self, collection: str, keys: Keys, *, txn_id: int = 0, timeout: float | None = None
    ) -> WriteResult:
        """Delete every row that has one of these keys, in all partitions; a key without rows is no
        error.

        Keys are values, an Arrow array, or Arrow data with one column named as the primary key.
        Raises as `insert` does.
        """
        write = self._writes.write("delete", collection, txn_id=txn_id)
        return await append_rows(self._writes, write, keys, timeout=timeout)

    # --- transactions -----------------------------------------------------------------------------

    def transaction(
        self, *, keepalive_s: float | None = None, timeout: float | None = None
    ) -> Transaction:
        """Return a transaction over any collections of one log:
        `async with node.transaction() as txn`.

        `keepalive_s` is how long it may be idle once it has outgrown memory; None means the node's
        default.

        `timeout` is in seconds, counted from this call, and bounds every wait of the transaction
        for the node; it does not interrupt the caller's own code in the block. Past it, leaving the
        block raises `DeadlineExceeded` when the commit may be in the log. Every other call that
        would wait raises `Overloaded`: nothing was written, and the transaction is rolled back.
        """
        self._check_open()
        deadline = None if timeout is None else Deadline(timeout)
        return Transaction(self._writes, keepalive_s=keepalive_s, deadline=deadline)

    async def begin_transaction(
        self, *, keepalive_s: float | None = None, timeout: float | None = None
    ) -> int:
        """Begin a transaction and return its id, for `insert`, `upsert` and `delete` with
        `txn_id=`; each such call is one append group.

        It ends with `commit_transaction` or `rollback_transaction`. The node rolls it back when it
        is idle for `keepalive_s`, older than `txn.age_s_max`, too large, or overtaken by a schema
        change of one of its collections.
        """
        keepalive_ms = check_keepalive_ms(keepalive_s, age_s_max=self.config.txn.age_s_max)
        return (await self._append(begin_group(keepalive_ms), "the begin", timeout)).txn_id

    async def commit_transaction(self, txn_id: int, *, timeout: float | None = None) -> WriteResult:
        """Make a transaction's rows appear at one tick. Raises `TransactionExpired` or
        `InvalidTransactionState`.
        """
        return await self._append(commit_group(check_txn_id(txn_id)), "the commit", timeout)

    async def rollback_transaction(self, txn_id: int, *, timeout: float | None = None) -> None:
        """Roll a transaction back. Raises `TransactionExpired` or `InvalidTransactionState`."""
        await self._append(
            rollback_group(check_txn_id(txn_id), "rolled back by its caller"),
            "the rollback",
            timeout,
        )

    async def transactions(self) -> tuple[TransactionInfo, ...]:
        """Return the open transactions of all clients, oldest first: those that sent rows before
        their commit.
        """
        return await self._run(self._backend.open_transactions, "the transactions", changes=False)

    async def abort_transaction(self, txn_id: int) -> None:
        """Roll a transaction of any client back; its next call raises `TransactionExpired`.

        Raises `TransactionExpired` or `InvalidTransactionState` when it is not open.
        """
        check_txn_id(txn_id)
        await self._run(partial(self._backend.abort_transaction, txn_id), "the rollback")

    # --- producers --------------------------------------------------------------------------------

    async def producer(self, name: str, *, timeout: float | None = None) -> Producer:
        """Open a named producer, or create it: its writes can be repeated exactly, also after a
        crash.

        An earlier opening of the name is fenced, durably, when this returns. Raises
        `InvalidArgument`, and `Overloaded` at `producers_max`.
        """
        check_name("producer", name)
        opened, _ = await self._run(
            partial(self._backend.open_producer, name), f"opening producer {name!r}", timeout
        )
        return Producer(name, opened, self._backend, self._writes)

    async def delete_producer(self, name: str, *, timeout: float | None = None) -> bool:
        """Delete a producer with its sequences, and fence it; return whether it existed."""
        forget = partial(self._backend.delete_producer, check_text("producer", name))
        return await self._run(forget, "forgetting the producer", timeout)

    # --- reading ----------------------------------------------------------------------------------

    def read(
        self,
        collection: str | Sequence[str],
        policy: DeliverPolicy = ALL,
        *,
        until: int | datetime | None = None,
        name: str | None = None,
        types: Iterable[MessageType] | None = None,
        include_ticks: bool = False,
    ) -> CollectionReader:
        """Return a reader: `async with node.read(["orders", "stock"], DeliverPolicy.latest()) as
        messages`.

        It delivers every message of one or several collections from the start that `policy` gives,
        in strictly ascending order of ticks. It ends after everything at or below the tick `until`,
        or with the message that its last collection was dropped.

        A reader with a `name` keeps its place with `ack` over restarts, holds the log from there
        on, and uses `policy` only the first time. It is opened with the same collections each time,
        without those that were dropped. `types` selects the messages and bodies to deliver;
        `include_ticks` adds a message for each tick that passes without one.

        Opening the block raises `InvalidArgument` for a tick in the future, `Truncated` when the
        policy starts below the kept log, `ReaderBusy` while the name is in use, `InvalidArgument`
        when the name has other collections, and `CollectionNotFound` when a collection was dropped
        meanwhile.
        """
        infos = self._infos(collection)
        end = None if until is None else tick_given("until", until)
        if name is not None:
            check_name("reader", name)
        request = ReadRequest(infos, _checked(policy), end, name, check_types(types))
        explain = self._supervisor.explain
        return CollectionReader(
            self._backend, request, include_ticks=include_ticks, explain=explain
        )

    async def snapshot(
        self,
        collection: str,
        *,
        as_of: int | datetime | None = None,
        columns: Sequence[str] | None = None,
        keys: Keys | None = None,
        timeout: float | None = None,
    ) -> pa.Table:
        """Return the collection's rows as of a tick; None means everything acknowledged so far.

        `columns` selects columns, in that order; `keys` selects rows, by the same values as
        `delete`. Other columns, and files whose key ranges exclude all `keys`, are not read. Raises
        `SchemaMismatch` for unknown columns and for keys that do not fit.

        Rows that the collection's table has taken are read from it, without Spark. `as_of` may be a
        `datetime` with a zone. Raises `InvalidArgument` for a tick in the future. Raises
        `Truncated` for a tick before the collection was created, with the tick of its creation
        (rows of an earlier collection of that name are gone), and for a state that neither the
        table nor the node keeps any more, with the nearest ticks.

        An hour (`taken_cuts_s`) after every table has taken a cut, its rows may exist only in
        tables. Then it raises `StorageFailed` when the table has moved, and `PackageMissing`
        without `deltalake`.
        """
        self._info(collection)
        tick = None if as_of is None else tick_given("as_of", as_of)
        is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
        if columns is not None and not (is_list and all(isinstance(name, str) for name in columns)):
            raise InvalidArgument(f"columns={shown(columns)} — pass a list of names")
        encoded = None
        if keys is not None:
            delete = self._writes.write("delete", collection)  # a delete takes the same keys
            encoded = delete.into[0].encode_whole(await delete.check(keys))
        names = None if columns is None else tuple(columns)
        take = partial(self._backend.snapshot, collection, tick, names, encoded)
        return await self._run(take, "the snapshot", timeout, changes=False)

    async def consistent_tick(
        self, collections: Sequence[str] | None = None, *, timeout: float | None = None
    ) -> int:
        """Return a tick at or above everything acknowledged before the call; readers reach it
        without new writes.

        With `collections`, it is the tick of their last change, or the tick at which the log was
        last opened if that is later. Raises `CollectionNotFound`.
        """
        if isinstance(collections, str) or not isinstance(collections, Sequence | None):
            raise InvalidArgument(f"collections={shown(collections)} — pass a list of names")
        names = tuple(self._info(name).name for name in collections or ())
        return await self._run(
            partial(self._backend.consistent_tick, names), "the tick", timeout, changes=False
        )

    async def delete_reader(self, collection: str, name: str) -> bool:
        """Delete a named reader and release the log it holds; return whether it existed. Raises
        `ReaderBusy` while it is open.

        A named reader holds the log until it is deleted or its collections are dropped, even if it
        is never opened again. A reader of several collections is found by any of them.
        """
        self._info(collection)
        forget = partial(self._backend.delete_reader, collection, check_text("reader", name))
        return await self._run(forget, "forgetting the reader")

    async def readers(self) -> tuple[ReaderInfo, ...]:
        """Return the named readers of all collections, by collection and name, with their places
        and the log they hold.
        """
        return await self._run(self._backend.named_readers, "the readers", changes=False)

    async def seek_reader(
        self, collection: str, name: str, policy: DeliverPolicy, *, dry_run: bool = False
    ) -> ReaderInfo:
        """Move a named reader to the start of `policy`, and return its new place; with `dry_run`,
        only return the place.

        Durable when this returns. A move back delivers messages again; a move ahead skips them.
        Raises `ReaderBusy` while the reader is open, `Truncated` for a place below the kept log,
        and `ReaderNotFound` when the reader does not exist.
        """
        self._info(collection)
        place = _checked(policy).plain
        seek = partial(
            self._backend.seek_reader,
            collection,
            check_text("reader", name),
            *place,
            dry_run=dry_run,
        )
        return await self._run(seek, "moving the reader", changes=not dry_run)

    # --- the data on disk, and closing ------------------------------------------------------------

    async def flush(self, *, timeout: float | None = None) -> FlushResult:
        """Make a cut and return it once its files are durable: everything acknowledged before the
        call is in files.

        Without new rows it returns the newest cut. Open transactions stay open. Raises
        `StorageFull` when the disk has no room for its files, `Overloaded` when no file descriptor
        is left, `StorageFailed` when repeated attempts fail, and `LogReopening` when a failed log
        is not back in time; the cut is then made as soon as possible.
        """
        return await self._run(self._backend.flush, "the flush", timeout)

    async def backup(self, path: str | os.PathLike[str]) -> BackupRecord:
        """Copy the node into a new directory while it runs, verify the copy, and return its record.

        It begins with a cut, so the copy has everything acknowledged before the call.
        `streamingnode restore` makes a node of it. Raises `AlreadyExists` for a directory in use,
        `Corrupt` when the copy is damaged, `StorageFailed`, and `InvalidArgument` for a node in
        memory. After an error or a cancellation nothing is left at `path`.
        """
        return await self._run(
            partial(self._backend.back_up, check_path("directory", path).absolute()), "the backup"
        )

    async def verify(self) -> Report:
        """Read everything the node has on disk and report what differs from what was written;
        changes nothing.

        Raises `LogReopening` while the log comes back after a failed write.
        """
        return await self._run(self._backend.verify, "the verification")

    def begin_closing(self) -> "asyncio.Task[None]":
        """Refuse new calls and start closing; return the task that closes, the same one each
        time.
        """
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        return self._closing

    async def wait_closed(self) -> None:
        """Return when the node has closed, by `aclose` or because its background work failed."""
        await self._closed.wait()

    async def aclose(self) -> None:
        """Refuse new calls, let calls under way finish, close everything, and release the
        directory. Idempotent.

        Any task may call it, on the node's event loop; once that loop has ended, on any other. A
        cancelled call first waits until the node is closed. If failed background work ended the
        node, raises its error. In a forked child, whose copy of the node holds nothing, it does
        nothing.
        """
        if self._held.is_copy:
            return
        if self._loop.is_closed():
            await in_thread(let_go_of_ended)
            return
        self._check_loop()
        await outlast(self.begin_closing())
        if self._supervisor.failure is not None:
            raise self._supervisor.failure

    async def _close(self) -> None:
        try:
            async with self._parts:
                await self._backend.drain()
        finally:
            self._held.end()
            self._closed.set()

    def _end_with_loop(self) -> None:
        with suppress(RuntimeError):  # raised by waiters that ended with the loop
            self._closed.set()

    async def _run(
        self,
        call: Callable[[], Awaitable[T]],
        what: str,
        timeout: float | None = None,
        *,
        changes: bool = True,
    ) -> T:
        """Return the result of a call on the open node, within `timeout`. If the node fails
        meanwhile, the error names what failed.
        """
        self._check_open()
        try:
            return await within(timeout, call, what, changes=changes)
        except OnShutdown as refusal:
            self._supervisor.explain(refusal)
            raise

    async def _append(self, group: AppendGroup, what: str, timeout: float | None) -> AppendResult:
        self._check_open()
        append = partial(self._backend.append, group)
        return await within(timeout, append, what, begun=lambda: group.begun)

    def _info(self, collection: str) -> CollectionInfo:
        self._check_open()
        if not isinstance(collection, str):  # checked here to save a call for each write
            check_text("collection", collection)
        catalog = self._backend.catalog
        try:
            return catalog.collection_by_name(collection)
        except CollectionNotFound as error:
            # here, not in the catalog: that of a client has just the names it has a right to
            meant = nearest(collection, [each.name for each in catalog.collections()], likeness=0.7)
            if meant is None:
                raise
            step = f"did you mean {meant!r}? `streamingnode collection ls` lists all"
            raise CollectionNotFound(f"{error.happened} — {step}") from None

    def _infos(self, collections: str | Sequence[str]) -> tuple[CollectionInfo, ...]:
        if isinstance(collections, str):
            return (self._info(collections),)
        if (
            not isinstance(collections, Sequence)
            or not 1 <= len(collections) <= READ_COLLECTIONS_MAX
        ):
            raise InvalidArgument(
                f"collection={shown(collections)} — pass a name, or a list of 1 to "
                f"{READ_COLLECTIONS_MAX} names"
            )
        infos = tuple(map(self._info, collections))
        if len({info.id for info in infos}) < len(infos):
            raise InvalidArgument(
                f"collection={shown(collections)} names one twice — name each once"
            )
        return infos

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._supervisor.refusal()
        self._check_loop()

    def _check_loop(self) -> None:
        """Raise unless this is the node's event loop: another thread could see an append half
        done.
        """
        if self._held.is_copy:
            raise StorageFailed(
                "the node was opened before this process was forked — open it in one process only, "
                "and start others with "
                "the spawn method; connect() after the fork reaches it"
            )
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if self._loop.is_closed():
            raise OnShutdown("the event loop of the node has ended — open the node again")
        if not here:
            raise InvalidArgument(
                "the node is used on another event loop than its own — call it on the loop that "
                "opened it; "
                "from a thread use sn.sync"
            )


def _checked(policy: DeliverPolicy) -> DeliverPolicy:
    if not isinstance(policy, DeliverPolicy):
        raise InvalidArgument(
            f"{shown(policy)} is no deliver policy — use one that DeliverPolicy makes"
        )
    return policy
