"""How a command is declared: a function whose parameters are its arguments and whose docstring is
its help, and examples.
"""

import os
from argparse import SUPPRESS
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import streamingnode as sn
from spark_sink.errors import PackageMissing
from wal.errors import InvalidArgument
from wal.files import check_path

if TYPE_CHECKING:
    import ssl

    from streamingnode.cli.output import Output
    from streamingnode.opening import OpenNode

A = TypeVar("A")

Argument = tuple[tuple[str, ...], dict[str, Any]]


class NodeUrl(str):  # noqa: SLOT000 - few are made
    """The address of a running node, and the files that it takes to connect to it."""

    token_file: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def tls(self) -> "ssl.SSLContext | None":
        """Return how `tls://` is spoken, None for the system's way. Raises `InvalidArgument`;
        blocks.
        """
        import ssl

        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if chain := self.tls_cert or self.tls_key:
                context.load_cert_chain(chain, self.tls_key)
        except OSError as error:  # one of ssl is one, too
            raise InvalidArgument(
                f"--tls-ca, --tls-cert or --tls-key cannot be used: {error} — correct them"
            ) from None
        return context


Place = Path | NodeUrl
"""A node's directory, or where a running one is."""


class Parameter(NamedTuple):
    """What is said of a parameter that is an argument: its names, none if it is positional, and
    what argparse takes.

    Its type says the rest, and where an action is chosen, `takes` names the arguments that each of
    them takes.
    """

    names: tuple[str, ...]
    options: dict[str, Any]
    takes: Mapping[str, str] = {}

    def argument(self, name: str, kind: Any) -> Argument:
        """Return the arguments of `ArgumentParser.add_argument` for a parameter of this name and
        type.
        """
        optional = NoneType in (kinds := get_args(kind))
        bare = next(each for each in kinds if each is not NoneType) if optional else kind
        made: dict[str, Any] = {"type": _path if bare is Path else bare} if bare is not str else {}
        if bare is bool:
            made = {"action": "store_true"}
        elif get_origin(bare) is Literal:
            made = {"choices": list(get_args(bare))}
        elif get_origin(bare) is list:
            made = {"action": "append", "default": []} if self.names else {"nargs": "*"}
        if not self.names:
            return (name,), (
                {"nargs": "?"} if optional or "default" in self.options else {}
            ) | made | self.options
        return tuple(each or f"--{name.replace('_', '-')}" for each in self.names), {
            "dest": name
        } | made | self.options


def operand(text: str, **options: Any) -> Any:
    """Declare a parameter to be a positional argument; `text` is its help."""
    return Parameter((), {"help": text, **options})


def option(text: str, *names: str, **options: Any) -> Any:
    """Declare a parameter to be an option, of its own name unless others are given; `text` is its
    help.
    """
    return Parameter(names or ("",), {"help": text, **options})


def actions(**takes: str) -> Any:
    """Declare a parameter to be what is done, and which arguments each action takes, in brackets
    what it may take.
    """
    return Parameter((), {"help": "what to do", "choices": list(takes)}, takes)


def directory_or_address(text: str) -> Place:
    """Return the address of a running node, as its socket is, or the path of a directory."""
    if "://" in text or text.startswith("unix:"):
        return NodeUrl(text)
    return NodeUrl(f"unix:{text}") if Path(text).name == "node.sock" else _path(text)


def _path(text: str) -> Path:
    # none is '', as of an unset variable of a script, and none a URL
    return check_path("file or directory", text)


NODE = operand("the node's directory")
DRY_RUN = option("say what would be done, and change nothing")
PLACE = operand(
    "the node's directory, whether or not a process has it open, or the address of a running one, "
    "as tcp://host:port",
    metavar="directory",
    type=directory_or_address,
)
CONNECTION: Mapping[str, Parameter] = {
    "place": option(
        "the same, in place of it; streamingnode --help has what else an address takes",
        "--node",
        metavar="URL|DIR",
        type=directory_or_address,
    ),
    "token_file": option(SUPPRESS),
    **dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), option(SUPPRESS, type=Path)),
}
"""All but the first are told of once, by the program's own help."""


