"""How a process reaches the node of a directory that other processes want, too: it opens the node,
or is a client of the process that has it open.

    FREE --opened--> OWNER --its node ended--> FREE
                       |
                       +--another wants it--> ASKED --5 s later--> FREE
    FREE --another has it--> TAKEN --a pause later--> FREE

The lock of the directory decides who is the owner. A process that only waits for the directory does
not talk to anybody; a service asks a command that has it to hand it over, and the command leaves it
to the service.

Processes that share a directory go on after they have reached it, until they close: each is a
client of the socket in the directory, whoever owns the node, itself included. When the owner ends,
one of the others opens the node, recovers, and listens at the same socket. The clients connect
again by themselves and send what was not answered; the window of writes, rebuilt from the log,
answers what the last owner had written (ADR 0009).
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from enum import Enum, auto, unique
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio

from streamingnode.care.inspect import check_free
from streamingnode.composition import compose
from streamingnode.config import NodeConfig
from streamingnode.embedded import EmbeddedBackend
from streamingnode.errors import Unreachable
from streamingnode.listening import Listener
from streamingnode.node import Node
from wal.address import SOCKET_NAME, SOCKET_PATH_BYTES_MAX, Address, LinkOptions
from wal.append import AppendObserver
from wal.errors import AlreadyOwned, InvalidArgument, StreamingNodeError
from wal.files import LOCK_NAME, OWNER_S_MAX
from wal.runtime import Supervisor, event_log, first_of, in_thread

if TYPE_CHECKING:
    from streamingnode.remote.client import RemoteBackend

_log = event_log(__name__)

PAUSE_S = 0.1
"""Between two looks at a directory that another process has."""
FAILED_PAUSE_S = 2.0
"""Before a node that could not be opened, or failed, is tried again."""
OPEN_S_MAX = 60.0
"""How long a process that shares a directory waits for an owner that does not answer: it may be
reading a long log.
"""


@unique
class Wish(Enum):
    """What a process wants of a directory."""

    OWN = auto()
    """A service: it has the node to itself."""
    REPLACE = auto()
    """A service that follows another one, which is ending."""
    SHARE = auto()
    """A service among others: it is the owner or a client, in turn."""
    VISIT = auto()
    """A command that ends soon."""
    STAY = auto()
    """A command that lasts: it hands the directory over when a service asks for it."""


COMMANDS = frozenset({Wish.VISIT, Wish.STAY})
"""They have a directory for a brief time, and services ask them for it."""
CLIENTS = frozenset({Wish.SHARE, Wish.VISIT, Wish.STAY})
"""They connect to the process that has the directory."""
IN_TURN = frozenset({Wish.SHARE, Wish.STAY})
"""Their caller's node is a client even of a node in the same process, and so outlives that node."""


@unique
class Reach(Enum):
    """Where a process stands with a directory."""

    FREE = auto()
    """No process is known to have it: this one tries to open the node."""
    OWNER = auto()
    """This process has the node open."""
    TAKEN = auto()
    """Another process has it: this one asks for it, is its client, waits, or is refused."""
    ASKED = auto()
    """This process has handed it over, and leaves it to the one that asked."""


TRANSITIONS: dict[Reach, set[Reach]] = {
    Reach.FREE: {Reach.OWNER, Reach.TAKEN},
    Reach.OWNER: {Reach.FREE, Reach.ASKED},
    Reach.TAKEN: {Reach.FREE},
    Reach.ASKED: {Reach.FREE},
}


Own = Callable[[Path, Callable[[], NodeConfig], Callable[..., Awaitable[Node]]], Awaitable[Node]]
"""Opens a node that has a supervisor of its own, in a directory, with settings, by `compose`."""


async def reach(
    wish: Wish,
    own: Own,
    path: Path | None,
    config: NodeConfig,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    *,
    observer: AppendObserver | None = None,
) -> Node:
    """Return the node in a directory, opened here or a client of the process that has it open; None
    opens one in memory.

    `closing` closes what is open, also when this raises. Raises `AlreadyOwned` and what opening and
    connecting raise.
    """
    if path is None:
        return await compose(None, config, supervisor, closing, observer=observer)
    reaching = _Reaching(wish, own, path, config, supervisor, closing, observer)
    closing.push_async_callback(reaching.close)
    while reaching.node is None:
        await reaching.step()
        await reaching.approach()
    if reaching.in_turn:
        supervisor.spawn(reaching.run())
    return reaching.node


