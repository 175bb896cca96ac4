"""The node without `async`, for notebooks and scripts: blocking calls with the same names and
arguments.

    with sn.sync.open_node("data") as node:
        node.insert("orders", [{"id": 1, "item": "tea"}])

In a notebook, `node = sn.sync.open_node("data")` in one cell and `node.close()` in another do the
same. The asynchronous classes document the methods. Everything runs on an event loop in a thread of
its own, as long as the node is open.
"""

import atexit
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

from anyio.from_thread import start_blocking_portal

from streamingnode import opening as asynchronous
from streamingnode.bridging import BridgeReport
from streamingnode.bridging import bridge as asynchronous_bridge
from streamingnode.config import NodeConfig
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from streamingnode.read_message import ReadMessage
from streamingnode.reader import CollectionReader
from streamingnode.statistics import SpoolStatistics
from streamingnode.streams.channels import ChannelService
from streamingnode.streams.factory import MsgStreamFactory, Ticker
from streamingnode.streams.messages import MsgPack, UnmarshalDispatcher, new_proto_dispatcher
from streamingnode.streams.stream import DEFAULTS, MsgStream, StreamOptions
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import Transaction
from streamingnode.writing.write import WriteResult
from wal.errors import InvalidArgument, OnShutdown, StorageFailed
from wal.rocks.layout import Durability
from wal.rocksmq.contract import Consumer, MessageQueue
from wal.rocksmq.messages import ConsumerMessage

__all__ = [
    "SyncChannels",
    "SyncConsumer",
    "SyncMsgStream",
    "SyncMsgStreamFactory",
    "SyncNode",
    "SyncProducer",
    "SyncQueue",
    "SyncReader",
    "SyncTicker",
    "SyncTransaction",
    "bridge",
    "connect",
    "open_node",
]

P = ParamSpec("P")
T = TypeVar("T")
SideT = TypeVar("SideT", bound="Blocking")


class BlockingLoop:
    """An event loop in a daemon thread; `close` ends it, at the latest at exit. After that every
    call raises `OnShutdown`.

    A forked child lacks the thread, so a call there would never return: calls are refused there.
    """

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._portal = self._entered.enter_context(start_blocking_portal("asyncio"))
        self._thread = self._portal.call(threading.get_ident)
        self._process = os.getpid()
        self._closed = False
        atexit.register(self.close)

    def call(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Run a function or coroutine function on the loop and return its result; raises its errors
        unchanged.
        """
        self.check_open()
        called = self._portal.start_task_soon(function, *arguments)
        try:
            return called.result()
        finally:
            # Also after an interrupt: an abandoned call would take messages of a later one.
            called.cancel()

    def enter(self, context: AbstractAsyncContextManager[T, bool | None]) -> T:
        """Enter a context that lasts until the loop is closed; a failure closes the loop."""
        try:
            return self._entered.enter_context(self._portal.wrap_async_context_manager(context))
        except BaseException as error:
            # an interrupt also ends an opening under way
            self.close(type(error), error, error.__traceback__)
            raise

    def close(self, kind: Any = None, error: Any = None, traceback: Any = None) -> None:
        """Leave the entered contexts, with an error or without, and end the loop; idempotent."""
        if os.getpid() != self._process:
            # Keep the contexts alive: their collection would leave them, and wait for the thread.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._entered))
        elif not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._entered.__exit__(kind, error, traceback)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or this process is a fork of the one with the loop."""
        return self._closed or os.getpid() != self._process

    def check_open(self) -> None:
        """Raise `OnShutdown` when the loop is closed, and another error when a call cannot be made
        from this process or thread.
        """
        if self._closed:
            raise OnShutdown("the node is closed — open it again")
        if os.getpid() != self._process:
            raise StorageFailed(
                "the node was opened before this process was forked — open it in one process only, "
                "and start others with the spawn method"
            )
        if threading.get_ident() == self._thread:
            raise InvalidArgument(
                "a blocking call on the node's own event loop never ends — call it in another "
                "thread"
            )


class Blocking:
    """The blocking side of an asynchronous object on a loop."""

    def __init__(self, original: Any, loop: BlockingLoop) -> None:
        self._original = original
        self._loop = loop

    def __enter__(self) -> Self:
        self._loop.call(self._original.__aenter__)
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._loop.is_closed:  # a closed node has ended its readers and consumers
            self._loop.call(self._original.__aexit__, *raised)

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        while item := self._loop.call(partial(anext, items, None)):
            yield item


@overload
def blocking(
    method: Callable[Concatenate[Any, P], Awaitable[T]],
) -> Callable[Concatenate[Any, P], T]: ...
@overload
def blocking(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, P], object], side: type[SideT]
) -> Callable[Concatenate[Any, P], SideT]: ...
def blocking(method: Callable[..., Any], side: type[Blocking] | None = None) -> Callable[..., Any]:
    """Return a method that runs the original on the loop, whether that is asynchronous or not: an
    object may be used only on its loop.

    With `side`, the method returns the blocking side of the result.
    """

    @wraps(method)
    def call(self: Blocking, /, *arguments: object, **options: object) -> Any:
        result = self._loop.call(
            partial(getattr(self._original, method.__name__), *arguments, **options)
        )
        return result if side is None else side(result, self._loop)

    return call


