"""What a shell completes with the script that `completion` prints: in a real bash, and in zsh where
that is.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.parsed_command import COMMANDS, options_of

ROOT = Path(__file__).resolve().parents[3]
ASK = """
source "$0"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
compopt() { printf 'as %s %s\\n' "$@"; }
_streamingnode_completion streamingnode
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script_of(shell: str) -> str:
    command = [sys.executable, "-m", "streamingnode", "completion", shell]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bash") / "completion.bash"
    file.write_text(script_of("bash"))
    return file


def completed(bash: Path, *words: str) -> list[str]:
    """Return what bash completes the last word to."""
    program = bash.parent / "streamingnode"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m streamingnode "$@"\n')
        program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bash.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", "--norc", "-uc", ASK, str(bash), "streamingnode", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_commands_actions_options_and_choices(bash: Path) -> None:
    assert completed(bash, "to") == ["topic"]
    assert set(completed(bash, "")) == {name.split()[0] for name in COMMANDS}
    assert completed(bash, "-") == ["--version", "--help"]
    assert completed(bash, "reader", "") == ["ls", "rm", "seek"]
    assert completed(bash, "tail", "data", "orders", "--f") == ["--from", "--follow"]
    assert completed(bash, "tail", "data", "orders", "-o", "") == ["json", "table", "arrow"]
    assert completed(bash, "completion", "") == ["bash", "zsh", "fish"]
    assert "--node" in completed(bash, "check", "-")
    assert completed(bash, "insert", "")[0] == "as -o default", "files"
    assert completed(bash, "verify", "--tables", "")[0] == "as -o default", "files"


def test_bash_uses_the_script_for_the_program(bash: Path) -> None:
    asked = f'source "{bash}"; complete -p streamingnode'
    shown = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True
    ).stdout
    assert shown == "complete -o nosort -F _streamingnode_completion streamingnode\n"


def test_every_option_of_every_command_is_completed() -> None:
    for name, command in COMMANDS.items():
        context = click.Context(command, info_name=name)
        offered = {each.value for each in command.shell_complete(context, "-")}
        assert offered == options_of(command)


@pytest.mark.parametrize("shell", ["zsh", "bash", "fish"])
def test_the_script_of_a_shell_has_no_mistake_of_its_grammar(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    (tmp_path / "script").write_text(script_of(shell))
    done = subprocess.run(
        [shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
