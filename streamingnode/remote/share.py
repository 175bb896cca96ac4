"""One directory, several processes: all are clients of the node that one of them has open; when
that ends, another opens it.

The first opener owns the node. When it closes, exits or is killed, the lock of the directory is
free: each of the others looks for that several times a second, and who gets it opens the node,
recovers, and listens at the same socket. The clients connect again by themselves and send what was
not answered; the window of writes, rebuilt from the log, answers what the last owner had written
(ADR 0009). Nobody talks to anybody about who is next: the lock decides.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import anyio

from streamingnode.care.inspect import check_free
from streamingnode.config import NodeConfig
from streamingnode.embedded import EmbeddedBackend
from streamingnode.errors import Unreachable
from streamingnode.node import Node
from streamingnode.remote.client import RemoteBackend, compose_remote
from wal.address import SOCKET_NAME, SOCKET_PATH_BYTES_MAX, Address, LinkOptions
from wal.errors import AlreadyOwned, InvalidArgument
from wal.files import OWNER_S_MAX
from wal.runtime import Supervisor, event_log, in_thread

_log = event_log(__name__)

Own = Callable[[Callable[[], NodeConfig]], AbstractAsyncContextManager[Node]]
"""Opens a node of this process with settings."""

LOOK_PAUSE_S = 0.2
"""Between two looks whether the directory is free."""
FAILED_PAUSE_S = 2.0
"""Before a node that could not be opened, or failed, is tried again."""
OPEN_S_MAX = 60.0
"""How long opening waits for an owner that does not answer: it may be reading a long log."""


class Keeper:
    """Opens the node at `path` whenever nobody has it; `run` ends it when it is cancelled."""

    def __init__(self, path: Path, config: NodeConfig, own: Own) -> None:
        self._path = path
        self._own = own
        self._pause_s = LOOK_PAUSE_S
        self._config = replace(config, serve=replace(config.serve, listen=True))
        self.error: Exception | None = None
        """Why this process could not open it last, or had to close it."""
        self.is_alone = False
        """Whether nobody is told of that: who opened it has gone on."""

    async def run(self) -> None:
        """Own the node, or wait for the one who does to end, in turn."""
        while True:
            self._pause_s = LOOK_PAUSE_S
            try:
                await in_thread(check_free, self._path)
                await self._keep()
            except AlreadyOwned:
                pass  # by another one, who may have been faster just now
            except Exception as error:  # noqa: BLE001
                # whatever it was, nobody else may be there to open it again
                self.error = error
                self._pause_s = FAILED_PAUSE_S
                if self.is_alone:
                    _log.error(
                        "node_not_opened",
                        path=str(self._path),
                        error=f"{type(error).__name__}: {error}",
                    )
            await anyio.sleep(self._pause_s)

    async def _keep(self) -> None:
        async with self._own(lambda: self._config) as node:
            backend = node._backend  # noqa: SLF001 - this is the other half of the node
            assert isinstance(backend, EmbeddedBackend), "it was opened here"
            if not await in_thread((self._path / SOCKET_NAME).is_socket):
                raise InvalidArgument(
                    f"{self._path} takes no socket, and no second process — let one have it alone"
                )
            backend.on_wanted = partial(self._hand_over, node)
            # by who came between the node's listening and here, and asks once
            if backend.is_wanted:
                self._hand_over(node)
            self.error = None
            _log.info("node_owned", path=str(self._path), pid=os.getpid())
            await node.wait_closed()

    def _hand_over(self, node: Node) -> None:
        self._pause_s = OWNER_S_MAX  # who asked for it gets it
        node.begin_closing()


async def compose_shared(
    path: Path, config: NodeConfig, own: Own, supervisor: Supervisor, closing: AsyncExitStack
) -> Node:
    """Open the node at `path` as one of several processes, by `own` where this one is to own it.

    `closing` closes what is open, also when this raises.
    """
    address = Address(path=str(path / SOCKET_NAME))
    if len(os.fsencode(address.path)) > SOCKET_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"{address.path} is too long for a socket — share a node at a shorter path"
        )
    keeper = Keeper(path, config, own)
    keeping = Supervisor(lambda failure: _log.error("keeper_failed", error=repr(failure)))
    closing.push_async_callback(keeping.stop)
    keeping.spawn(keeper.run())
    options = LinkOptions(name=f"process {os.getpid()}")
    until = time.monotonic() + OPEN_S_MAX
    while True:
        try:
            node = await compose_remote(address, options, supervisor, closing)
        except Unreachable:
            if keeper.error is not None:
                await keeping.stop()  # who called may have the directory alone
                raise keeper.error from None
            if time.monotonic() > until:
                await in_thread(check_free, path)
                raise
        else:
            # it made it
            _check_same(config, cast(RemoteBackend, node._backend).link.welcome.settings)  # noqa: SLF001
            keeper.is_alone = True
            return node
        await anyio.sleep(LOOK_PAUSE_S / 4)


def _check_same(asked: NodeConfig, theirs: Mapping[str, object]) -> None:
    """Raise `InvalidArgument` for a setting that was asked for, of which the owner has another
    value.
    """
    for setting in asked.origins():
        known = theirs.get(setting.key)  # nothing where the owner is of an older release
        if setting.key in asked.set_by and setting.value != known:
            raise InvalidArgument(
                f"{setting.key} is {known!r} in the process that owns the node, {setting.value!r} "
                "here — "
                "open it with the same settings everywhere"
            )
