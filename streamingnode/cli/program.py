"""From a command line to an exit code: parse, run, and say how it ended; and what a shell completes
of one.
"""

import argparse
import inspect
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Literal, NoReturn

from streamingnode.cli import care, data, insert, jobs, manage, watch
from streamingnode.cli.command import Command, command, locate, operand
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_OK, Output
from streamingnode.signals import ENDING
from wal.errors import InvalidArgument, StorageFailed, StreamingNodeError, nearest, shown
from wal.files import disk_errors_typed

_FUNCTION = """\
_streamingnode() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    case "$COMP_CWORD:${{COMP_WORDS[1]}}:$current" in
        {cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _streamingnode streamingnode
"""


@command("streamingnode completion bash", "streamingnode completion zsh --json")
def completion(
    output: Output, *, shell: Literal["bash", "zsh"] = operand("whose completion")
) -> None:
    """Print a script that completes commands in a shell.

    Commands, their actions and options; everything else completes as files. For each new shell:
    source <(streamingnode completion bash) in ~/.bashrc, the same with zsh in ~/.zshrc behind
    compinit.
    """
    words = {"1:*": [*(each.name for each in COMMANDS), "--help", "--version"]}
    for each in COMMANDS:
        flags = [name for names, _ in each.arguments for name in names if name.startswith("-")]
        chosen = [
            list(more["choices"])
            for names, more in each.arguments
            if "choices" in more and names[0][0] != "-"
        ]
        words |= {f"*:{each.name}:-*": [*flags, "--json", "--debug", "--help"]}
        words |= {f"2:{each.name}:*": actions for actions in chosen}
    script = _FUNCTION.format(
        cases="\n        ".join(f'{at}) words="{" ".join(words[at])}" ;;' for at in words)
    )
    if shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\n{script}"
    output.document({"shell": shell, "script": script})
    if not output.as_json:
        output.write(script)


VERBS = [
    each for module in (data, insert, manage, jobs, watch, care) for each in vars(module).values()
]
COMMANDS = [*(each for each in VERBS if isinstance(each, Command)), completion]
"""By theme, as the modules have them."""

DESCRIPTION = (
    "A durable, ordered log of rows inside one process that becomes consistent tables in Spark."
)

EPILOG = """\
A node is named by its directory, also while a process has it open, or by the address of a running
one: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT. At an address, every command that takes one
also takes
  --token-file FILE  the token (default: what STREAMINGNODE_TOKEN_FILE names)
  --tls-ca FILE      the authority of tls:// (default: the system's)
  --tls-cert FILE    the certificate to show at tls://
  --tls-key FILE     its key, when that is in another file

exit codes: 0 done; 1 failed, or a check failed; 2 wrong use or input; 3 the data or the
installation is not sound; 4 another process has the node open and takes no clients (an ingest then
took the cuts that were there: its tables are stale), or no node answers; 130, 143 or 129 ended by
SIGINT, SIGTERM or SIGHUP; 141 the reader of the output is gone. Errors go to stderr as
`CODE: message — next step`.

`streamingnode <command> --help` shows examples."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name, that of the
    process by default.
    """
    is_own_process = argv is None
    with ENDING.handling():
        code = _ended(argv, Output())
        if is_own_process and ENDING.number is not None and _is_held_up():
            os._exit(code)
        return code


def _is_held_up() -> bool:
    """Whether the exit would wait for a thread, as for one that writes what nobody reads."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return any(not each.daemon for each in others)


def _ended(argv: Sequence[str] | None, output: Output) -> int:
    """Run one command, and return how it ended."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in range(3):
        # It was closed. With a socket in the place of stdin, stdout or stderr the event loop ends
        # by an abort.
        pass
    os.close(descriptor)
    try:
        return _run(argv, output)
    except BrokenPipeError:
        output.hang_up()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        output.note(ENDING.word)
        return ENDING.exit_code


