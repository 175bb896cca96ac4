"""The embedded node: everything a program does with collections, rows, transactions, readers and cuts.

In: calls of many tasks on one event loop. Out: append groups to the log, readers over it. Every write returns when it is
durable (as the node's `durability` says) or raises; nothing is half done. Small concurrent inserts go together, in
`coalescer`, the rest by itself, in `direct_write`. The parts behind this come as `NodeServices`.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial, wraps
from typing import Any, TypeVar, cast

import anyio
import pyarrow as pa
from anyio import to_thread

from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from streamingnode import ddl
from streamingnode.backup.making import BackupResult
from streamingnode.catalog_changes import CatalogChanges
from streamingnode.collection import Collection, collection_of
from streamingnode.config import NodeConfig
from streamingnode.names import check_name, check_path, not_text
from streamingnode.node_facts import NodeFacts
from streamingnode.reading.collection_reader import CollectionReader, ReadOptions
from streamingnode.reading.read_arguments import check_passed, check_tick, check_types
from streamingnode.rows.row_shape import Keys, Rows
from streamingnode.services import FlushResult, NodeServices
from streamingnode.supervisor import Supervisor
from streamingnode.verification.finding import Report
from streamingnode.writing.coalescer import Coalescer
from streamingnode.writing.deadline import read_within, within
from streamingnode.writing.direct_write import delete_keys, insert_batches, insert_rows, upsert_rows
from streamingnode.writing.producer import Producer
from streamingnode.writing.results import WriteResult, result_of
from streamingnode.writing.transaction import Transaction
from streamingnode.writing.txn_arguments import check_keepalive_ms, check_txn_id
from streamingnode.writing.txn_messages import begin_group, commit_group, rollback_group
from streamingnode.writing.write_target import WriteTarget, WriteTargets, pchannel_of
from wal.adaptor import GRACE_S
from wal.append import Append, AppendGroup, AppendResult
from wal.errors import InvalidArgument, shown
from wal.message_type import MessageType
from wal.outlast import outlast

Call = TypeVar("Call", bound=Callable[..., Coroutine[Any, Any, object]])

ALL = DeliverPolicy.all()


def _naming_failure(call: Call) -> Call:
    """Have a call that waits while its node fails say what failed; the appends of rows do so by themselves."""

    @wraps(call)
    async def named(node: "Node", *arguments: Any, **options: Any) -> Any:
        with node._supervisor.naming_failure:  # noqa: SLF001 - for the class below
            return await call(node, *arguments, **options)

    return cast("Call", named)


class Node(NodeFacts):
    """An open node; made by `open_node`, used on its event loop by any number of tasks.

    `timeout=` is in seconds: past it, a write that may already be in the log raises `DeadlineExceeded` (a `TimeoutError`),
    one that is not raises `Overloaded`. Cancelling a call follows the same line: before the log has the write it never
    happened, after that its outcome is decided without the caller. After the node closed, every call that needs its data
    raises `OnShutdown`.
    """

    def __init__(
        self, services: NodeServices, config: NodeConfig, supervisor: Supervisor, parts: AsyncExitStack
    ) -> None:
        self._services = services
        self._config = config
        self._supervisor = supervisor
        self._parts = parts
        """What closing leaves, in reverse order."""
        naming = {name: _append_naming_failure(supervisor, append) for name, append in services.appends.items()}
        self._consistent_tick = partial(services.consistent_tick, list(services.appends))
        self._targets = WriteTargets(naming, self._consistent_tick)
        self._group_bytes_max = config.wal.group_bytes_max
        self._coalescer = Coalescer(
            supervisor.spawn,
            self._insert_alone,
            group_bytes_max=self._group_bytes_max,
            memory=services.pending.rows,
            limits=config.coalescer,
        )
        self._coalesced_rows_max = config.coalescer.insert_rows_max
        self._changes = CatalogChanges(services, self._info, self._append)
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        state = "failed" if self._supervisor.failure else "open"
        if self._closing is not None and state == "open":
            state = "closed" if self._closing.done() else "closing"
        return f"<Node {self.path or 'in memory'} {state}>"

    # --- rows -----------------------------------------------------------------------------------------------------------

    async def insert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """Add rows (dicts, a `RecordBatch` or a `Table`) and return when they are durable; a key may exist already.

        All rows of a call appear at one tick, unless they exceed one append group (4 MiB): then groups follow each other,
        and the result has each. With `txn_id` they are bodies of an open transaction and appear at its commit.

        Raises `SchemaMismatch` (column and row named), `CollectionNotFound`, `PartitionNotFound`, `TooLarge`, `StorageFull`,
        `Indeterminate`. Rows that do not fit leave nothing in the log; a call over one append group that fails later leaves
        the groups before.
        """
        check_txn_id(txn_id)
        target = self._target(collection)
        partition_id = target.partition_id(partition)
        if isinstance(rows, (list, tuple)) and 0 < len(rows) <= self._coalesced_rows_max and not txn_id:
            return await self._coalescer.insert(target, partition_id, rows, timeout=timeout)
        bytes_max = self._group_bytes_max
        return await insert_rows(target, partition_id, rows, bytes_max=bytes_max, txn_id=txn_id, timeout=timeout)

    async def upsert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """Add rows that replace all earlier ones of the same keys, in one transaction; raises as `insert` does.

        Of several rows with one key, only the last is added. Over one append group, each group is a transaction of its own.
        """
        check_txn_id(txn_id)
        target = self._target(collection)
        partition_id = target.partition_id(partition)
        bytes_max = self._group_bytes_max
        return await upsert_rows(target, partition_id, rows, bytes_max=bytes_max, txn_id=txn_id, timeout=timeout)

    async def delete(
        self, collection: str, keys: Keys, *, txn_id: int = 0, timeout: float | None = None
    ) -> WriteResult:
        """Delete every row that has one of these keys, in all partitions; a key without rows is no error.

        Keys are values, an Arrow array, or Arrow data with one column named as the primary key. Raises as `insert` does.
        """
        check_txn_id(txn_id)
        target = self._target(collection)
        return await delete_keys(target, keys, bytes_max=self._group_bytes_max, txn_id=txn_id, timeout=timeout)

    # --- transactions ---------------------------------------------------------------------------------------------------

    def transaction(self, *, keepalive_s: float | None = None) -> Transaction:
        """Return a transaction over any collections of one log: `async with node.transaction() as txn`.

        `keepalive_s` is how long it may be idle once it has outgrown memory; the node's default for None.
        """
        self._check_open()
        keepalive_ms = self._keepalive_ms(keepalive_s)
        limits = self._config.wal
        return Transaction(
            self._target,
            self._consistent_tick,
            group_bytes_max=limits.group_bytes_max,
            group_messages_max=limits.group_messages_max,
            keepalive_ms=keepalive_ms,
            memory=self._services.pending.transactions,
        )

    @_naming_failure
    async def begin_transaction(
        self, *, keepalive_s: float | None = None, pchannel: str | None = None, timeout: float | None = None
    ) -> int:
        """Begin a transaction and return its id, for `insert`, `upsert` and `delete` with `txn_id=`.

        It ends with `commit_transaction` or `rollback_transaction`, or by itself: idle for `keepalive_s`, older than
        `txn.age_s_max`, too large, or overtaken by a schema change of one of its collections.
        """
        begin = begin_group(self._keepalive_ms(keepalive_s))
        return (await self._append(self._pchannel(pchannel), begin, "the begin", timeout)).txn_id

    @_naming_failure
    async def commit_transaction(
        self, txn_id: int, *, pchannel: str | None = None, timeout: float | None = None
    ) -> WriteResult:
        """Make a transaction's rows appear at one tick. Raises `TransactionExpired` or `InvalidTransactionState`."""
        commit = commit_group(check_txn_id(txn_id))
        return result_of(await self._append(self._pchannel(pchannel), commit, "the commit", timeout))

    @_naming_failure
    async def rollback_transaction(
        self, txn_id: int, *, pchannel: str | None = None, timeout: float | None = None
    ) -> None:
        """Give a transaction up. Raises `TransactionExpired` or `InvalidTransactionState`."""
        rollback = rollback_group(check_txn_id(txn_id), reason="rolled back by its caller")
        await self._append(self._pchannel(pchannel), rollback, "the rollback", timeout)

    # --- producers ------------------------------------------------------------------------------------------------------

    @_naming_failure
    async def producer(self, name: str, *, timeout: float | None = None) -> Producer:
        """Open a named producer, made if it is new: its writes can be repeated exactly, after a crash too.

        Whoever had it open is fenced, durably, when this returns. Raises `InvalidArgument`, `Overloaded` at `producers_max`.
        """
        self._check_open()
        check_name("producer", name)
        producers = self._services.producers
        opened = await within(timeout, lambda: producers.open_producer(name), f"opening producer {name!r}")
        return Producer(
            name,
            opened,
            directory=producers,
            find_target=self._target,
            consistent_tick=self._consistent_tick,
            outstanding_max=self._config.producers.results_per_producer_max,
            limits=self._config.wal,
            txn_age_s_max=self._config.txn.age_s_max,
            memory=self._services.pending.transactions,
        )

    @_naming_failure
    async def delete_producer(self, name: str, *, timeout: float | None = None) -> bool:
        """Forget a producer and its sequences, and fence it; return whether there was one."""
        self._check_open()
        return await within(timeout, lambda: self._services.producers.delete_producer(name), "forgetting the producer")

    # --- reading --------------------------------------------------------------------------------------------------------

    def read(
        self,
        collection: str,
        policy: DeliverPolicy = ALL,
        *,
        until: int | datetime | None = None,
        name: str | None = None,
        types: Iterable[MessageType] | None = None,
        include_ticks: bool = False,
    ) -> CollectionReader:
        """Return a reader: `async with node.read("orders", DeliverPolicy.latest()) as messages`.

        It delivers every message of the collection after where `policy` starts, ticks strictly ascending, and ends after
        everything at or below the tick `until`, or with the message that the collection was dropped. A reader with a `name`
        keeps its place with `ack` over restarts, holds retention, and takes `policy` only the first time. `types` leaves out
        other messages and bodies; `include_ticks` adds a message for each tick that passes without one. Raises
        `InvalidArgument` for a tick that is yet to come; opening the block raises `Truncated` when the policy starts below
        what is kept, `ReaderBusy` while the name is in use, and `CollectionNotFound` when the collection was dropped
        meanwhile.
        """
        info = self._info(collection)
        chosen, last = check_types(types), check_tick("until", until)
        options = ReadOptions(policy=policy, until=last, name=name, types=chosen, include_ticks=include_ticks)
        check_passed(options.policy, options.until, self._services.newest_tick())
        return CollectionReader(self._services, info, options, naming_failure=self._supervisor.naming_failure)

    @_naming_failure
    async def snapshot(
        self, collection: str, *, as_of: int | datetime | None = None, timeout: float | None = None
    ) -> pa.Table:
        """Return the collection's rows as of a tick, everything acknowledged so far for None.

        Rows that the collection's table has taken are read from it, without Spark; `as_of` may be a `datetime` with a zone.
        Raises `InvalidArgument` for a tick that is yet to come, and `Truncated`, naming the nearest ticks, for a state that
        neither the table nor the node keeps any more. Once every table has taken a cut, and `retention_s` has passed, its
        rows are in tables only: `StorageFailed` when the table is not where it was, `PackageMissing` without `deltalake`.
        """
        info, tick = self._info(collection), check_tick("as_of", as_of)
        return await read_within(timeout, lambda: self._services.snapshot(info, tick), "the snapshot")

    @_naming_failure
    async def consistent_tick(self, collections: Sequence[str] | None = None, *, timeout: float | None = None) -> int:
        """Return a tick that everything acknowledged before the call is at or below; readers reach it without new writes."""
        self._check_open()
        if isinstance(collections, str) or not isinstance(collections, Sequence | None):
            raise InvalidArgument(f"collections={shown(collections)} — pass a list of names")
        pchannels = list(self._services.appends)
        if collections is not None:
            pchannels = sorted({pchannel_of(self._info(name).vchannels[0]) for name in collections})
        return await read_within(timeout, lambda: self._services.consistent_tick(pchannels), "the tick")

    @_naming_failure
    async def delete_reader(self, collection: str, name: str) -> bool:
        """Forget a named reader and let go of what it holds; return whether there was one. Raises `ReaderBusy` while open.

        A named reader that nobody opens again holds the log for ever, unless its collection is dropped.
        """
        return await self._services.named_readers.delete_reader(self._info(collection).id, name)

    # --- collections ----------------------------------------------------------------------------------------------------

    @_naming_failure
    async def create_collection(
        self,
        name: str,
        schema: pa.Schema,
        *,
        primary_key: str,
        shards: int = 1,
        partitions: Sequence[str] = (),
        if_not_exists: bool = False,
        timeout: float | None = None,
    ) -> Collection:
        """Make a collection and return it, when that is durable.

        Raises `AlreadyExists` for a name in use, unless `if_not_exists` and schema, primary key and shards are the same;
        `SchemaMismatch` for a type that is not supported, and `InvalidArgument`.
        """
        self._check_open()
        check = partial(ddl.check_definition, primary_key=primary_key, shards=shards, partitions=partitions)
        definition = await to_thread.run_sync(check, name, schema)  # looking a time zone up reads files
        return collection_of(
            await self._changes.create_collection(definition, if_not_exists=if_not_exists, timeout=timeout)
        )

    @_naming_failure
    async def drop_collection(self, name: str, *, if_exists: bool = False, timeout: float | None = None) -> None:
        """Drop a collection with all its rows; ends open transactions on it. Raises `CollectionNotFound`."""
        self._check_open()
        await self._changes.drop_collection(name, if_exists=if_exists, timeout=timeout)

    @_naming_failure
    async def create_partition(
        self, collection: str, partition: str, *, if_not_exists: bool = False, timeout: float | None = None
    ) -> None:
        """Make a partition. Raises `AlreadyExists` unless `if_not_exists`, `CollectionNotFound`, `InvalidArgument`."""
        info = self._info(collection)
        await self._changes.create_partition(info, partition, if_not_exists=if_not_exists, timeout=timeout)

    @_naming_failure
    async def drop_partition(
        self, collection: str, partition: str, *, if_exists: bool = False, timeout: float | None = None
    ) -> None:
        """Drop a partition with its rows. Raises `PartitionNotFound`; the default partition cannot be dropped."""
        info = self._info(collection)
        await self._changes.drop_partition(info, partition, if_exists=if_exists, timeout=timeout)

    def collections(self) -> tuple[Collection, ...]:
        """Return the collections that exist now, oldest first."""
        self._check_open()
        return tuple(collection_of(info) for info in self._services.catalog.collections())

    def collection(self, name: str) -> Collection:
        """Return one collection. Raises `CollectionNotFound`."""
        return collection_of(self._info(name))

    # --- cuts and the end -----------------------------------------------------------------------------------------------

    @_naming_failure
    async def flush(self, *, timeout: float | None = None) -> FlushResult:
        """Make a cut and return it once its files are durable: everything acknowledged before the call is in files.

        Without new rows the newest cut is returned. It ends no transaction. Raises `StorageFull` when the disk has no room
        for its files, `Overloaded` when no file descriptor is left, and `StorageFailed` when one try after the other fails,
        `LogReopening` when a failed log is not back in time; the cut is then made as soon as it can be.
        """
        self._check_open()
        return await within(timeout, self._services.flush, "the flush")

    # --- what is on the disk ----------------------------------------------------------------------------------------------

    @_naming_failure
    async def backup(self, path: str | os.PathLike[str]) -> BackupResult:
        """Copy the node into a new directory while it runs, verify the copy, and return what is in it.

        It begins with a cut; everything acknowledged before the call is in it. `streamingnode restore` makes a node of it.
        Raises `AlreadyExists` for a directory in use, `Corrupt` when the copy is not sound, `StorageFailed`, and
        `InvalidArgument` for a node in memory; nothing is left at `path` then, nor when it is cancelled.
        """
        self._check_open()
        return await self._services.upkeep.back_up(check_path("directory", path))

    @_naming_failure
    async def verify(self) -> Report:
        """Read everything the node has on its disk and return what is not as it was written; changes nothing.

        Raises `LogReopening` while the log comes back after a failed write.
        """
        self._check_open()
        return await self._services.upkeep.verify()

    def begin_closing(self) -> "asyncio.Task[None]":
        """Refuse calls from now on, and close in a task of its own, which is returned; the same one each time."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        return self._closing

    async def aclose(self) -> None:
        """Refuse new calls, let those that were begun finish, close everything, and let go of the directory. Idempotent.

        Any task may call it. A cancelled call raises that when the node is closed. Raises what failed when it was background
        work that ended the node.
        """
        self._check_loop()
        await outlast(self.begin_closing())
        if self._supervisor.failure is not None:
            raise self._supervisor.failure

    # --- the rest -------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        """Return when every insert that was begun has ended, and then all parts are closed.

        After `GRACE_S` only those are waited for that the disk has; the others, which wait for a segment, get `OnShutdown`.
        """
        async with self._parts:
            self._services.stop_waiting()
            with anyio.move_on_after(GRACE_S) as grace:
                await self._coalescer.drain()
            if grace.cancelled_caught:
                await self._services.stop_appends()
                await self._coalescer.drain()

    async def _append(self, pchannel: str, group: AppendGroup, what: str, timeout: float | None) -> AppendResult:
        self._check_open()
        append = self._services.appends[pchannel]

        def call() -> Awaitable[AppendResult]:
            return append(group)

        return await within(timeout, call, what, begun=lambda: group.begun)

    async def _insert_alone(
        self, target: WriteTarget, partition_id: int, batches: Sequence[pa.RecordBatch]
    ) -> WriteResult:
        return await insert_batches(target, partition_id, batches, bytes_max=self._group_bytes_max)

    def _target(self, collection: str) -> WriteTarget:
        return self._targets.target(self._info(collection))

    def _info(self, collection: str) -> CollectionInfo:
        self._check_open()
        if not isinstance(collection, str):
            raise not_text("collection", collection)
        return self._services.catalog.collection_by_name(collection)

    def _pchannel(self, pchannel: str | None) -> str:
        """Return the log a transaction by id lives on, the first one for None."""
        appends = self._services.appends
        if pchannel is not None and pchannel not in list(appends):
            raise InvalidArgument(f"there is no log {pchannel!r} — one of {', '.join(appends)}")
        return pchannel or next(iter(appends))

    def _keepalive_ms(self, keepalive_s: float | None) -> int:
        return check_keepalive_ms(keepalive_s, age_s_max=self._config.txn.age_s_max)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._supervisor.refusal()
        self._check_loop()


def _append_naming_failure(supervisor: Supervisor, append: Append) -> Append:
    async def append_naming_failure(group: AppendGroup) -> AppendResult:
        with supervisor.naming_failure:
            return await append(group)

    return append_naming_failure
