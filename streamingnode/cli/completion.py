"""A script that completes commands, options and their choices in a shell, made of the parser."""

import argparse
import shlex
from typing import NamedTuple


class Words(NamedTuple):
    """What may follow a command: its options with their help, the choices of its first argument, and of each option."""

    command: str
    options: dict[str, str]
    actions: list[str]
    values: dict[str, list[str]]


def script_for(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for `bash`, `zsh` or `fish`."""
    words = words_of(parser)
    if shell == "fish":
        return _fish(words)
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(words)}" if shell == "zsh" else _bash(words)


def words_of(parser: argparse.ArgumentParser) -> list[Words]:
    """Return what may follow each command of a parser."""
    (commands,) = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]  # noqa: SLF001
    found = []
    for name, each in commands.choices.items():
        taken = each._actions  # noqa: SLF001 - argparse has no other way to see what a parser takes
        flags = [(flag, action) for action in taken for flag in action.option_strings]
        options = {flag: (action.help or "").partition(";")[0] for flag, action in flags}
        values = {flag: list(map(str, action.choices)) for flag, action in flags if action.choices}
        actions = [list(map(str, action.choices)) for action in taken if action.choices and not action.option_strings]
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
