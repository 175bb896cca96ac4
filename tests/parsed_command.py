"""A command line as the program parses it, without running the command."""

from collections.abc import Sequence

import click

from streamingnode.cli.command import PROGRAM, Command
from streamingnode.cli.output import Output
from streamingnode.cli.program import CHAPTERS

assert CHAPTERS, "they add the commands to the program"

COMMANDS: dict[str, Command] = dict(PROGRAM.leaves())
"""Every command by the words that name it, as `topic ls`."""


def parsed(words: Sequence[str]) -> click.Context:
    """Return the context of the command that these words name. Raises `UsageError`."""
    context = PROGRAM.make_context("streamingnode", [*words], obj=Output())
    while isinstance(context.command, click.Group):
        left = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, left)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


def named_by(words: Sequence[str]) -> str:
    """Return the name of the command that these words name."""
    return parsed(words).command_path.removeprefix("streamingnode ")


def options_of(command: Command) -> set[str]:
    """Return the options of a command as they are typed."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    return {name for each in options for name in each.opts} | {"--help"}