def read_directly(original: Any) -> Any:
    """Return a property that reads the original's in the calling thread, so that it also works
    after the loop is closed.
    """
    return property(lambda self: original.fget(self._original), doc=original.__doc__)


def looked_up(original: Any, side: type[Blocking] | None = None) -> Any:
    """Return a property that reads the original's on the loop; with `side`, it is the blocking side
    of that.
    """

    def get(self: Blocking) -> Any:
        found = self._loop.call(original.fget, self._original)
        return found if side is None else side(found, self._loop)

    return property(get, doc=original.__doc__)


class SyncTransaction(Blocking):
    """A transaction for a `with` block; see `streamingnode.writing.transaction.Transaction`."""

    result: WriteResult | None = read_directly(Transaction.result)
    insert = blocking(Transaction.insert)
    upsert = blocking(Transaction.upsert)
    delete = blocking(Transaction.delete)
    commit = blocking(Transaction.commit)
    rollback = blocking(Transaction.rollback)

    def __exit__(self, *raised: object) -> None:
        # a closed node refuses this: the transaction was not committed
        self._loop.call(self._original.__aexit__, *raised)


class SyncProducer(Blocking):
    """A named producer; see `streamingnode.writing.producer.Producer`. Any thread may call it."""

    name: str = read_directly(Producer.name)
    epoch: int = read_directly(Producer.epoch)
    note: bytes = read_directly(Producer.note)
    put_note = blocking(Producer.put_note)
    insert = blocking(Producer.insert)
    upsert = blocking(Producer.upsert)
    delete = blocking(Producer.delete)
    last_sequence: int = looked_up(Producer.last_sequence)  # appends change it
    transaction = blocking(Producer.transaction, SyncTransaction)


class SyncReader(Blocking):
    """A reader for a `with` block; see `streamingnode.reader.CollectionReader`. One thread iterates
    at a time.
    """

    ack = blocking(CollectionReader.ack)

    def __iter__(self) -> Iterator[ReadMessage]:
        # Take all ready messages at once: a switch of threads costs 50 us. Messages that one loop
        # does not take are the first of the next.
        while self._loop.call(self._original._has_more):  # noqa: SLF001 - the blocking side of it
            yield from self._original._take_ready()  # noqa: SLF001

    def batches(
        self, *, max_rows: int = 10_000, max_wait_s: float = 0.1
    ) -> Iterator[list[ReadMessage]]:
        """See `CollectionReader.batches`."""
        return self._each(self._original.batches(max_rows=max_rows, max_wait_s=max_wait_s))


