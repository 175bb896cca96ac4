"""From a command line to an exit code: parse, run, and say how it ended."""

import argparse
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from streamingnode.cli import (
    bench,
    care,
    config,
    demo,
    flush,
    ingest,
    insert,
    ls,
    partitions,
    tail,
)
from streamingnode.cli.command import Command
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, Output
from wal.errors import StorageFailed, StreamingNodeError, escaped

COMMANDS: tuple[Command, ...] = (
    demo.COMMAND,
    ls.COMMAND,
    care.INFO,
    partitions.COMMAND,
    insert.COMMAND,
    tail.COMMAND,
    flush.COMMAND,
    ingest.COMMAND,
    care.VERIFY,
    care.BACKUP,
    care.RESTORE,
    care.EXPORT,
    care.DOCTOR,
    bench.COMMAND,
    config.COMMAND,
)

DESCRIPTION = "A durable, ordered log of rows inside one process that becomes consistent tables in Spark."

EXIT_CODES = """\
exit codes: 0 done; 1 failed, or a check failed; 2 wrong use or input; 3 the data or the installation is not sound;
4 another process has the node open; 130 interrupted. Errors go to stderr as `CODE: message — next step`."""


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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, whatever is in it; parsers of commands are of this kind, too."""

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


def build_parser(commands: Iterable[Command] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of the whole program."""
    parser = _Parser(
        prog="streamingnode",
        description=DESCRIPTION,
        epilog=f"{EXIT_CODES}\n\n`streamingnode <command> --help` shows examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamingnode {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="<command>", required=True, parser_class=_MixedParser)
    for command in commands:
        _add_command(subparsers, command)
    return parser


class _MixedParser(_Parser):
    """A command's parser: options may stand between its arguments, too."""

    _mixing = False

    def parse_known_args(  # type: ignore[override]  # its overloads say no more
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse what stands behind the command's name; the inner calls are those of the mixing itself."""
        if self._mixing:
            return super().parse_known_args(args, namespace)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def _add_command(subparsers: "argparse._SubParsersAction[_MixedParser]", command: Command) -> None:
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = subparsers.add_parser(
        command.name,
        help=command.summary,
        description=f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{command.details}",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON for machines")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=command)


def _run(argv: Sequence[str] | None, output: Output) -> int:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as ended:  # --help, --version, or wrong use, which argparse has explained
        output.flush()
        return ended.code if isinstance(ended.code, int) else 1
    command: Command = arguments.command
    output.as_json = arguments.as_json
    try:
        code = command.run(arguments, output)
        output.flush()
    except StreamingNodeError as error:
        return _failed(error, arguments, output)
    return code


def _failed(error: StreamingNodeError, arguments: argparse.Namespace, output: Output) -> int:
    try:
        output.error(error, debug=arguments.debug)
    except StorageFailed as unwritable:  # stdout takes nothing, so stderr has to do
        output.note(f"{unwritable.code}: {unwritable}")
        output.hang_up()
    return error.exit_code


def _version() -> str:
    try:
        return version("streamingnode")
    except PackageNotFoundError:  # a source tree that was never installed
        return "(not installed)"
