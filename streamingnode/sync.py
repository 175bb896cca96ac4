"""The node without `async`, for notebooks and scripts: the same names, the same arguments, calls that block.

In: calls of any thread. Out: the same calls on an event loop in a thread of its own, which lives as long as the node is
open. Iterating fetches messages many at a time, because each hop between threads costs 50 us.

    with sn.sync.open_node("data") as node:
        node.insert("orders", [{"id": 1, "item": "tea"}])

In a notebook, `node = sn.sync.open_node("data")` in one cell and `node.close()` in another do the same.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Self

import pyarrow as pa

from scanner.deliver_policy import DeliverPolicy
from streamingnode import opening as asynchronous
from streamingnode.backup.making import BackupResult
from streamingnode.blocking_loop import BlockingLoop
from streamingnode.blocking_writers import SyncProducer, SyncTransaction
from streamingnode.collection import Collection
from streamingnode.config import NodeConfig
from streamingnode.flush import FlushResult
from streamingnode.node import ALL, Node
from streamingnode.reading.collection_reader import CollectionReader
from streamingnode.reading.read_message import ReadMessage
from streamingnode.rows.row_shape import Keys, Rows
from streamingnode.statistics import NodeStatistics
from streamingnode.verification.finding import Report
from streamingnode.verification.scrubber import ScrubStatus
from streamingnode.writing.results import Durability, WriteResult
from streamingnode.writing.transaction import Transaction
from wal.append import AppendObserver
from wal.errors import InvalidArgument
from wal.message_type import MessageType


def open_node(
    path: str | os.PathLike[str] | None,
    *,
    config: NodeConfig | None = None,
    config_file: str | os.PathLike[str] | None = None,
    observer: AppendObserver | None = None,
    **settings: object,
) -> "SyncNode":
    """Open a node, for a `with` block or until `close`; see `streamingnode.open_node`.

    An `observer` is called in the thread of the node's event loop.
    """
    opening = asynchronous.open_node(path, config=config, config_file=config_file, observer=observer, **settings)
    return open_blocking(opening)


def open_blocking(opening: AbstractAsyncContextManager[Node, bool | None]) -> "SyncNode":
    """Open an asynchronous node on an event loop in another thread."""
    loop = BlockingLoop()
    return SyncNode(loop.enter(opening), loop)


class SyncNode:
    """An open node; see `streamingnode.node.Node`. Any thread may call it."""

    def __init__(self, node: Node, loop: BlockingLoop) -> None:
        self._node = node
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._node).replace("Node", "SyncNode", 1)

    def close(self) -> None:
        """Close the node, as the end of a `with` block does; idempotent. At the end of the program it happens by itself."""
        self._loop.close()

    def __enter__(self) -> Self:
        self._loop.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.exit(kind, error, traceback)

    @property
    def path(self) -> str | None:
        """See `Node.path`."""
        return self._node.path

    @property
    def node_id(self) -> str:
        """See `Node.node_id`."""
        return self._node.node_id

    @property
    def durability(self) -> Durability:
        """See `Node.durability`."""
        return self._node.durability

    @property
    def config(self) -> NodeConfig:
        """See `Node.config`."""
        return self._node.config

    def statistics(self) -> NodeStatistics:
        """See `Node.statistics`."""
        return self._loop.call(self._node.statistics)

    def insert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """See `Node.insert`."""
        insert = partial(self._node.insert, partition=partition, txn_id=txn_id, timeout=timeout)
        return self._loop.call(insert, collection, rows)

    def upsert(
        self,
        collection: str,
        rows: Rows,
        *,
        partition: str | None = None,
        txn_id: int = 0,
        timeout: float | None = None,
    ) -> WriteResult:
        """See `Node.upsert`."""
        upsert = partial(self._node.upsert, partition=partition, txn_id=txn_id, timeout=timeout)
        return self._loop.call(upsert, collection, rows)

    def delete(self, collection: str, keys: Keys, *, txn_id: int = 0, timeout: float | None = None) -> WriteResult:
        """See `Node.delete`."""
        return self._loop.call(partial(self._node.delete, txn_id=txn_id, timeout=timeout), collection, keys)

    def transaction(self, *, keepalive_s: float | None = None) -> SyncTransaction:
        """See `Node.transaction`; use it with `with`."""

        async def make() -> Transaction:
            return self._node.transaction(keepalive_s=keepalive_s)

        return SyncTransaction(self._loop.call(make), self._loop)

    def begin_transaction(
        self, *, keepalive_s: float | None = None, pchannel: str | None = None, timeout: float | None = None
    ) -> int:
        """See `Node.begin_transaction`."""
        begin = self._node.begin_transaction
        return self._loop.call(partial(begin, keepalive_s=keepalive_s, pchannel=pchannel, timeout=timeout))

    def commit_transaction(
        self, txn_id: int, *, pchannel: str | None = None, timeout: float | None = None
    ) -> WriteResult:
        """See `Node.commit_transaction`."""
        return self._loop.call(partial(self._node.commit_transaction, pchannel=pchannel, timeout=timeout), txn_id)

    def rollback_transaction(self, txn_id: int, *, pchannel: str | None = None, timeout: float | None = None) -> None:
        """See `Node.rollback_transaction`."""
        self._loop.call(partial(self._node.rollback_transaction, pchannel=pchannel, timeout=timeout), txn_id)

    def producer(self, name: str, *, timeout: float | None = None) -> SyncProducer:
        """See `Node.producer`."""
        return SyncProducer(self._loop.call(partial(self._node.producer, timeout=timeout), name), self._loop)

    def delete_producer(self, name: str, *, timeout: float | None = None) -> bool:
        """See `Node.delete_producer`."""
        return self._loop.call(partial(self._node.delete_producer, timeout=timeout), name)

    def read(
        self,
        collection: str,
        policy: DeliverPolicy = ALL,
        *,
        until: int | datetime | None = None,
        name: str | None = None,
        types: Iterable[MessageType] | None = None,
        include_ticks: bool = False,
    ) -> "SyncReader":
        """See `Node.read`; use it with `with`, and iterate."""

        async def make() -> CollectionReader:
            return self._node.read(collection, policy, until=until, name=name, types=types, include_ticks=include_ticks)

        return SyncReader(self._loop.call(make), self._loop)

    def snapshot(
        self, collection: str, *, as_of: int | datetime | None = None, timeout: float | None = None
    ) -> pa.Table:
        """See `Node.snapshot`."""
        return self._loop.call(partial(self._node.snapshot, as_of=as_of, timeout=timeout), collection)

    def consistent_tick(self, collections: Sequence[str] | None = None, *, timeout: float | None = None) -> int:
        """See `Node.consistent_tick`."""
        return self._loop.call(partial(self._node.consistent_tick, timeout=timeout), collections)

    def delete_reader(self, collection: str, name: str) -> bool:
        """See `Node.delete_reader`."""
        return self._loop.call(self._node.delete_reader, collection, name)

    def create_collection(
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
        """See `Node.create_collection`."""
        create = partial(
            self._node.create_collection,
            primary_key=primary_key,
            shards=shards,
            partitions=partitions,
            if_not_exists=if_not_exists,
            timeout=timeout,
        )
        return self._loop.call(create, name, schema)

    def drop_collection(self, name: str, *, if_exists: bool = False, timeout: float | None = None) -> None:
        """See `Node.drop_collection`."""
        self._loop.call(partial(self._node.drop_collection, if_exists=if_exists, timeout=timeout), name)

    def create_partition(
        self, collection: str, partition: str, *, if_not_exists: bool = False, timeout: float | None = None
    ) -> None:
        """See `Node.create_partition`."""
        create = partial(self._node.create_partition, if_not_exists=if_not_exists, timeout=timeout)
        self._loop.call(create, collection, partition)

    def drop_partition(
        self, collection: str, partition: str, *, if_exists: bool = False, timeout: float | None = None
    ) -> None:
        """See `Node.drop_partition`."""
        self._loop.call(partial(self._node.drop_partition, if_exists=if_exists, timeout=timeout), collection, partition)

    def collections(self) -> tuple[Collection, ...]:
        """See `Node.collections`."""
        return self._loop.call(self._node.collections)

    def collection(self, name: str) -> Collection:
        """See `Node.collection`."""
        return self._loop.call(self._node.collection, name)

    def backup(self, path: str | os.PathLike[str]) -> BackupResult:
        """See `Node.backup`."""
        return self._loop.call(self._node.backup, path)

    def verify(self) -> Report:
        """See `Node.verify`."""
        return self._loop.call(self._node.verify)

    @property
    def scrub_status(self) -> ScrubStatus:
        """See `Node.scrub_status`."""
        return self._node.scrub_status

    def flush(self, *, timeout: float | None = None) -> FlushResult:
        """See `Node.flush`."""
        return self._loop.call(partial(self._node.flush, timeout=timeout))


class SyncReader:
    """A reader for a `with` block; see `CollectionReader`. One thread iterates at a time."""

    def __init__(self, reader: CollectionReader, loop: BlockingLoop) -> None:
        self._reader = reader
        self._loop = loop
        self._entered = False

    def __enter__(self) -> Self:
        self._loop.call(self._reader.__aenter__)
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._loop.is_closed:  # a closed node has ended its readers
            self._loop.call(self._reader.__aexit__, kind, error, traceback)

    def __iter__(self) -> Iterator[ReadMessage]:
        self._check_entered()
        while messages := self._loop.call(self._reader.next_messages):
            yield from messages

    def batches(self, *, max_rows: int = 10_000, max_wait_s: float = 0.1) -> Iterator[list[ReadMessage]]:
        """See `CollectionReader.batches`."""
        self._check_entered()
        batches = self._reader.batches(max_rows=max_rows, max_wait_s=max_wait_s)
        end: list[ReadMessage] = []
        next_batch: Callable[[], list[ReadMessage]] = partial(self._loop.call, partial(anext, batches, end))
        while batch := next_batch():
            yield batch

    def ack(self, message: ReadMessage) -> None:
        """See `CollectionReader.ack`."""
        self._check_entered()
        self._loop.call(self._reader.ack, message)

    def _check_entered(self) -> None:
        self._loop.check_open()
        if not self._entered:
            raise InvalidArgument("the reader is not open — use it inside `with node.read(...) as messages`")