def _run(argv: Sequence[str] | None, output: Output) -> int:
    words = sys.argv[1:] if argv is None else argv
    debug = False
    output.as_json = "--json" in words  # what cannot be parsed is told as a document, too
    try:
        own = vars(build_parser().parse_args(words))
        chosen = own.pop("command")
        output.as_json = own.pop("as_json")
        debug = own.pop("debug")
        locate(own)
        with disk_errors_typed(chosen.name):
            code: int | None = chosen.run(output, own)
        output.flush()
    except SystemExit:  # --help or --version
        output.flush()
        return EXIT_OK
    except StreamingNodeError as error:
        try:
            output.error(error, debug=debug)
        except StorageFailed as unwritable:  # stdout takes nothing, so stderr has to do
            output.note(f"{unwritable.code}: {unwritable}")
            output.hang_up()
        return error.exit_code
    return code or EXIT_OK


_ALIKE = (
    {"ls", "list"},
    {"rm", "remove", "delete", "drop"},
    {"create", "make", "add", "new"},
    {"info", "show", "describe", "status"},
)
"""What other programs call the same."""
_LIKENESS = 0.6
_COMMAND = "<command>"


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, and what may have been meant."""

    _words: Sequence[str] = ()
    """What it parses, up to a `--`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line up to the command's name; the rest is its own parser's."""
        self._words = [*takewhile(lambda word: word.startswith("-"), args or ())]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # A misspelt option leaves its value behind as an argument, or takes the place of one.
        if message.startswith(("unrecognized arguments", "the following arguments are required")):
            options = [*self._option_string_actions]
            for word in self._words:
                name = word.partition("=")[0]
                is_known = any(each.startswith(name) for each in options)
                if len(name) > 2 and name.startswith("-") and not is_known:
                    self._suggest(f"there is no option {shown(name)}", name, options)
        raise InvalidArgument(f"{message} — see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [*action.choices]
            what = f"{self.prog} has no {action.metavar or action.dest} {shown(value)}"
            if action.metavar == _COMMAND:
                names += self._option_string_actions
                what = f"there is no command {shown(value)}"
            self._suggest(what, value, names)
        super()._check_value(action, value)

    def _suggest(self, what: str, given: str, names: Iterable[str]) -> None:
        """Raise what is wrong with the name that was meant; return where none is like it."""
        alike = next((group for group in _ALIKE if given in group), set[str]())
        near = next((name for name in names if name in alike), None)
        if near is None:
            near = nearest(given, names, likeness=_LIKENESS)
        if near is not None:
            step = f"did you mean {near!r}? `{self.prog} --help` lists all"
            raise InvalidArgument(f"{what} — {step}")


class _CommandParser(_Parser):
    """Takes options between the arguments, too."""

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse what stands behind the command's name; the inner calls are those of the mixing
        itself.
        """
        if self._mixing:
            return argparse.ArgumentParser.parse_known_args(self, args, namespace)
        self._words = [*takewhile("--".__ne__, args or ())]
        options = [word.partition("=")[0] for word in self._words if len(word) > 2]
        if any(map("--node".startswith, options)):
            for action in [
                each for each in self._actions if each.dest == "place" and not each.option_strings
            ]:
                # the option gives it, and the other positionals move up
                self._remove_action(action)
        self._mixing = True
        try:
            return self.parse_intermixed_args(args, namespace), []
        finally:
            self._mixing = False


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # takes as long as all the rest
        from importlib.metadata import PackageNotFoundError, version

        try:
            release = version("streamingnode")
        except PackageNotFoundError:
            release = "(not installed)"
        # which may be None
        parser._print_message(f"streamingnode {release}\n", sys.stdout)  # noqa: SLF001
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole program."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="streamingnode", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show program's version number and exit",
    )
    commands = parser.add_subparsers(
        title="commands", metavar=_COMMAND, required=True, parser_class=_CommandParser
    )
    for each in COMMANDS:
        text = inspect.getdoc(each.function) or ""
        own = commands.add_parser(
            each.name,
            help=text.partition("\n")[0],
            description=text,
            epilog="\n  ".join(["examples:", *each.examples]),
            formatter_class=raw,
        )
        for names, options in each.arguments:
            own.add_argument(*names, **options)
        own.add_argument(
            "--json", action="store_true", dest="as_json", help="print JSON for machines"
        )
        own.add_argument("--debug", action="store_true", help="show the traceback of an error")
        own.set_defaults(command=each)
    return parser