class Command(NamedTuple):
    """One command of the program: its name is that of the function, its docstring the help;
    examples are command lines.

    A coroutine function is called with the open `node`, where others have its `place` or none. Of
    each action `takes` names the arguments, in brackets those that may be left out.
    """

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]
    takes: Mapping[str, str]

    @property
    def name(self) -> str:
        """What the program calls it."""
        return self.function.__name__

    def run(self, output: "Output", given: dict[str, Any]) -> int | None:
        """Do it, and return the exit code, None for success. Raises `InvalidArgument` for what an
        action does not take.
        """
        if self.takes:
            chosen = self.takes[given["action"]].split()
            known = {
                _name(word): given[_name(word)]
                for all_ in self.takes.values()
                for word in all_.split()
            }
            there = {
                name
                for name, value in known.items()
                if value is not None and value is not False and value != []
            }
            if (
                not {_name(word) for word in chosen if word[0] != "["}
                <= there
                <= set(map(_name, chosen))
            ):
                takes = " ".join(chosen) or "nothing more"
                raise InvalidArgument(
                    f"{given['action']} takes {takes} — see streamingnode {self.name} --help"
                )
        code: int | None
        if "node" in self.function.__annotations__:
            code = with_node(
                given.pop("place"), lambda node: self.function(output, node=node, **given)
            )
        else:
            code = self.function(output, **given)
        return code


def _name(word: str) -> str:
    return word.strip("[]-").replace("-", "_")


def command(*examples: str, fields: type | None = None) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command of its name: its parameters with a `Parameter` as default are
    arguments, or `fields`.

    So is `place`, a node's directory or address, and in its place `node`.
    """

    def declare(function: Callable[..., Any]) -> Command:
        defaults = dict(vars(fields) if fields else getattr(function, "__kwdefaults__", None) or {})
        defaults |= {"node": PLACE, "place": PLACE}
        kinds = (fields or function).__annotations__
        declared = {
            name: defaults[name] for name in kinds if isinstance(defaults.get(name), Parameter)
        }
        arguments = [
            parameter.argument("place" if name == "node" else name, kinds[name])
            for name, parameter in declared.items()
        ]
        if not declared.keys().isdisjoint({"node", "place"}):
            arguments += [parameter.argument(name, str) for name, parameter in CONNECTION.items()]
        takes: Mapping[str, str] = next(
            (parameter.takes for parameter in declared.values() if parameter.takes), {}
        )
        return Command(function, tuple(arguments), examples, takes)

    return declare


def locate(arguments: dict[str, Any]) -> None:
    """Give the place among parsed arguments the options of its connection, and take those out."""
    if "place" in arguments:
        for name in CONNECTION.keys() - {"place"}:
            value = arguments.pop(name)
            if isinstance(arguments["place"], NodeUrl):
                setattr(arguments["place"], name, value)


def with_node(
    place: Place,
    work: "Callable[[sn.Node], Awaitable[A]]",
    *,
    lasting: bool = False,
    within_s: float | None = None,
    may_be_new: bool = False,
) -> A:
    """Return what `work` makes of a node: opened in its directory, or as a client of the process
    that has it open.

    Work that is `lasting` hands the directory over to a service that asks for it, and goes on as
    its client. Opening and work together raise `TimeoutError` after `within_s` seconds.

    Raises `InvalidArgument` when there is none, unless it `may_be_new`, `AlreadyOwned` when that
    process takes no clients.
    """
    import asyncio

    from streamingnode.care.inspect import check_node
    from streamingnode.opening import run_async

    async def run() -> A:
        async with (
            asyncio.timeout(within_s),
            await open_place(place, lasting=lasting) as node,
        ):
            return await work(node)

    if isinstance(place, Path) and not may_be_new:
        check_node(place)
    return run_async(run)


async def open_place(place: Place, *, lasting: bool = False) -> "OpenNode":
    """Return what connects to the node at an address, or reaches the one in a directory."""
    import anyio.to_thread

    from streamingnode.config import TOKEN_FILE_VARIABLE
    from streamingnode.opening import visit_node

    if not isinstance(place, NodeUrl):
        return visit_node(place, lasting=lasting)
    tls = await anyio.to_thread.run_sync(place.tls)
    token_file = place.token_file or os.environ.get(TOKEN_FILE_VARIABLE) or None
    return sn.connect(place, name="streamingnode command", token_file=token_file, tls=tls)


SPARK: Mapping[str, str] = {"pyspark": "spark", "deltalake": "spark"}
DEMO: Mapping[str, str] = {**SPARK, "psutil": "demo", "matplotlib": "demo"}


def require(packages: Mapping[str, str]) -> None:
    """Return if every package can be imported; the values name the extras they come with. Raises
    `PackageMissing`.
    """
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
