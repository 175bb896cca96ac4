"""A node whose log takes nothing on while a test holds it, so that writes have to wait for each
other.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pyarrow as pa

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from streamingnode.writing.write import WriteResult
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from wal.entry import LogEntry
from wal.headers import DML

FIELDS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(FIELDS)
SHARDS = 3
HANGS_S = 60
ROWS = (sn.MessageType.INSERT, sn.MessageType.DELETE, sn.MessageType.TXN)
Row = dict[str, Any]
Writing = Coroutine[Any, Any, WriteResult | None]


def rows(*keys: int, item: str = "tea") -> list[Row]:
    return [{"id": key, "item": f"{item} {key}"} for key in keys]


def table(*keys: int, item: str = "tea") -> pa.Table:
    return pa.Table.from_pylist(rows(*keys, item=item), schema=SCHEMA)


class Held:
    """A node on disk whose log takes nothing on while its gate is shut, so that writes have to wait
    for each other.
    """

    def __init__(self, node: Node, disk: FailingDisk, start: int) -> None:
        self.node = node
        self.disk = disk
        self._start = start

    def hold(self) -> None:
        self.disk.gate.clear()

    def let_go(self) -> None:
        self.disk.gate.set()

    async def entries(self) -> list[LogEntry]:
        """Return the entries with rows since the node was ready."""
        await self.node.consistent_tick()
        log = parts_of(self.node).channel.log
        return [
            entry for entry in await log.read(self._start, bytes_max=1 << 30) if has_rows(entry)
        ]

    async def groups(self) -> list[int]:
        """Return how many writes each of these entries holds."""
        return [
            1 if entry.rows is None else len(entry.rows.ticks) for entry in await self.entries()
        ]

    async def messages(self, collection: str = "c") -> list[ReadMessage]:
        async with self.node.read(collection, until=await self.node.consistent_tick()) as messages:
            return [message async for message in messages if message.type in ROWS]

    async def found(self, collection: str = "c") -> dict[int, str]:
        return await contents(self.node, collection)


def has_rows(entry: LogEntry) -> bool:
    """Whether rows or keys are in an entry, which are a message where they went alone."""
    return entry.rows is not None or entry.messages[0].type in DML


async def contents(node: Node, collection: str = "c") -> dict[int, str]:
    found = (await node.snapshot(collection)).to_pylist()
    assert len({row["id"] for row in found}) == len(found), "a row is there twice"
    return {row["id"]: row["item"] for row in found}


async def start(*calls: Writing) -> list["asyncio.Task[WriteResult | None]"]:
    """Have calls begin in one turn of the event loop, each in a task of its own."""
    tasks = [asyncio.get_running_loop().create_task(call) for call in calls]
    await turns()
    return tasks


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
