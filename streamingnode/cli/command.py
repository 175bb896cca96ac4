"""How a command is declared: its help with examples, its arguments, and the function that does it."""

import argparse
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spark_sink.errors import PackageMissing
from streamingnode.cli.output import EXIT_OK, Output

if TYPE_CHECKING:
    from streamingnode.node import Node

A = TypeVar("A")
Argument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the program: `function` is called with its arguments by name; None is the exit code of success.

    `examples` are complete command lines; `details` says what the summary leaves out. Of the arguments in a list one at
    most may be given.
    """

    name: str
    summary: str
    details: str
    examples: tuple[str, ...]
    arguments: tuple[Argument | list[Argument], ...]
    function: Callable[..., int | None]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments on a parser."""
        for each in self.arguments:
            group = parser.add_mutually_exclusive_group() if isinstance(each, list) else parser
            for names, options in each if isinstance(each, list) else [each]:
                group.add_argument(*names, **options)

    def run(self, given: argparse.Namespace, output: Output) -> int:
        """Do it with what was parsed. Raises typed errors."""
        own = {name: value for name, value in vars(given).items() if name not in {"command", "as_json", "debug"}}
        return self.function(output, **own) or EXIT_OK


def command(
    *arguments: Argument | list[Argument], examples: tuple[str, ...]
) -> Callable[[Callable[..., int | None]], Command]:
    """Make a function a command of its name; its docstring is the help."""

    def declare(function: Callable[..., int | None]) -> Command:
        summary, _, details = inspect.cleandoc(function.__doc__ or function.__name__).partition("\n\n")
        return Command(
            name=function.__name__,
            summary=f"{summary[0].lower()}{summary[1:].rstrip('.')}",
            details=details,
            examples=examples,
            arguments=arguments,
            function=function,
        )

    return declare


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
