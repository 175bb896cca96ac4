"""Looks inside an open node, and opens one both ways: in this process, and over a connection to
it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import streamingnode as sn
from streamingnode.embedded import EmbeddedBackend
from streamingnode.node import Node
from streamingnode.remote.answers import Rights
from streamingnode.remote.server import Server

WAYS = ("embedded", "remote")

_owners: WeakKeyDictionary[Node, Node] = WeakKeyDictionary()


def parts_of(node: Node) -> EmbeddedBackend:
    """Return the parts of a node, also of one that is reached over a connection of
    `opened_one_way`.
    """
    backend = _owners.get(node, node)._backend
    assert isinstance(backend, EmbeddedBackend)
    return backend


@asynccontextmanager
async def served(owner: Node, **options: Any) -> AsyncIterator[Node]:
    """Open a client of an open node, which listens for it as long."""
    backend = parts_of(owner)
    server = Server(backend, connections_max=100)
    try:
        port = await server.listen_tcp(
            "127.0.0.1", 0, lambda _hello, _connection: Rights("test"), None
        )
        async with sn.connect(f"tcp://127.0.0.1:{port}", **options) as client:
            _owners[client] = owner
            yield client
    finally:
        await server.close()


@asynccontextmanager
async def opened_one_way(way: str, path: Any = None, **options: Any) -> AsyncIterator[Node]:
    """Open a node, and a client of it where the way is `remote`: what holds of the one holds of the
    other.
    """
    async with sn.open_node(path, **options) as owner:
        if way == "embedded":
            yield owner
            return
        async with served(owner) as client:
            yield client
