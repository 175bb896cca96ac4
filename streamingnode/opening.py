"""Opens a node, once: `async with open_node("data") as node`, or `node = await open_node("data")`.

When background work fails, the node closes by itself, because a node without its flusher only looks
alive: calls are refused, and closing raises what failed, as it is.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from streamingnode.config import NodeConfig, load_config
from streamingnode.node import Node
from streamingnode.signals import ENDING, Interrupted
from wal.address import LinkOptions
from wal.append import AppendObserver
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, StorageFailed
from wal.files import check_path, disk_errors_typed
from wal.runtime import Supervisor, event_log, in_thread, let_go_of_ended, outlast

if TYPE_CHECKING:
    import ssl

    from streamingnode.reaching import Wish

T = TypeVar("T")

_log = event_log(__name__)

SPOOL_BYTES_MAX = 64 << 20
SPOOL_BYTES_MIN = 64 << 10
"""What a client may keep on its disk for a node that is away, and the least that makes sense."""
TEXT_MAX = 8_192
"""Characters of a client's name, and of its token."""

# Opens a node; leaving the stack closes its parts in reverse order. No asynchronous generator: the
# end of the event loop would close those of a node that nobody closed, all at once.
Compose = Callable[[Path | None, NodeConfig, Supervisor, AsyncExitStack], Awaitable[Node]]


def open_node(
    path: str | os.PathLike[str] | None,
    *,
    config: NodeConfig | None = None,
    config_file: str | os.PathLike[str] | None = None,
    observer: AppendObserver | None = None,
    share: bool = False,
    **settings: object,
) -> "OpenNode":
    """Return what opens the node in directory `path`, made if it is new: enter it with
    `async with`, or `await` it.

    A node that was awaited is closed with `Node.aclose`. None opens a throw-away node: its log in
    memory, the files of its cuts in a temporary directory.

    Settings are those of `streamingnode.config`, for example
    `open_node("data", durability="os", cut_interval_s=60)`; they win over the environment and
    `config_file`. A ready-made `config` takes the place of all three. An `observer` is called on
    the event loop for every append, with the time of each interceptor; `Node.statistics` adds up
    the same without one.

    With `share` several processes open one directory: the first one owns the node, the others are
    its clients, and when the owner ends, however it does, one of them takes over; calls wait for
    that. All of them, the owner too, are clients of its socket, with what `connect` says of lost
    connections. Settings have to be the same everywhere.

    Opening waits up to 5 s for a command that has the directory, which then hands it over. It
    raises `AlreadyOwned` (with the pid) while another process has it, `UnsupportedFormat` for one
    of a newer release, `Corrupt` for damage, `StorageFailed` or `StorageFull` when the disk does
    not serve, and `InvalidArgument` for settings or a backup. Closing lets what was begun finish
    first; what is acknowledged stays. It may be done by another task than the one that opened it.
    """
    if config is not None and (settings or config_file is not None):
        raise InvalidArgument(
            "config= is all settings at once — leave out the others, or pass them without config="
        )
    if config is not None and not isinstance(config, NodeConfig):
        raise InvalidArgument(
            f"config={config!r} — pass a NodeConfig, or settings by name: durability='os'"
        )
    directory = None if path is None else check_path("directory", path)
    file = None if config_file is None else check_path("config file", config_file)

    def settle() -> NodeConfig:
        load_what_is_slow()
        return config or load_config(file=file, environment=os.environ, arguments=settings)

    if share and (directory is None or observer is not None):
        raise InvalidArgument(
            "share=True needs a directory, and has no observer — the owner may be another process"
        )
    from streamingnode.reaching import Wish

    wish = Wish.SHARE if share else Wish.OWN
    return reach_node(wish, directory, settle, observer)


def visit_node(path: Path, *, lasting: bool) -> "OpenNode":
    """Return what opens the node in a directory for a command, or connects to the process that has
    it open.

    A command that is `lasting` hands the directory over when a service asks for it, and goes on as
    a client; beside another command it is a client at first, and takes over when that one ends.
    Opening raises `AlreadyOwned` for a process that takes no clients.
    """
    from streamingnode.reaching import Wish

    wish = Wish.STAY if lasting else Wish.VISIT
    return reach_node(wish, path, partial(load_config, environment=os.environ))


