"""How a command is declared: its help with examples, its arguments, and the function that does it."""

import argparse
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_sink.errors import PackageMissing
from wal.errors import AlreadyOwned, InvalidArgument

if TYPE_CHECKING:
    import ssl

    from streamingnode.node import Node

A = TypeVar("A")
P = TypeVar("P", bound=argparse.ArgumentParser)

TOKEN_FILE_VARIABLE = "STREAMINGNODE_TOKEN_FILE"  # noqa: S105 - where it is, not what it is
"""Names the file with the token for a node at an address."""
Argument = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """One command of the program: `function` is called with its arguments by name; None is the exit code of success.

    Its name is that of the command, its docstring the help; `examples` are complete command lines.
    """

    function: Callable[..., int | None]
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]

    @property
    def name(self) -> str:
        """What the program calls it."""
        return self.function.__name__


def command(*arguments: Argument, examples: tuple[str, ...]) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command of its name."""
    return partial(Command, arguments=arguments, examples=examples)


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument; `names` and `options` are those of `ArgumentParser.add_argument`."""
    return names, options


NODE = argument("directory", type=Path, help="the node's directory")
DRY_RUN = argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
_SCHEMES = ("unix:", "tcp://", "tls://")


class NodeUrl(str):
    """The address of a running node, and the files that it takes to connect to it; None where it takes none."""

    __slots__ = ("tls_ca", "tls_cert", "tls_key", "token_file")
    token_file: str | None
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None

    def tls(self) -> "ssl.SSLContext | None":
        """Return how `tls://` is spoken, None for the system's way. Raises `InvalidArgument`; blocks."""
        import ssl

        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if chain := self.tls_cert or self.tls_key:
                context.load_cert_chain(chain, self.tls_key)
        except OSError as error:  # one of ssl is one, too
            raise InvalidArgument(f"--tls-ca, --tls-cert or --tls-key cannot be used: {error} — correct them") from None
        return context


def directory_or_address(text: str) -> Path | str:
    """Return the address of a running node, or the path of a directory."""
    return NodeUrl(text) if text.startswith(_SCHEMES) else Path(text)


PLACE = argument(
    "place",
    metavar="directory",
    type=directory_or_address,
    help="the node's directory, whether or not a process has it open, or the address of a running one, as tcp://host:port",
)
OPTIONAL_PLACE = ("place",), PLACE[1] | {"nargs": "?"}
CONNECTION = ("token_file", "tls_ca", "tls_cert", "tls_key")


def node_options(kind: type[P]) -> P:
    """Return the parent of the parsers of all commands that speak to a node: with --node there is no positional place."""
    parser = kind(add_help=False)
    options = parser.add_argument_group("the node")
    options.add_argument(
        "--node",
        dest="place",
        metavar="URL|DIR",
        type=directory_or_address,
        help="in place of the directory: unix:PATH, tcp://HOST:PORT, tls://HOST:PORT or a directory",
    )
    options.add_argument(
        "--token-file",
        metavar="FILE",
        default=os.environ.get(TOKEN_FILE_VARIABLE),
        help=f"the token for an address (default: what {TOKEN_FILE_VARIABLE} names)",
    )
    options.add_argument("--tls-ca", type=Path, metavar="FILE", help="the authority of tls:// (default: the system's)")
    options.add_argument("--tls-cert", type=Path, metavar="FILE", help="the certificate to show at tls://")
    options.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, when that is in another file")
    return parser


def locate(arguments: dict[str, Any]) -> None:
    """Give the place among parsed arguments the options of its connection, and take those out."""
    connection = {name: arguments.pop(name) for name in CONNECTION if name in arguments and "place" in arguments}
    if isinstance(place := arguments.get("place"), NodeUrl):
        for name, value in connection.items():
            setattr(place, name, value)


def with_node(
    place: Path | str, work: "Callable[[Node], Awaitable[A]]", *, lasting: bool = False, within_s: float | None = None
) -> A:
    """Return what `work` makes of a node: opened in its directory, or as a client of the process that has it open.

    Work that is `lasting` goes on as a client of a service that wants the directory meanwhile. All of it, opening too, is
    given up after `within_s` seconds, with `TimeoutError`.

    Raises `InvalidArgument` when there is none, `AlreadyOwned` when that process takes no clients.
    """
    import asyncio

    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    async def run() -> A:
        async with asyncio.timeout(within_s), reached(place, lasting=lasting) as node:
            return await work(node)

    if isinstance(place, Path):
        check_node(place)
    return run_async(run)


@asynccontextmanager
async def reached(place: Path | str, *, lasting: bool = False) -> "AsyncIterator[Node]":
    """Open the node in a directory, or connect to the one that a process has open there, or that is at an address."""
    import anyio.to_thread

    from streamingnode.errors import Unreachable
    from streamingnode.opening import OWNER_PAUSE_S, connect, open_briefly
    from streamingnode.remote.address import SOCKET_NAME
    from wal.files import OWNER_S_MAX

    name = "streamingnode command"
    async with AsyncExitStack() as closing:
        if isinstance(place, str):
            assert isinstance(place, NodeUrl), "it was parsed"
            tls = await anyio.to_thread.run_sync(place.tls)
            node = await closing.enter_async_context(connect(place, name=name, token_file=place.token_file, tls=tls))
        else:
            until, found = time.monotonic() + OWNER_S_MAX, None
            while found is None:
                try:
                    found = await closing.enter_async_context(open_briefly(place, lasting=lasting))
                except AlreadyOwned as owned:
                    try:
                        found = await closing.enter_async_context(connect(f"unix:{place / SOCKET_NAME}", name=name))
                    except Unreachable:
                        if not owned.brief or time.monotonic() > until:
                            raise owned from None
                        await anyio.sleep(OWNER_PAUSE_S)  # another command, which is opening or closing it
            node = found
        yield node


SPARK: Mapping[str, str] = {"pyspark": "spark", "deltalake": "spark"}
DEMO: Mapping[str, str] = {**SPARK, "psutil": "demo", "matplotlib": "demo"}


def require(packages: Mapping[str, str]) -> None:
    """Return if every package can be imported; the values name the extras they come with. Raises `PackageMissing`."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
