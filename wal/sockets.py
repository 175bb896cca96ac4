"""Sockets of an event loop: listening, and cleaning up after the loop has ended or in a forked
child.
"""

import asyncio
import os
import socket
from contextlib import suppress
from functools import partial

from wal.runtime import Holding

BACKLOG = 1_024
"""Connections that the system queues until they are accepted."""

_listening: dict[asyncio.AbstractServer, list[Holding]] = {}


async def accept_one_a_turn(server: asyncio.AbstractServer) -> None:
    """Start a server that was created with a backlog of 1; the system queues up to `BACKLOG`
    connections.

    asyncio tries to accept as many connections in a row as its backlog, and logs a traceback for
    each try when no descriptor is left. The creator of the server closes it with `stop_accepting`,
    even when this raises.
    """
    await server.start_serving()
    # the attribute belongs to the server's class, which is uvloop's with uvloop
    for each in server.sockets:  # type: ignore[attr-defined]
        descriptor = each.fileno()
        opened = OpenSocket(descriptor)
        held = Holding(partial(_close_server, server), in_child=opened.put_away)
        _listening.setdefault(server, []).append(held)
        with socket.socket(fileno=os.dup(descriptor)) as same:
            same.listen(BACKLOG)


def stop_accepting(server: asyncio.AbstractServer) -> None:
    """Close a listening server; idempotent."""
    for held in _listening.pop(server, ()):
        held.end()
    server.close()


def _close_server(server: asyncio.AbstractServer) -> None:
    _listening.pop(server, None)
    with suppress(RuntimeError):  # raised by uvloop, which has closed the sockets with the loop
        server.close()


class OpenSocket:
    """A socket of a transport, identified by its descriptor and inode. A later file with the same
    descriptor is left alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._identity = _identity_of(descriptor)

    def shut(self) -> None:
        """Shut the connection down, so that the other side notices; its owner closes the
        descriptor.
        """
        if self._is_there():
            with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as same:
                same.shutdown(socket.SHUT_RDWR)

    def put_away(self) -> None:
        """Release the socket in a forked child, so that the connection ends with the parent.

        The descriptor then refers to the null device, which its owner in the child may still close.
        """
        if self._is_there():
            empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(empty, self._descriptor, inheritable=False)
            os.close(empty)

    def _is_there(self) -> bool:
        with suppress(OSError):
            return _identity_of(self._descriptor) == self._identity
        return False


def hold_socket(descriptor: int) -> Holding:
    """Register a connection of the running event loop for clean-up."""
    opened = OpenSocket(descriptor)
    return Holding(opened.shut, in_child=opened.put_away)


def _identity_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
