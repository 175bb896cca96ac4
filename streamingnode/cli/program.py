"""Runs a command line: parses it, runs the command, reports errors and returns the exit code."""

import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import get_completion_class, shell_complete

from streamingnode.cli import care, data, insert, jobs, manage, topics, watch
from streamingnode.cli.command import PROGRAM, Group
from streamingnode.cli.output import EXIT_BROKEN_PIPE, EXIT_OK, Output
from streamingnode.signals import ENDING
from wal.errors import InvalidArgument, StorageFailed, StreamingNodeError, nearest, shown
from wal.files import disk_errors_typed

CHAPTERS = (data, insert, manage, topics, jobs, watch, care)
"""The modules whose import adds commands to the program."""

_COMPLETE = "_STREAMINGNODE_COMPLETE"
"""The environment variable by which a shell's completion script requests completions."""

PROGRAM.epilog = """\
\b
A node is named by its directory, also while a process has it open, or by the
address of a running one: unix:PATH, tcp://HOST:PORT or tls://HOST:PORT. At an
address, every command that takes one also takes
  --token-file FILE  the token (default: what STREAMINGNODE_TOKEN_FILE names)
  --tls-ca FILE      the authority of tls:// (default: the system's)
  --tls-cert FILE    the certificate to show at tls://
  --tls-key FILE     its key, when that is in another file

Exit codes: 0 done; 1 failed, or a check failed; 2 wrong use or input; 3 the data or the
installation is not sound; 4 another process has the node open and takes no clients (an ingest then
took the cuts that were there: its tables are stale), or no node answers; 130, 143 or 129 ended by
SIGINT, SIGTERM or SIGHUP; 141 the reader of the output is gone. Errors go to stderr as
`CODE: message — next step`.

`streamingnode COMMAND --help` shows examples."""


def _show_version(context: click.Context, _: object, value: Any) -> None:
    if not value:
        return
    # imported here: it takes as long as all other imports
    from importlib.metadata import PackageNotFoundError, version

    try:
        release = version("streamingnode")
    except PackageNotFoundError:
        release = "(not installed)"
    click.echo(f"streamingnode {release}")
    context.exit()


PROGRAM.params.append(
    click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_show_version,
        help="Show the version and exit.",
    )
)


