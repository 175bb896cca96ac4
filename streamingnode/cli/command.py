"""Declaration of commands in click, with examples, `--json`, and one way to name a node."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import wraps
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

import streamingnode as sn
from spark_sink.errors import PackageMissing
from wal.errors import InvalidArgument
from wal.files import check_path, disk_errors_typed

if TYPE_CHECKING:
    import ssl

    from streamingnode.opening import OpenNode

A = TypeVar("A")
Function = TypeVar("Function", bound=Callable[..., Any])


class NodeUrl(str):  # noqa: SLOT000 - few are made
    """The address of a running node, and the files needed to connect to it."""

    token_file: str | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def tls(self) -> "ssl.SSLContext | None":
        """Return the TLS context for `tls://`, None for the system's default. Raises
        `InvalidArgument`; blocks.
        """
        import ssl

        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
            if chain := self.tls_cert or self.tls_key:
                context.load_cert_chain(chain, self.tls_key)
        except OSError as error:  # errors of ssl are `OSError` too
            raise InvalidArgument(
                f"--tls-ca, --tls-cert or --tls-key cannot be used: {error} — correct them"
            ) from None
        return context


Place = Path | NodeUrl
"""A node's directory, or the address of a running node."""


def directory_or_address(text: str) -> Place:
    """Return the address of a running node, which may be the path of its socket, or the path of a
    directory.
    """
    if "://" in text or text.startswith("unix:"):
        return NodeUrl(text)
    return NodeUrl(f"unix:{text}") if Path(text).name == "node.sock" else _path(text)


def _path(text: str) -> Path:
    # refuses '', as from an unset variable of a script, and URLs
    return check_path("file or directory", text)


class _PathType(click.Path):
    """A path, or the result of `convert`. Shells complete it as a file."""

    def __init__(self, convert: Callable[[str], Place]) -> None:
        super().__init__()
        self._convert = convert

    def convert(self, value: Any, param: object, ctx: object) -> Any:
        """Return the path that a text names. Raises `InvalidArgument`."""
        return self._convert(value) if isinstance(value, str) else value


FILE = _PathType(_path)
_PLACE = _PathType(directory_or_address)

DIRECTORY = click.argument("directory", type=FILE, help="The node's directory.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")


class _Connection(click.Option):
    """An option that every command takes with an address; the program's help describes it."""

    def get_help_record(self, ctx: click.Context) -> None:
        """Omit the option from the help of a command."""


_CONNECTION = (
    click.option(
        "--node",
        type=_PLACE,
        metavar="URL|DIR",
        help="The same as an option; streamingnode --help describes the options for an address.",
    ),
    click.option("--token-file", cls=_Connection),
    click.option("--tls-ca", type=FILE, cls=_Connection),
    click.option("--tls-cert", type=FILE, cls=_Connection),
    click.option("--tls-key", type=FILE, cls=_Connection),
)
_BY_OPTION = "streamingnode.by_option"


class Command(click.Command):
    """One command of the program; `examples` are command lines."""

    examples: tuple[str, ...] = ()

    @property
    def speaks(self) -> bool:
        """Whether the command takes a node, by its directory or an address."""
        return any(each.name == "node" for each in self.params)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, without the positional node when `--node` is given."""
        by_option = ctx.meta.get(_BY_OPTION, False)
        return [
            each for each in super().get_params(ctx) if not (by_option and each.name == "place")
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands behind the command's name, and give the place its connection."""
        options = takewhile("--".__ne__, tuple(args))
        ctx.meta[_BY_OPTION] = any(word.partition("=")[0] == "--node" for word in options)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click names no command where an option lacks its value
            raise
        if self.speaks:
            names = ("token_file", "tls_ca", "tls_cert", "tls_key")
            connection = {name: ctx.params.pop(name) for name in names}
            place = ctx.params.pop("node") or ctx.params.get("place")
            if isinstance(place, NodeUrl):
                vars(place).update(connection)
            ctx.params["place"] = place
        return rest

    def invoke(self, ctx: click.Context) -> Any:
        """Call the function. Raises `StorageFailed` for what a disk refuses, too."""
        with disk_errors_typed(str(self.name)):
            return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they are typed."""
        with formatter.section("Examples"):
            for each in self.examples:
                formatter.write(f"  {each}\n")


class Group(click.Group):
    """Commands by name."""

    def verb(self, name: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
        """Declare a function as a command of this group; it is called with the `Output` and its
        arguments.
        """

        def declare(function: Callable[..., Any]) -> Command:
            made = click.command(name, cls=Command)(click.pass_obj(function))
            made.examples = examples
            made.params += _COMMON
            self.add_command(made)
            return made

        return declare

    def leaves(self, *names: str) -> Iterator[tuple[str, Command]]:
        """Yield each command with the words that name it, as `topic ls`."""
        for name, each in sorted(self.commands.items()):
            if isinstance(each, Group):
                yield from each.leaves(*names, name)
            elif isinstance(each, Command):
                yield " ".join((*names, name)), each


def _as_json(ctx: click.Context, _: object, value: Any) -> None:
    ctx.obj.as_json = value


def _debug(ctx: click.Context, _: object, value: Any) -> None:
    ctx.obj.debug = value


_COMMON = (
    click.Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=_as_json,
        help="Print JSON for machines.",
    ),
    click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=_debug,
        help="Show the traceback of an error.",
    ),
)

PROGRAM = Group(
    "streamingnode",
    no_args_is_help=False,
    context_settings={"max_content_width": 100},
    help="A durable, ordered log of rows inside one process that becomes consistent tables in "
    "Spark.",
)
"""The modules of this package add their commands to it."""


def group(name: str, text: str) -> Group:
    """Add a group of commands to the program; `text` is its help."""
    made = Group(name, help=text, no_args_is_help=False)
    PROGRAM.add_command(made)
    return made


def at_place(*, required: bool = True) -> Callable[[Function], Function]:
    """Give a command the parameter `place`: a node's directory or address, positional or by
    `--node`.
    """
    text = (
        "The node's directory, whether or not a process has it open, or the address of a running "
        "one, as tcp://host:port."
    )

    def declare(function: Function) -> Function:
        for each in reversed(_CONNECTION):
            function = each(function)
        argument = click.argument(
            "place",
            type=_PLACE,
            required=required,
            metavar="NODE" if required else "[NODE]",
            help=text,
        )
        return argument(function)

    return declare


def at_node(function: Callable[..., Awaitable[object]]) -> Callable[..., Any]:
    """Wrap a coroutine function so that it is called with the open node of the command's
    `place`.
    """

    @wraps(function)
    def run(output: object, *, place: Place, **given: Any) -> Any:
        return with_node(place, lambda node: function(output, node, **given))

    return at_place()(run)


def with_node(
    place: Place,
    work: "Callable[[sn.Node], Awaitable[A]]",
    *,
    lasting: bool = False,
    within_s: float | None = None,
    may_be_new: bool = False,
) -> A:
    """Run `work` with a node, opened in its directory or as a client of the process that has it
    open, and return its result.

    `lasting` work hands the directory over to a service that requests it, and continues as its
    client. Raises `TimeoutError` when opening and work together take longer than `within_s`
    seconds.

    Raises `InvalidArgument` when there is no node, unless it `may_be_new`, `AlreadyOwned` when the
    process that has it open takes no clients.
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
    """Return the context manager that connects to the node at an address or opens the one in a
    directory.
    """
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
    """Raise `PackageMissing` unless every package can be imported; the values name the extras that
    install them.
    """
    for package, extra in packages.items():
        if find_spec(package) is None:
            raise PackageMissing(package, extra)
