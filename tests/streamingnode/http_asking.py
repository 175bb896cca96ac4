"""Asks a node over HTTP as a monitor does, and as nobody should."""

import asyncio
import json
import socket
from typing import Any, NamedTuple

from streamingnode.node import Node
from tests.parts_of import parts_of


class Answer(NamedTuple):
    """What came back, until the node closed the connection."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON."""
        found: dict[str, Any] = json.loads(self.body)
        return found


def port_of(node: Node) -> int:
    """Return the port that a node with `http="127.0.0.1:0"` got."""
    url = parts_of(node).http
    assert url is not None, "it was opened with http="
    return int(url.rpartition(":")[2])


def free_port() -> int:
    """Return a port of the loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def ask_raw(port: int, request: bytes) -> Answer:
    """Send bytes, and return what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body)
    return Answer(int(first.split()[1]), headers, body)


async def ask(port: int, path: str) -> Answer:
    """Ask as monitors do."""
    return await ask_raw(
        port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: test\r\n\r\n".encode()
    )