def reach_node(
    wish: "Wish",
    path: Path | None,
    settle: Callable[[], NodeConfig],
    observer: AppendObserver | None = None,
) -> "OpenNode":
    """Return what opens the node in a directory, or connects to it, as a process wishes."""
    from streamingnode.reaching import reach

    return OpenNode(path, settle, partial(reach, wish, OpenNode, observer=observer))


def connect(
    url: str,
    *,
    name: str = "",
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: "ssl.SSLContext | None" = None,
    give_up_s: float = 30.0,
    spool: str | os.PathLike[str] | None = None,
    spool_bytes_max: int = SPOOL_BYTES_MAX,
) -> "OpenNode":
    """Return what connects to the node at `url`: enter it with `async with`, or `await` it, as
    `open_node`.

    `unix:data/node.sock`, `tcp://host:port` or `tls://host:port`. `name` is what the node's log
    calls this client, a token proves who it is, `tls` is a context for `tls://`, the system's by
    default. When the connection is lost it is made again, and calls wait for it for `give_up_s`
    seconds, at most 300: writes and changes then take place once, and readers go on where they
    were. Opening raises `Unreachable`, `Unauthenticated` and `ProtocolError`.

    With a `spool`, a directory that this connection has for itself, `insert`, `upsert`, `delete`
    and transactions that fit an append group are kept there, durably, up to `spool_bytes_max`, and
    return with `spooled` set, without a tick. They take place once and in order as soon as the node
    takes them; writes of named producers and calls go to the node behind them. A node that the
    spool was connected to before may be away at the opening, too. A full spool makes writes wait
    while the node takes what is kept, and else raises `Overloaded`; opening raises `Corrupt` for a
    damaged one, and `AlreadyOwned`.
    """
    from streamingnode.remote.client import compose_remote
    from streamingnode.remote.link import GIVE_UP_S_MAX
    from streamingnode.remote.spool import CONFIG, SpoolingBackend
    from streamingnode.writing.write import check_seconds
    from wal.address import parse_address

    # a program may have lost it already, or change it while connected
    with disk_errors_typed("the current directory"):
        address = parse_address(url)
        file = None if token_file is None else check_path("token file", token_file).absolute()
        directory = None if spool is None else check_path("directory", spool).absolute()
    check_seconds("give_up_s", give_up_s, longest=GIVE_UP_S_MAX)
    if tls is not None and not address.tls:
        raise InvalidArgument(
            f"tls= is for tls:// addresses, {url!r} would go in the clear — connect to tls://"
        )
    # the node ends a connection that begins otherwise
    for what, text in {"name": name, "token": token or ""}.items():
        if not isinstance(text, str) or len(text) > TEXT_MAX or not _is_unicode(text):
            text_max = f"text of up to {TEXT_MAX} characters"
            raise InvalidArgument(f"the {what} is no {text_max} — pass another str")
    if token is not None and token_file is not None:
        raise InvalidArgument("token= and token_file= are two tokens — give one of them")
    options = LinkOptions(name=name, token=token or file or "", tls=tls, give_up_s=give_up_s)
    make = None
    if directory is not None:
        if not isinstance(spool_bytes_max, int) or spool_bytes_max < SPOOL_BYTES_MIN:
            raise InvalidArgument(
                f"spool_bytes_max={spool_bytes_max!r} — pass a number of at least {SPOOL_BYTES_MIN}"
            )
        own = open_node(directory, config=CONFIG)
        make = partial(SpoolingBackend, directory=directory, own=own, bytes_max=spool_bytes_max)

    async def compose(
        _path: Path | None, _config: NodeConfig, supervisor: Supervisor, closing: AsyncExitStack
    ) -> Node:
        return await compose_remote(address, options, supervisor, closing, make)

    def settle() -> NodeConfig:
        load_what_is_slow()
        return NodeConfig()

    return OpenNode(None, settle, compose)


