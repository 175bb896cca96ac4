"""`streamingnode completion`: a script that completes commands, options and their choices in a shell, made of the parser."""

import argparse
import shlex
from typing import NamedTuple

from streamingnode.cli.command import argument, command
from streamingnode.cli.output import Output


class Words(NamedTuple):
    """What may follow a command: its options with their help, the choices of its first argument, and of each option."""

    command: str
    options: dict[str, str]
    actions: list[str]
    values: dict[str, list[str]]


@command(
    argument("shell", choices=["bash", "zsh", "fish"], help="whose completion"),
    examples=(
        "streamingnode completion bash",
        "streamingnode completion fish | source",
        "streamingnode completion zsh --json",
    ),
)
def completion(output: Output, *, shell: str) -> None:
    """Print a script that completes commands in a shell.

    Commands, their options, and what those choose from; everything else completes as files. For each new shell:
    source <(streamingnode completion bash) in ~/.bashrc, the same with zsh in ~/.zshrc behind compinit, and
    streamingnode completion fish | source in ~/.config/fish/config.fish.
    """
    from streamingnode.cli.program import build_parser

    words = words_of(build_parser())
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words)
    output.document({"shell": shell, "script": script})
    if not output.as_json:
        output.write(script)


def words_of(parser: argparse.ArgumentParser) -> list[Words]:
    """Return what may follow each command of a parser."""
    found = []
    for of in [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]:  # noqa: SLF001
        for name, each in of.items():
            options, actions, values = dict[str, str](), list[str](), dict[str, list[str]]()
            for action in each._actions:  # noqa: SLF001 - argparse has no other way to see what a parser takes
                options |= dict.fromkeys(action.option_strings, (action.help or "").partition(";")[0])
                choices = list(map(str, action.choices or ()))
                values |= dict.fromkeys(action.option_strings, choices) if choices else {}
                actions = actions or ([] if action.option_strings else choices)
            found.append(Words(name, options, actions, values))
    return found


_FUNCTION = """\
_streamingnode() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
        1:*) words="{commands} --help --version" ;;
{actions}
    esac
    case "${{COMP_WORDS[1]}}:$previous" in
{values}
        *) if [[ "$current" == -* ]]; then
            case "${{COMP_WORDS[1]}}" in
{options}
            esac
        fi ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _streamingnode streamingnode
"""


def _bash(words: list[Words]) -> str:
    return _FUNCTION.format(
        commands=" ".join(each.command for each in words),
        actions="\n".join(
            f'        2:{each.command}) words="{" ".join(each.actions)}" ;;' for each in words if each.actions
        ),
        values="\n".join(
            f'        {each.command}:{option}) words="{" ".join(choices)}" ;;'
            for each in words
            for option, choices in each.values.items()
        ),
        options="\n".join(f'                {each.command}) words="{" ".join(each.options)}" ;;' for each in words),
    )


def _zsh(words: list[Words]) -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash(words)}"


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
