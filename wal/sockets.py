"""Sockets of an event loop: how they listen, and what becomes of them when it has ended, or in a
forked child.
"""

import asyncio
import os
import socket
from contextlib import suppress
from functools import partial

from wal.runtime import Holding

BACKLOG = 1_024
"""Connections that the system keeps until they are accepted."""

_listening: dict[asyncio.AbstractServer, list[Holding]] = {}


async def accept_one_a_turn(server: asyncio.AbstractServer) -> None:
    """Start a server that was made with a backlog of 1; the system keeps `BACKLOG` connections for
    it.

    asyncio takes the backlog for how often it tries to accept in a row, and without descriptors
    each try is a traceback. Whoever makes the server closes it with `stop_accepting`, however this
    ends.
    """
    await server.start_serving()
    # of its own class, which is uvloop's there
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
    with suppress(RuntimeError):  # of uvloop, which has closed the sockets with the loop
        server.close()


class OpenSocket:
    """A socket of a transport, by its descriptor; another file that has got its number is left
    alone.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._identity = _identity_of(descriptor)

    def shut(self) -> None:
        """End the connection, for the other side to notice; the descriptor is for its owner to
        close.
        """
        if self._is_there():
            with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as same:
                same.shutdown(socket.SHUT_RDWR)

    def put_away(self) -> None:
        """Give it up in a forked child, so that it ends with the parent.

        Its number goes to an empty file: whatever owns it here may still close that.
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
    """Hold a connection for the running event loop."""
    opened = OpenSocket(descriptor)
    return Holding(opened.shut, in_child=opened.put_away)


def _identity_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