def load_what_is_slow() -> None:
    """Load what would hold up an event loop when it is used first; most commands use none of it.

    pyarrow looks for pandas when it makes its first array and imports it: that takes half a second.
    """
    import pyarrow as pa
    import structlog  # noqa: F401

    pa.array([0])


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class OpenNode:
    """A node to be opened, once: `async with`, or `await` and `Node.aclose`. Any task of the event
    loop may close it.
    """

    def __init__(
        self, path: Path | None, settle: Callable[[], NodeConfig], compose: Compose
    ) -> None:
        self._path = path
        self._settle = settle
        self._compose = compose
        self._entered = False
        self._supervisor = Supervisor(self._fail)
        self._parts = AsyncExitStack()
        self._node: Node | None = None
        self._loop: asyncio.AbstractEventLoop

    def __await__(self) -> Generator[Any, None, Node]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Node:
        if self._entered:
            raise InvalidArgument("this open_node() was used already — call open_node() again")
        _check_asyncio()
        self._entered = True
        self._loop = asyncio.get_running_loop()
        opening = anyio.CancelScope()
        try:  # in a task of its own, so that nothing of the caller's is held until the node closes
            await outlast(self._open_parts(opening), on_cancel=opening.cancel)
        except GeneratorExit:  # thrown away after its event loop: nothing can be awaited
            raise
        except BaseException:
            await outlast(self._parts.aclose())
            raise
        assert self._node is not None, "opening ends with a node, or it raises"
        return self._node

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the node. Raises the failure of background work, unless the block raised something
        of its own.

        A refusal that this failure caused does not count as the block's own.
        """
        assert self._node is not None, "entered before it is left"
        # thrown away after its event loop: nothing can be awaited
        if kind is GeneratorExit and self._loop.is_closed():
            return
        try:
            await self._node.aclose()
        except Exception as failure:
            refused = isinstance(error, OnShutdown) and error.__cause__ is failure
            own = kind is not None and not refused and failure is self._supervisor.failure
            if not own:
                raise

    async def _open_parts(self, scope: anyio.CancelScope) -> None:
        with scope, disk_errors_typed(self._path or "the temporary directory"):
            await in_thread(let_go_of_ended)
            config = await in_thread(self._settle)
            # Absolute, because a program may change its directory while the node is open.
            path = None if self._path is None else await in_thread(self._path.absolute)
            self._parts.push_async_callback(self._supervisor.stop)
            try:
                node = await self._compose(path, config, self._supervisor, self._parts)
            except Indeterminate as error:
                # The opening itself wrote this: the next one finds it, or writes it again.
                raise StorageFailed(
                    f"{error.happened} — look after the disk, and open the node again"
                ) from error
            if self._supervisor.failure is not None:  # it failed while the rest was opening
                raise self._supervisor.failure
            self._node = node

    def _fail(self, failure: BaseException) -> None:
        if self._node is not None:
            _log.error(
                "node_failed", path=self._node.path, error=f"{type(failure).__name__}: {failure}"
            )
            self._node.begin_closing()


def _check_asyncio() -> None:
    """Raise `InvalidArgument` unless asyncio runs the caller: under trio there is no task of
    asyncio.
    """
    task: object = None
    with suppress(RuntimeError):  # there is no event loop of asyncio
        task = asyncio.current_task()
    if task is None:
        raise InvalidArgument(
            "streamingnode is for asyncio only, and no task of asyncio runs here — use "
            "asyncio.run() "
            "or anyio.run(); with anyio's pytest plugin let the fixture anyio_backend return "
            "'asyncio'"
        )


def run_async(program: Callable[[], Awaitable[T]]) -> T:
    """Run `program` on an event loop of its own and return its result.

    An interrupt, or a signal that `ENDING` handles, cancels the program and is raised here as
    `KeyboardInterrupt`.
    """

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None, "anyio runs it in one"
        cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        with ENDING.reacting(cancel):
            return await program()

    options = {"use_uvloop": find_spec("uvloop") is not None}
    try:
        return anyio.run(run, backend="asyncio", backend_options=options)
    except asyncio.CancelledError:
        if ENDING.number is None:
            raise
        raise Interrupted from None
