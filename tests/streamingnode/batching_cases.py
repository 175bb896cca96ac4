"""Nodes, inserts and readers as the tests of batching want them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pyarrow as pa

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from streamingnode.reader import CollectionReader
from streamingnode.writing.write import WriteResult

FIELDS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}


SCHEMA = pa.schema(FIELDS)


NEVER_S = 3_600.0
"""No linger or interval of a test is over before the test is."""


Row = dict[str, object]


def row(number: int, item: str = "tea") -> Row:
    return {"id": number, "item": item}


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], object]) -> None:
    # no other wait lets a test look inside without a hook in the product
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0)


class Inserts:
    """Stands before a node's `insert`: notes each call, holds it while it is shut, and raises what
    a test says.
    """

    def __init__(self, node: Node) -> None:
        self.ids: list[list[Any]] = []
        self.under_way = self.most_under_way = 0
        self.open = asyncio.Event()
        self.open.set()
        self.errors: deque[BaseException | None] = deque()
        self._insert = node.insert
        node.insert = self  # type: ignore[method-assign, assignment]

    async def __call__(self, collection: str, rows: Sequence[Row], **options: Any) -> WriteResult:
        self.ids.append([each.get("id") for each in rows])
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.open.wait()
            error = self.errors.popleft() if self.errors else None
            if error is not None:
                raise error
            return await self._insert(collection, rows, **options)
        finally:
            self.under_way -= 1


async def ids_in(node: Node, collection: str = "orders") -> list[int]:
    """Return the ids in the order of the log."""
    async with node.read(collection, until=await node.consistent_tick()) as messages:
        tables = [
            message.to_arrow()
            async for message in messages
            if message.type is sn.MessageType.INSERT
        ]
    return [int(each["id"]) for table in tables if table is not None for each in table.to_pylist()]


GOOD = "good"
BAD = "bad"
CANCELLED = "cancelled"
PAUSE = "pause"
FLUSH = "flush"


class Work:
    """Notes what begins and ends; ends at once what is not held."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.held: dict[int, asyncio.Future[None]] = {}
        self.messages: list[ReadMessage] = []

    def hold(self, *numbers: int) -> None:
        """Hold the messages that come as the n-th of all, from 0."""
        self.held |= {number: asyncio.get_running_loop().create_future() for number in numbers}

    def let_go(self, number: int) -> None:
        self.held[number].set_result(None)

    async def __call__(self, message: ReadMessage) -> None:
        number = first_id(message)
        self.messages.append(message)
        self.begun.append(number)
        if number in self.held:
            await self.held[number]
        self.ended.append(number)


def first_id(message: ReadMessage) -> int:
    table = message.bodies[0].to_arrow() if message.bodies else message.to_arrow()
    return -1 if table is None else min(int(each["id"]) for each in table.to_pylist())


def note_acks(reader: CollectionReader) -> list[int]:
    """Return a list that grows with the ids of acknowledged messages."""
    acked: list[int] = []
    ack = reader.ack

    async def noting(message: ReadMessage) -> None:
        await ack(message)
        acked.append(first_id(message))

    reader.ack = noting  # type: ignore[method-assign]
    return acked


async def until_now(
    node: Node, collection: str = "spread", name: str | None = "worker"
) -> CollectionReader:
    types = [sn.MessageType.INSERT, sn.MessageType.DELETE]
    return node.read(collection, name=name, types=types, until=await node.consistent_tick())


async def left_over(node: Node, collection: str = "spread", name: str = "worker") -> list[int]:
    """Return the ids of the messages that the reader of this name gets next time."""
    async with await until_now(node, collection, name) as messages:
        return [first_id(message) async for message in messages]


async def insert_on_different_shards(node: Node, count: int) -> list[int]:
    """Insert single rows, ids ascending, each on a vchannel of its own, and return the ids."""
    found: dict[str, int] = {}
    number = 0
    while len(found) < count:
        probe = await node.insert("probe", [row(number)])
        found.setdefault(next(iter(probe.row_offsets)), number)
        number += 1
    for each in sorted(found.values()):
        await node.insert("spread", [row(each)])
    return sorted(found.values())


class Interleaving:
    """Work that ends in an order that a test draws, and that checks what may not be under way at
    the same time.
    """

    def __init__(self, keys: Callable[[ReadMessage], set[object]], fails: int | None) -> None:
        self.begun: list[ReadMessage] = []
        self.done: set[int] = set()
        self.under_way: dict[int, tuple[asyncio.Future[None], set[object]]] = {}
        self.some = asyncio.Event()
        self.acked = 0
        self._keys = keys
        self._fails = fails

    async def __call__(self, message: ReadMessage) -> None:
        keys = self._keys(message)
        tick = message.time_tick
        for other, (_, others_keys) in self.under_way.items():
            assert not keys & others_keys, f"{other} and {tick} have a key in common"
        newer = [each for each in self.begun if each.time_tick > tick]
        assert not any(keys & self._keys(each) for each in newer), (
            "a newer message of its key was first"
        )
        self.begun.append(message)
        ending = asyncio.get_running_loop().create_future()
        self.under_way[tick] = ending, keys
        self.some.set()
        try:
            await ending
        finally:
            del self.under_way[tick]
            if not self.under_way:
                self.some.clear()
        if len(self.begun) == self._fails:
            raise ZeroDivisionError
        self.done.add(tick)

    async def ack(
        self, real: Callable[[ReadMessage], Awaitable[None]], ticks: list[int], message: ReadMessage
    ) -> None:
        assert message.time_tick >= self.acked, "progress goes back"
        assert {tick for tick in ticks if tick <= message.time_tick} <= self.done, (
            "unfinished work is acknowledged"
        )
        await real(message)
        self.acked = message.time_tick


async def write(node: Node, what: int | str) -> int:
    """Write one message, to one shard or to all, and return its tick."""
    if what == "delete":
        return (await node.delete("spread", list(range(20)))).time_tick
    if what == "many":
        return (await node.insert("spread", [row(n) for n in range(20)])).time_tick
    if what == "txn":
        async with node.transaction() as txn:
            await txn.insert("spread", [row(1)])
            await txn.insert("spread", [row(2)])
        assert txn.result is not None
        return txn.result.time_tick
    assert isinstance(what, int)
    return (await node.insert("spread", [row(what)])).time_tick


class Calls:
    """A call that raises these errors one after the other, and then returns how often it was
    made.
    """

    def __init__(self, *errors: BaseException) -> None:
        self.count = 0
        self._errors = list(errors)

    async def __call__(self) -> int:
        self.count += 1
        await asyncio.sleep(0)
        if self._errors:
            raise self._errors.pop(0)
        return self.count
