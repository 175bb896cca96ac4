"""`docs/commands.md` as the program writes it: `python -m tests.commands_page` prints it."""

import click

from tests.parsed_command import COMMANDS

HEAD = """\
# Commands

Every command of `streamingnode`, written from the program itself. `streamingnode COMMAND --help`
has all examples. Every command takes `--json` for one JSON document on stdout, and `--debug`, which
shows the traceback of an error. NODE is a node's directory, also while a process has it open, or
the address of a running node; `--node` takes it, too. `--token-file`, `--tls-ca`, `--tls-cert` and
`--tls-key` go with an address, see [operations](operations.md#commands-and-nodes).
"""
COMMON = {"--json", "--debug", "--node", "--token-file", "--tls-ca", "--tls-cert", "--tls-key"}


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(section(name, command) for name, command in COMMANDS.items())


def section(name: str, command: click.Command) -> str:
    """Return what the page says of one command: what it does, an example, and its arguments."""
    summary, _, _ = (command.help or "").partition("\n\n")
    example = getattr(command, "examples", ("",))[0].replace(" --primary", " \\\n    --primary")
    text = f"\n## {name}\n\n{summary}\n\n```\n{example}\n```\n"
    context = click.Context(command, info_name=name)
    rows = [
        (term, told)
        for each in command.params
        if not COMMON & set(each.opts) and each.name != "place"
        for term, told in [described(each, context)]
    ]
    if rows:
        text += "\n| takes | |\n|---|---|\n"
        text += "".join(f"| `{term}` | {told} |\n" for term, told in rows)
    return text


def described(parameter: click.Parameter, context: click.Context) -> tuple[str, str]:
    """Return how a parameter is typed, and its help."""
    if isinstance(parameter, click.Option):
        record = parameter.get_help_record(context)
        assert record is not None
        term, told = record[0], record[1].replace("  [", " [")
    else:
        term = parameter.make_metavar(context)
        told = getattr(parameter, "help", None) or ""
    return term.replace("|", "\\|"), told.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