class SyncConsumer(Blocking):
    """A consumer of a group for a `with` block; see `wal.rocksmq.contract.Consumer`."""

    consume = blocking(Consumer.consume)
    ack = blocking(Consumer.ack)
    give_back = blocking(Consumer.give_back)
    held = blocking(Consumer.held)

    def __iter__(self) -> Iterator[ConsumerMessage]:
        return self._each(aiter(self._original))


class SyncQueue(Blocking):
    """The topics of a node; see `wal.rocksmq.contract.MessageQueue`. Any thread may call it."""

    create_topic = blocking(MessageQueue.create_topic)
    destroy_topic = blocking(MessageQueue.destroy_topic)
    create_consumer_group = blocking(MessageQueue.create_consumer_group)
    destroy_consumer_group = blocking(MessageQueue.destroy_consumer_group)
    exist_consumer_group = blocking(MessageQueue.exist_consumer_group)
    register_consumer = blocking(MessageQueue.register_consumer, SyncConsumer)
    produce = blocking(MessageQueue.produce)
    consume = blocking(MessageQueue.consume)
    ack = blocking(MessageQueue.ack)
    seek = blocking(MessageQueue.seek)
    force_seek = blocking(MessageQueue.force_seek)
    seek_to_latest = blocking(MessageQueue.seek_to_latest)
    get_latest_msg = blocking(MessageQueue.get_latest_msg)
    get_message = blocking(MessageQueue.get_message)
    check_topic_valid = blocking(MessageQueue.check_topic_valid)
    notify = blocking(MessageQueue.notify)
    info = blocking(MessageQueue.info)


class SyncChannels(Blocking):
    """The channel service of a node; see `streamingnode.streams.channels.ChannelService`. Any
    thread may call it.
    """

    create_channels = blocking(ChannelService.create_channels)
    destroy_channels = blocking(ChannelService.destroy_channels)
    describe_channels = blocking(ChannelService.describe_channels)


class SyncMsgStream(Blocking):
    """A stream for a `with` block; see `streamingnode.streams.stream.MsgStream`. Any thread may
    call it.
    """

    start = blocking(MsgStream.start)
    close = blocking(MsgStream.close)
    as_producer = blocking(MsgStream.as_producer)
    get_produce_channels = blocking(MsgStream.get_produce_channels)
    set_repack_func = blocking(MsgStream.set_repack_func)
    force_enable_produce = blocking(MsgStream.force_enable_produce)
    produce = blocking(MsgStream.produce)
    broadcast = blocking(MsgStream.broadcast)
    as_consumer = blocking(MsgStream.as_consumer)
    consume = blocking(MsgStream.consume)
    seek = blocking(MsgStream.seek)
    get_latest_msg_id = blocking(MsgStream.get_latest_msg_id)

    def __iter__(self) -> Iterator[MsgPack]:
        """See `MsgStream.chan`."""
        return self._each(self._original.chan())

    def ticker(self, **options: Any) -> "SyncTicker":
        """Return a ticker of this producer; see `streamingnode.streams.factory.Ticker`."""
        return SyncTicker(Ticker(self._original, **options), self._loop)


class SyncTicker(Blocking):
    """Writes time ticks, for a `with` block; see `streamingnode.streams.factory.Ticker`."""

    tick = blocking(Ticker.tick)

    @contextmanager
    def stamp(self, count: int = 1) -> Iterator[int]:
        """See `Ticker.stamp`."""
        stamped = self._original.stamp(count)
        first: int = self._loop.call(stamped.__enter__)
        try:
            yield first
        finally:
            self._loop.call(stamped.__exit__, None, None, None)


