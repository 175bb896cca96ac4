"""How a command is declared: its help with examples, its arguments, and the function that does it."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_sink.errors import PackageMissing

if TYPE_CHECKING:
    from streamingnode.node import Node

A = TypeVar("A")
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


def with_node(directory: Path, work: "Callable[[Node], Awaitable[A]]") -> A:
    """Open the node in `directory`, and return what `work` makes of it. Raises `InvalidArgument` when there is none."""
    from streamingnode.care.inspect import check_node
    from streamingnode.opening import open_node, run_async

    async def run() -> A:
        async with open_node(directory) as node:
            return await work(node)

    check_node(directory)
    return run_async(run)


SPARK: Mapping[str, str] = {"pyspark": "spark", "deltalake": "spark"}
DEMO: Mapping[str, str] = {**SPARK, "psutil": "demo", "matplotlib": "demo"}


def require(packages: Mapping[str, str]) -> None:
    """Return if every package can be imported; the values name the extras they come with. Raises `PackageMissing`."""
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
