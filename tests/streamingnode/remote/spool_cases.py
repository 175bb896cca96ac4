"""Clients with a spool, and nodes that go away and come back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.remote import spool
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    SETTINGS,
    SHARDS,
    Served,
    contents,
    serving,
)
from tests.streamingnode.remote.proxy import Proxy, until
from wal.rocksmq.messages import ConsumerMessage


async def lose(client: Node, proxy: Proxy) -> None:
    """Take the node away, and return when the client knows."""
    proxy.is_refusing = True
    proxy.cut()
    await in_state(client, "away")


async def come_back(client: Node, proxy: Proxy) -> None:
    """Bring the node back, and return when nothing is in the spool any more."""
    proxy.is_refusing = False
    await emptied(client)


async def emptied(client: Node) -> None:
    """Return when the node has all that was kept."""
    await until(lambda: spool_of(client).state == "connected" and not spool_of(client).frames)


async def some_rows(node: Node) -> None:
    """Return when there are any."""
    async with asyncio.timeout(60):
        while not await contents(node):  # noqa: ASYNC110 - what it waits for is asked anew
            await asyncio.sleep(0)


async def in_state(client: Node, state: str) -> None:
    await until(lambda: spool_of(client).state == state)


def spool_of(client: Node) -> Any:
    assert client.spool is not None
    return client.spool


@asynccontextmanager
async def opened(path: Path, proxy: Proxy) -> AsyncIterator[Served]:
    """Open a node on disk behind a proxy that may have been there before."""
    async with sn.open_node(path, **SETTINGS) as owner:
        await owner.create_collection(
            "c", SCHEMA, primary_key="id", shards=SHARDS, if_not_exists=True
        )
        async with serving(owner, proxy=proxy) as served:
            yield served


async def versions(node: Node, key: int) -> list[int]:
    """Return the versions of a row, written as `item N`, in the order of the log."""
    found = []
    async with node.read("c", until=await node.consistent_tick()) as messages:
        async for message in messages:
            for part in message.bodies or (message,):
                if part.type is sn.MessageType.INSERT:
                    table = part.to_arrow()
                    assert table is not None
                    found += [int(row["item"]) for row in table.to_pylist() if row["id"] == key]
    return found


async def letters_in(directory: Path) -> list[ConsumerMessage]:
    """Return the dead letters in a directory that no client has."""
    async with sn.open_node(directory, config=spool.CONFIG) as node:
        info = (await node.mq.info()).get(spool.DEAD)
        ids = range(info.begin_id, info.end_id + 1) if info else ()
        letters = [await node.mq.get_message(spool.DEAD, each) for each in ids]
        return [letter for letter in letters if letter is not None]
