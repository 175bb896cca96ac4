"""From a command line to an exit code: parse, run, and say how it ended; and what a shell completes of one."""

import argparse
import inspect
import os
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any, Literal, NamedTuple, NoReturn

from streamingnode.cli import care, data, insert, jobs, manage, watch
from streamingnode.cli.command import CONNECTION, Command, command, locate, operand
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_OK, Output
from wal.errors import StorageFailed, StreamingNodeError, escaped
from wal.files import disk_errors_typed


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
    words = words_of(build_parser())
    script = _fish(words) if shell == "fish" else _bash(words)
    if shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
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
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in range(3):
        pass  # It was closed. With a socket in the place of stdin, stdout or stderr the event loop ends by an abort.
    os.close(descriptor)
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
        with disk_errors_typed(chosen.name):
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


class Words(NamedTuple):
    """What may follow a command: its options with their help, the choices of its first argument, and of each option."""

    command: str
    options: dict[str, str]
    actions: list[str]
    values: dict[str, list[str]]


def words_of(parser: argparse.ArgumentParser) -> list[Words]:
    """Return what may follow each command of a parser."""
    (commands,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001
    found = []
    for name, each in commands.choices.items():
        taken = each._actions  # noqa: SLF001 - argparse has no other way to see what a parser takes
        flags = [(flag, action) for action in taken for flag in action.option_strings]
        options = {flag: (action.help or "").partition(";")[0] for flag, action in flags}
        values = {flag: list(action.choices) for flag, action in flags if action.choices}
        actions = [list(action.choices) for action in taken if action.choices and not action.option_strings]
        found.append(Words(name, options, actions[0] if actions else [], values))
    return found


_FUNCTION = """\
_streamingnode() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$COMP_CWORD:$current" in
        1:*) words="{commands} --help --version" ;;
        *:-*) case "${{COMP_WORDS[1]}}" in
{options}
        esac ;;
        *) case "${{COMP_WORDS[1]}}:$previous" in
{values}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _streamingnode streamingnode
"""


def _bash(words: list[Words]) -> str:
    options = {each.command: list(each.options) for each in words}
    values = {
        f"{each.command}:{previous}": choices
        for each in words
        for previous, choices in {each.command: each.actions, **each.values}.items()
        if choices
    }

    def cases(found: dict[str, list[str]]) -> str:
        return "\n".join(f'            {name}) words="{" ".join(words)}" ;;' for name, words in found.items())

    return _FUNCTION.format(commands=" ".join(options), options=cases(options), values=cases(values))


def _fish(words: list[Words]) -> str:
    lines = []
    for each in words:
        lines.append(f"complete -c streamingnode -n __fish_use_subcommand -f -a {each.command}")
        seen = f"complete -c streamingnode -n '__fish_seen_subcommand_from {each.command}'"
        lines += [f"{seen} -a '{' '.join(each.actions)}'"] if each.actions else []
        for option, text in each.options.items():
            kind = "-l" if option.startswith("--") else "-s"
            choices = f" -x -a '{' '.join(each.values[option])}'" if option in each.values else ""
            lines.append(f"{seen} {kind} {option.lstrip('-')}{choices} -d {shlex.quote(text)}")
    return "\n".join([*lines, ""])