class SyncMsgStreamFactory(Blocking):
    """Makes streams over the topics of a node; see
    `streamingnode.streams.factory.MsgStreamFactory`.
    """

    def __init__(
        self,
        queue: SyncQueue,
        new_dispatcher: Callable[[], UnmarshalDispatcher] = new_proto_dispatcher,
        options: StreamOptions = DEFAULTS,
    ) -> None:
        # the blocking side of both
        made = MsgStreamFactory(queue._original, new_dispatcher, options)  # noqa: SLF001
        super().__init__(made, queue._loop)  # noqa: SLF001

    new_msg_stream = blocking(MsgStreamFactory.new_msg_stream, SyncMsgStream)
    new_tt_msg_stream = blocking(MsgStreamFactory.new_tt_msg_stream, SyncMsgStream)

    def new_disposer(self, channels: Sequence[str], subscription: str) -> Callable[[], None]:
        """See `MsgStreamFactory.new_disposer`."""
        return partial(self._loop.call, self._original.new_disposer(channels, subscription))


class SyncNode(Blocking):
    """An open node; see `streamingnode.node.Node`. Any thread may call it."""

    path: str | None = read_directly(Node.path)
    node_id: str = read_directly(Node.node_id)
    durability: Durability = read_directly(Node.durability)
    config: NodeConfig = read_directly(Node.config)
    spool: SpoolStatistics | None = read_directly(Node.spool)
    mq: SyncQueue = looked_up(Node.mq, SyncQueue)
    channels: SyncChannels = looked_up(Node.channels, SyncChannels)
    statistics = blocking(Node.statistics)
    insert = blocking(Node.insert)
    upsert = blocking(Node.upsert)
    delete = blocking(Node.delete)
    transaction = blocking(Node.transaction, SyncTransaction)
    begin_transaction = blocking(Node.begin_transaction)
    commit_transaction = blocking(Node.commit_transaction)
    rollback_transaction = blocking(Node.rollback_transaction)
    producer = blocking(Node.producer, SyncProducer)
    delete_producer = blocking(Node.delete_producer)
    read = blocking(Node.read, SyncReader)
    snapshot = blocking(Node.snapshot)
    consistent_tick = blocking(Node.consistent_tick)
    delete_reader = blocking(Node.delete_reader)
    readers = blocking(Node.readers)
    seek_reader = blocking(Node.seek_reader)
    transactions = blocking(Node.transactions)
    abort_transaction = blocking(Node.abort_transaction)
    create_collection = blocking(Node.create_collection)
    drop_collection = blocking(Node.drop_collection)
    create_partition = blocking(Node.create_partition)
    drop_partition = blocking(Node.drop_partition)
    collections = blocking(Node.collections)
    collection = blocking(Node.collection)
    flush = blocking(Node.flush)
    backup = blocking(Node.backup)
    verify = blocking(Node.verify)
    wait_closed = blocking(Node.wait_closed)

    def __repr__(self) -> str:
        return repr(self._original).replace("Node", "SyncNode", 1)

    def close(self) -> None:
        """Close the node, as the end of a `with` block does; idempotent. The end of the program
        also closes it.
        """
        self._loop.close()

    def __enter__(self) -> Self:
        self._loop.check_open()
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.close(*raised)


def _opened(opening: Callable[P, OpenNode]) -> Callable[P, SyncNode]:
    """Return a function that opens the same node with the same arguments, for a `with` block or
    until `close`.
    """

    @wraps(opening)
    def call(*arguments: P.args, **options: P.kwargs) -> SyncNode:
        node = opening(*arguments, **options)
        loop = BlockingLoop()
        return SyncNode(loop.enter(node), loop)

    call.__doc__ = (
        f"See `streamingnode.{opening.__name__}`; an `observer` is called in the thread "
        "of the node's event loop."
    )
    return call


open_node = _opened(asynchronous.open_node)
connect = _opened(asynchronous.connect)


def bridge(
    node: SyncNode, topic: str, collection: str, *, name: str | None = None, once: bool = True
) -> BridgeReport:
    """Insert the messages of a topic into a collection, by default until the topic is drained; see
    `sn.bridge`.
    """
    bringing = partial(asynchronous_bridge, node._original, topic, collection, name=name, once=once)  # noqa: SLF001
    report: BridgeReport = node._loop.call(bringing)  # noqa: SLF001 - the blocking side of both
    return report
