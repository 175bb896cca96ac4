"""Nodes with a server whose inside tests look at, and clients of them over a proxy."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import streamingnode as sn
from streamingnode.node import Node
from streamingnode.remote.answers import Rights
from streamingnode.remote.client import RemoteBackend
from streamingnode.remote.link import Link
from streamingnode.remote.server import Server
from tests.parts_of import parts_of
from tests.streamingnode.remote.proxy import Proxy, proxied, until

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)]).append(
    pa.field("item", pa.string())
)
SHARDS = 3
SETTINGS: dict[str, Any] = {"cut_interval_s": None, "ticks.interval_s": 0.01}


def rows(*keys: int, item: str = "tea") -> list[dict[str, Any]]:
    """Return rows of these keys."""
    return [{"id": key, "item": f"{item} {key}"} for key in keys]


def link_of(client: Node) -> Link:
    """Return the link of a client."""
    backend = client._backend
    assert isinstance(backend, RemoteBackend)
    return backend.link


async def contents(node: Node, collection: str = "c") -> dict[int, str]:
    """Return the rows of a collection. Raises `AssertionError` for one that is there twice."""
    found = (await node.snapshot(collection)).to_pylist()
    assert len({row["id"] for row in found}) == len(found), "a row is there twice"
    return {row["id"]: row["item"] for row in found}


async def keys_in_log(node: Node, collection: str = "c") -> list[int]:
    """Return the keys of all rows that were ever inserted, in the order of the log."""
    found: list[int] = []
    async with node.read(collection, until=await node.consistent_tick()) as messages:
        async for message in messages:
            for part in message.bodies or (message,):
                if part.type is sn.MessageType.INSERT:
                    table = part.to_arrow()
                    assert table is not None
                    found += map(int, table["id"].to_numpy())
    return found


@dataclass
class Served:
    """An open node, its server, and the proxy in front of it."""

    owner: Node
    server: Server
    port: int
    proxy: Proxy

    @asynccontextmanager
    async def client(self, **options: Any) -> AsyncIterator[Node]:
        """Open a client over the proxy."""
        async with sn.connect(self.proxy.url, **options) as client:
            yield client

    async def all_gone(self) -> None:
        """Return once nothing is left of any client."""
        await until(lambda: not self.server.sessions)
        assert self.server.shared.transactions == {}


@asynccontextmanager
async def serving(
    owner: Node, *, connections_max: int = 100, proxy: Proxy | None = None
) -> AsyncIterator[Served]:
    """Serve an open node; with a proxy of before, behind that one."""
    server = Server(parts_of(owner), connections_max=connections_max)
    try:
        port = await server.listen_tcp(
            "127.0.0.1", 0, lambda _hello, _connection: Rights("test"), None
        )
        if proxy is not None:
            proxy.node_port = port
            yield Served(owner, server, port, proxy)
            return
        async with proxied(port) as made:
            yield Served(owner, server, port, made)
    finally:
        await server.close()


@asynccontextmanager
async def node_behind_proxy(
    path: Path | None = None, *, connections_max: int = 100, **settings: Any
) -> AsyncIterator[Served]:
    """Open a node with a collection `c`, and serve it behind a proxy."""
    async with sn.open_node(path, **SETTINGS | settings) as owner:
        await owner.create_collection(
            "c", SCHEMA, primary_key="id", shards=SHARDS, if_not_exists=True
        )
        async with serving(owner, connections_max=connections_max) as served:
            yield served
