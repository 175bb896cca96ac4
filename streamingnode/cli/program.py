"""From a command line to an exit code: parse, run, and say how it ended."""

import argparse
import inspect
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any, Literal, NoReturn

from streamingnode.cli import care, data, insert, jobs, manage, watch
from streamingnode.cli.command import CONNECTION, Command, command, locate, operand
from streamingnode.cli.completion import script_for
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_OK, Output
from wal.errors import StorageFailed, StreamingNodeError, escaped


@command(
    "streamingnode completion bash",
    "streamingnode completion fish | source",
    "streamingnode completion zsh --json",
)
def completion(output: Output, *, shell: Literal["bash", "zsh", "fish"] = operand("whose completion")) -> None:
    """Print a script that completes commands in a shell.

    Commands, their options, and what those choose from; everything else completes as files. For each new shell:
    source <(streamingnode completion bash) in ~/.bashrc, the same with zsh in ~/.zshrc behind compinit, and
    streamingnode completion fish | source in ~/.config/fish/config.fish.
    """
    script = script_for(shell, build_parser())
    output.document({"shell": shell, "script": script})
    if not output.as_json:
        output.write(script)


VERBS = [each for module in (data, insert, manage, jobs, watch, care) for each in vars(module).values()]
COMMANDS = [*(each for each in VERBS if isinstance(each, Command)), completion]
"""By theme, as the modules have them."""

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
    chosen, output.as_json, debug = own.pop("command"), own.pop("as_json"), own.pop("debug")
    locate(own)
    try:
        code: int | None = chosen.run(output, own)
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
    """Takes options between the arguments, too."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what stands behind the command's name; the inner calls are those of the mixing itself."""
        if self._mixing:
            return super().parse_known_args(args, namespace)
        words = takewhile("--".__ne__, args or ())
        if any(len(word) > 2 and "--node".startswith(word.partition("=")[0]) for word in words):
            for action in [each for each in self._actions if each.dest == "place" and not each.option_strings]:
                self._remove_action(action)  # the option gives it, and the other positionals move up
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole program."""
    raw = argparse.RawDescriptionHelpFormatter
    try:
        release = version("streamingnode")
    except PackageNotFoundError:
        release = "(not installed)"
    parser = _Parser(prog="streamingnode", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"streamingnode {release}")
    commands = parser.add_subparsers(title="commands", metavar="<command>", required=True, parser_class=_CommandParser)
    node = _CommandParser(add_help=False)
    connection = node.add_argument_group("the node")
    for name, parameter in CONNECTION.items():
        names, options = parameter.argument(name, str)
        connection.add_argument(*names, **options)
    for each in COMMANDS:
        text = inspect.getdoc(each.function) or ""
        own = commands.add_parser(
            each.name,
            help=text.partition("\n")[0],
            description=text,
            epilog="\n  ".join(["examples:", *each.examples]),
            formatter_class=raw,
            parents=[node] if any(names == ("place",) for names, _ in each.arguments) else [],
        )
        for names, options in each.arguments:
            own.add_argument(*names, **options)
        own.add_argument("--json", action="store_true", dest="as_json", help="print JSON for machines")
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
        own.set_defaults(command=each)
    return parser