class _Reaching:
    """One process and one directory: the state, and what is done in it."""

    def __init__(
        self,
        wish: Wish,
        open_own: Own,
        path: Path,
        config: NodeConfig,
        supervisor: Supervisor,
        closing: AsyncExitStack,
        observer: AppendObserver | None,
    ) -> None:
        self.node: Node | None = None
        """What the caller gets, once it is reached."""
        self.in_turn = wish is Wish.SHARE
        """Whether this process is the owner or a client in turn, until it closes."""
        self._wish = wish
        self._open_own = open_own
        self._path = path
        self._config = config
        self._supervisor = supervisor
        self._closing = closing
        self._observer = observer
        self._address = Address(path=str(path / SOCKET_NAME))
        self._state = Reach.FREE
        self._began_s = time.monotonic()
        self._holder: AlreadyOwned
        """Who has the directory, while it is `TAKEN`."""
        self._asked_pid: int | None = None
        """The last command that was asked for the directory."""
        self._own: Node
        """The node of this process, while it is the `OWNER` in turn."""
        self._left_s = 0.0
        """When this process handed the directory over."""

    async def run(self) -> None:
        """Be the owner or a client in turn, until cancelled."""
        while True:
            try:
                await self.step()
            except Exception as error:  # noqa: BLE001
                # whatever it was, nobody else may be there to open the node again
                _log.error(
                    "node_not_opened",
                    path=str(self._path),
                    error=f"{type(error).__name__}: {error}",
                )
                await anyio.sleep(FAILED_PAUSE_S)

    async def close(self) -> None:
        """Close the node that this process owns; `run` has ended."""
        if self._state is Reach.OWNER:
            await self._own.aclose()

    # --- the states -------------------------------------------------------------------------------

    async def step(self) -> None:
        """Do what the state asks for: become the next one, or pause."""
        await STEPS[self._state](self)

    async def take(self) -> None:
        """Open the node, if no process has the directory."""
        try:
            if self._wish in IN_TURN:
                await self._take_in_turn()
            else:
                self.node = await compose(
                    self._path,
                    self._config,
                    self._supervisor,
                    self._closing,
                    observer=self._observer,
                    brief=self._wish in COMMANDS,
                )
        except AlreadyOwned as owned:
            self._holder = owned
            # another command may end before this one: then it is this one's turn
            self.in_turn |= self._wish is Wish.STAY and owned.brief
            self._become(Reach.TAKEN)

    async def own(self) -> None:
        """Wait for the end of this process's node, or for a service that asks for the directory."""
        wanted = _embedded(self._own).wanted
        pause_s = PAUSE_S if self.node is None else None
        if await first_of(wanted.wait(), self._own.wait_closed(), timeout_s=pause_s):
            self._become(Reach.ASKED if wanted.is_set() else Reach.FREE)
            await self._own.aclose()
            self._left_s = time.monotonic()

    async def wait_for_end(self) -> None:
        """Pause before another try to open the node."""
        await anyio.sleep(PAUSE_S)
        self._become(Reach.FREE)

    async def leave(self) -> None:
        """Pause; the directory is for the service that asked for it, for up to `OWNER_S_MAX`."""
        await anyio.sleep(PAUSE_S)
        if time.monotonic() > self._left_s + OWNER_S_MAX:
            self._become(Reach.FREE)

    def _become(self, state: Reach) -> None:
        assert state in TRANSITIONS[self._state], f"{state} after {self._state}"
        self._state = state

    async def _take_in_turn(self) -> None:
        """Open a node that may end before this process closes: a service may ask for it."""
        if len(os.fsencode(self._address.path)) > SOCKET_PATH_BYTES_MAX:
            self._have_alone(
                f"{self._address.path} is too long for a socket — share a shorter path"
            )
            return
        # before the opening: a forked child may be a client, and opens no database
        await in_thread(check_free, self._path)
        config = replace(self._config, serve=replace(self._config.serve, listen=True))
        opens = partial(compose, brief=self._wish in COMMANDS)
        own = await self._open_own(self._path, lambda: config, opens)
        if cast(Listener, _embedded(own).listener).path is None:
            await own.aclose()
            self._have_alone(
                f"{self._path} takes no socket, and no second process — let one have it alone"
            )
            return
        self._own = own
        self.in_turn = True
        self._become(Reach.OWNER)
        _log.info("node_owned", path=str(self._path), pid=os.getpid())

    def _have_alone(self, why: str) -> None:
        """Let a command have the node alone: where there is no socket no service can ask for it.

        Raises `InvalidArgument` for a process that wants to share.
        """
        if self._wish is Wish.SHARE:
            raise InvalidArgument(why)
        self._wish = Wish.VISIT

    # --- beside the process that has the directory ------------------------------------------------

    async def approach(self) -> None:
        """Ask for the directory, or connect to the process that has it, as this one wishes.

        Raises `AlreadyOwned` when that is over.
        """
        if self.node is not None or self._state is Reach.FREE:
            return
        is_patient = self._state is Reach.TAKEN and self._waited_s() < OWNER_S_MAX
        if is_patient and self._holder.brief and self._wish not in COMMANDS:
            await self._ask()
        elif self._wish in CLIENTS:
            await self._connect()
        elif not is_patient or (self._wish is Wish.OWN and not self._holder.brief):
            raise self._holder

    async def _ask(self) -> None:
        """Ask a command for the directory, once: another command may be faster than this process
        to take what the first one hands over.
        """
        pid = self._holder.pid
        if pid == self._asked_pid:
            return
        # it may be opening still, or closing already
        with suppress(StreamingNodeError, TimeoutError):
            async with asyncio.timeout(OWNER_S_MAX / 2), AsyncExitStack() as closing:
                # a client that fails meanwhile cannot ask
                node = await self._client(Supervisor(lambda _: None), closing)
                closing.push_async_callback(node.aclose)
                await node._backend.hand_over()  # noqa: SLF001 - no call for programs
                self._asked_pid = pid

    async def _connect(self) -> None:
        """Be a client of the socket in the directory, if a node answers there by now."""
        try:
            node = await self._client(self._supervisor, self._closing)
        except Unreachable:
            if await self._may_answer():
                return
            if self._state is not Reach.TAKEN:
                raise
            step = "try again if it is just opening or closing, else stop it"
            self._holder.args = (f"{self._holder.happened}, which takes no clients — {step}",)
            raise self._holder from None
        if self._wish is Wish.SHARE:
            backend = cast("RemoteBackend", node._backend)  # noqa: SLF001 - it was made here
            check_same(self._config, backend.link.welcome.settings)
        self.node = node

    async def _may_answer(self) -> bool:
        """Whether a node that does not answer may be opening still, or closing."""
        if self.in_turn:
            return self._waited_s() < OPEN_S_MAX
        opened_at = await in_thread(os.path.getmtime, self._path / LOCK_NAME)
        is_new = self._holder.brief or time.time() - opened_at < OWNER_S_MAX
        return is_new and self._waited_s() < OWNER_S_MAX

    async def _client(self, supervisor: Supervisor, closing: AsyncExitStack) -> Node:
        # a process that has its node alone loads no client
        from streamingnode.remote.client import compose_remote

        name = "streamingnode command" if self._wish in COMMANDS else f"process {os.getpid()}"
        return await compose_remote(self._address, LinkOptions(name=name), supervisor, closing)

    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s


STEPS: dict[Reach, Callable[[_Reaching], Awaitable[None]]] = {
    Reach.FREE: _Reaching.take,
    Reach.OWNER: _Reaching.own,
    Reach.TAKEN: _Reaching.wait_for_end,
    Reach.ASKED: _Reaching.leave,
}


def _embedded(node: Node) -> EmbeddedBackend:
    return cast(EmbeddedBackend, node._backend)  # noqa: SLF001 - this is the other half of the node


def check_same(asked: NodeConfig, theirs: Mapping[str, object]) -> None:
    """Raise `InvalidArgument` for a setting that was asked for, of which the owner has another
    value.
    """
    for setting in asked.origins():
        known = theirs.get(setting.key)  # nothing where the owner is of an older release
        if setting.key in asked.set_by and setting.value != known:
            raise InvalidArgument(
                f"{setting.key} is {known!r} in the process that owns the node, {setting.value!r} "
                "here — open it with the same settings everywhere"
            )
