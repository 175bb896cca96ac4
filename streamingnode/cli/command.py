"""How a command is declared: its help with examples, its arguments, and the function that does it."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spark_sink.errors import PackageMissing
from streamingnode.care.inspect import check_node
from streamingnode.errors import Unreachable
from streamingnode.node import Node
from streamingnode.opening import connect, handed_over, open_briefly, run_async
from streamingnode.remote.address import SOCKET_NAME
from wal.errors import AlreadyOwned

A = TypeVar("A")

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
_SCHEMES = ("unix:", "tcp://", "tls://")


def directory_or_address(text: str) -> Path | str:
    """Return the address of a running node as it is, or the path of a directory."""
    return text if text.startswith(_SCHEMES) else Path(text)


PLACE = argument(
    "place",
    metavar="directory",
    type=directory_or_address,
    help="the node's directory, whether or not a process has it open, or the address of a running one, as tcp://host:port",
)


def with_node(place: Path | str, work: Callable[[Node], Awaitable[A]], *, lasting: bool = False) -> A:
    """Return what `work` makes of a node: opened in its directory, or as a client of the process that has it open.

    Work that is `lasting` goes on as a client of a service that wants the directory meanwhile.

    Raises `InvalidArgument` when there is none, `AlreadyOwned` when that process takes no clients.
    """

    async def run() -> A:
        async with reached(place, lasting=lasting) as node:
            return await work(node)

    if isinstance(place, Path):
        check_node(place)
    return run_async(run)


@asynccontextmanager
async def reached(place: Path | str, *, lasting: bool = False) -> AsyncIterator[Node]:
    """Open the node in a directory, or connect to the one that a process has open there, or that is at an address."""
    name = "streamingnode command"
    async with AsyncExitStack() as closing:

        async def reach(directory: Path) -> Node:
            try:
                return await closing.enter_async_context(open_briefly(directory, lasting=lasting))
            except AlreadyOwned as owned:
                try:
                    return await closing.enter_async_context(connect(f"unix:{directory / SOCKET_NAME}", name=name))
                except Unreachable:
                    raise owned from None  # by another command perhaps, which is opening or closing it

        if isinstance(place, Path):
            yield await handed_over(place, partial(reach, place))
        else:
            token_file = os.environ.get(TOKEN_FILE_VARIABLE)
            yield await closing.enter_async_context(connect(place, name=name, token_file=token_file))


SPARK: Mapping[str, str] = {"pyspark": "spark", "deltalake": "spark"}
DEMO: Mapping[str, str] = {**SPARK, "psutil": "demo", "matplotlib": "demo"}


def require(packages: Mapping[str, str]) -> None:
    """Return if every package can be imported; the values name the extras they come with. Raises `PackageMissing`."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