@PROGRAM.verb("completion", "streamingnode completion bash", "streamingnode completion zsh --json")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="Whose completion.")
def completion(output: Output, shell: str) -> None:
    """Print a script that completes commands in a shell.

    It completes commands, their actions, options and choices; everything else completes as files.
    For each new shell: source <(streamingnode completion bash) in ~/.bashrc, the same with zsh in
    ~/.zshrc after compinit, and streamingnode completion fish | source in
    ~/.config/fish/config.fish.
    """
    complete = get_completion_class(shell)
    assert complete is not None, "click has the shells that are choices"
    asking = complete(PROGRAM, {}, "streamingnode", _COMPLETE)
    # its `source()` would start a bash to get its version
    script = asking.source_template % asking.source_vars()
    output.document({"shell": shell, "script": script})
    if not output.as_json:
        output.write(f"{script}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` excludes the program's name and defaults to
    the process's arguments.
    """
    is_own_process = argv is None
    with ENDING.handling():
        code = _ended(argv, Output())
        if is_own_process and ENDING.number is not None and _is_held_up():
            os._exit(code)
        return code


def _is_held_up() -> bool:
    """Whether the exit would wait for a thread, such as one that writes to a pipe without a
    reader.
    """
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    return any(not each.daemon for each in others)


def _ended(argv: Sequence[str] | None, output: Output) -> int:
    """Run one command, and return its exit code."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in range(3):
        # The stream was closed. If a socket took the number of stdin, stdout or stderr, the event
        # loop would abort.
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
    words = sys.argv[1:] if argv is None else [*argv]
    output.as_json = "--json" in words  # parse errors are printed as a document too
    try:
        if asked := os.environ.get(_COMPLETE):
            return shell_complete(PROGRAM, {"obj": output}, "streamingnode", _COMPLETE, asked)
        code = _called(words, output)
        output.flush()
    except StreamingNodeError as error:
        try:
            output.error(error)
        except StorageFailed as unwritable:  # stdout cannot be written: use stderr
            output.note(f"{unwritable.code}: {unwritable}")
            output.hang_up()
        return error.exit_code
    return code or EXIT_OK


def _called(words: list[str], output: Output) -> int | None:
    """Call the command of a command line. Raises the command's errors, and `InvalidArgument`."""
    try:
        with (
            disk_errors_typed("the output"),
            PROGRAM.make_context("streamingnode", words, obj=output) as context,
        ):
            code: int | None = PROGRAM.invoke(context)
    except click.exceptions.Exit as ended:  # --help or --version
        return ended.exit_code
    except click.UsageError as error:
        raise _misuse(error) from error
    return code


_MOVED = {
    "config": "info config",
    "create-collection": "collection create",
    "help": "--help",
    "init": "collection create",
    "inspect": "info show",
    "list": "collection ls",
    "ls": "collection ls",
    "metrics": "serve --http",
    "partitions": "partition",
    "show": "info show",
    "status": "info show",
    "top": "info top",
    "version": "--version",
}
"""Other programs' names of commands, and names that users expect."""
_ALIKE = (
    {"ls", "list"},
    {"rm", "remove", "delete", "drop"},
    {"create", "make", "add", "new"},
    {"info", "show", "describe", "status"},
)
"""Other programs' names of the same actions."""
_LIKENESS = 0.7


def _misuse(error: click.UsageError) -> InvalidArgument:
    """Return the error of a command line, with what the user may have meant."""
    path = error.ctx.command_path if error.ctx else "streamingnode"
    text = error.format_message().rstrip(".")
    wrong = f"{text[:1].lower()}{text[1:]}"
    meant = None
    match error:
        case click.NoSuchOption():
            wrong = f"there is no option {shown(error.option_name)}"
            meant = nearest(error.option_name, error.possibilities or (), likeness=_LIKENESS)
            if error.option_name in _options_of_actions(error.ctx):
                return InvalidArgument(
                    f"{wrong} here: options stand behind the action — as in `streamingnode "
                    f"collection ls data --json`; see {path} --help"
                )
        case click.exceptions.NoSuchCommand():
            return _no_such(error.command_name, path, error.ctx)
        case click.BadParameter(param=click.Parameter(type=click.Choice(choices=choices))):
            given = error.message.partition(" is not ")[0].strip("'")
            meant = nearest(given, choices, likeness=_LIKENESS)
        case _:
            pass
    step = f"see {path} --help"
    if meant is not None:
        step = f"did you mean {meant!r}? `{path} --help` lists all"
    return InvalidArgument(f"{wrong} — {step}")


def _options_of_actions(context: click.Context | None) -> set[str]:
    """Return the options of all commands of a group; none where the context is of a command."""
    if context is None or not isinstance(context.command, Group):
        return set()
    params = [each for _, leaf in context.command.leaves() for each in leaf.params]
    return {name for each in params for name in each.opts}


def _no_such(name: str, path: str, context: click.Context | None) -> InvalidArgument:
    """Return the error of a command, or an action of a group, that does not exist."""
    assert context is not None, "click names the group"
    assert isinstance(context.command, click.Group)
    names = context.command.list_commands(context)
    wrong = f"there is no command {shown(name)}"
    meant = _MOVED.get(name)
    alike = next((group for group in _ALIKE if name in group), frozenset[str]())
    if context.parent is None and meant is None and alike:
        leaves = [each for each, _ in PROGRAM.leaves() if each.split()[-1] in alike]
        return InvalidArgument(f"{wrong} — choose from {', '.join(leaves)}; see {path} --help")
    if context.parent is not None:
        wrong = f"{path} has no action {shown(name)}"
        meant = next((each for each in names if each in alike), None)
    meant = meant or nearest(name, names, likeness=_LIKENESS)
    if meant is not None:
        return InvalidArgument(f"{wrong} — did you mean {meant!r}? `{path} --help` lists all")
    if context.parent is not None:
        return InvalidArgument(f"{wrong} — choose from {', '.join(names)}; see {path} --help")
    return InvalidArgument(f"{wrong} — see {path} --help")
