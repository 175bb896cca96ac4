"""From a command line to an exit code: parse, load the command, run it, and say how it ended."""

import argparse
import inspect
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn

from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_OK, Output
from wal.errors import StorageFailed, StreamingNodeError, escaped

if TYPE_CHECKING:
    from streamingnode.cli.command import Command

COMMANDS = {
    "demo": ("machine", "This machine's processes, through a node, into checked tables."),
    "ls": ("data", "List a node's collections: primary key, shards, partitions, columns."),
    "info": ("care", "Show a node's identity, owner, ticks, cuts, readers, leases and topics."),
    "partitions": ("data", "List, create or drop the partitions of a collection."),
    "topic": ("topics", "Create, list, remove or show the topics of a node."),
    "group": ("topics", "List, show, move or remove the consumer groups of a topic."),
    "bridge": ("topics", "Bring the messages of a topic into a collection, each exactly once."),
    "insert": ("insert", "Insert rows from JSON lines or Parquet."),
    "tail": ("data", "Print the messages of a collection as JSON lines."),
    "flush": ("data", "Make a cut: everything acknowledged goes to files."),
    "ingest": ("data", "Bring a node's cuts into Spark tables, each exactly once."),
    "verify": ("care", "Read everything a node has and check it against every checksum, count and order."),
    "backup": ("care", "Copy a node into a new directory and verify the copy."),
    "restore": ("care", "Make a node directory out of a backup and verify it."),
    "export": ("care", "Write the rows of each collection as Parquet, of a damaged node what can be read."),
    "doctor": ("care", "Check machine, installation and directory; say what to do."),
    "serve": ("machine", "Run a node for other processes, in the foreground."),
    "bench": ("machine", "Measure durable inserts into a temporary node."),
    "config": ("machine", "Show every setting, its value, and where that comes from."),
}
"""The module of each command, and what it does: the help is there at once, a module loads all that its commands use."""

DESCRIPTION = "A durable, ordered log of rows inside one process that becomes consistent tables in Spark."

EPILOG = """\
exit codes: 0 done; 1 failed, or a check failed; 2 wrong use or input; 3 the data or the installation is not sound;
4 another process has the node open and takes no clients, or no node answers; 130 interrupted. Errors go to stderr as
`CODE: message — next step`.

`streamingnode <command> --help` shows examples."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name, that of the process by default."""
    output = Output()
    try:
        return _run(argv, output)
    except BrokenPipeError:
        output.hang_up()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        output.note("interrupted")
        return EXIT_INTERRUPTED


def _run(argv: Sequence[str] | None, output: Output) -> int:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as ended:  # --help, --version, or wrong use, which argparse has explained
        output.flush()
        return ended.code if isinstance(ended.code, int) else 1
    own = vars(arguments)
    command, output.as_json, debug = own.pop("command"), own.pop("as_json"), own.pop("debug")
    try:
        code: int | None = command.function(output, **own)
        output.flush()
    except StreamingNodeError as error:
        try:
            output.error(error, debug=debug)
        except StorageFailed as unwritable:  # stdout takes nothing, so stderr has to do
            output.note(f"{unwritable.code}: {unwritable}")
            output.hang_up()
        return error.exit_code
    return code or EXIT_OK


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, whatever is in it."""

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


class _CommandParser(_Parser):
    """Knows the arguments of its command once that is the one, and takes options between them, too."""

    command = ""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what stands behind the command's name; the inner calls are those of the mixing itself."""
        if not self.command:
            return super().parse_known_args(args, namespace)
        command, self.command = load(self.command), ""
        self.description = inspect.cleandoc(command.function.__doc__ or "")
        self.epilog = "\n  ".join(["examples:", *command.examples])
        for names, options in command.arguments:
            self.add_argument(*names, **options)
        self.add_argument("--json", action="store_true", dest="as_json", help="print JSON for machines")
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")
        self.set_defaults(command=command)
        return self.parse_known_intermixed_args(args, namespace)


def load(name: str) -> "Command":
    """Return a command, with its module and all that this loads."""
    module, _ = COMMANDS[name]
    command: Command = getattr(import_module(f"streamingnode.cli.{module}"), name)
    return command


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole program."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="streamingnode", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"streamingnode {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True, parser_class=_CommandParser)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, formatter_class=raw).command = name
    return parser


def _version() -> str:
    with suppress(PackageNotFoundError):
        return version("streamingnode")
    return "(not installed)"
