"""What a shell completes with the script that `completion` prints: in a real bash, and in zsh where
that is.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamingnode.cli.program import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
ASK = """
source "$0"
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_streamingnode
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
    command = ["bash", "--norc", "-uc", ASK, str(bash), "streamingnode", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_actions_options_and_choices(bash: Path) -> None:
    assert completed(bash, "to") == ["topic", "top"]
    assert set(completed(bash, "")) == {command.name for command in COMMANDS} | {
        "--help",
        "--version",
    }
    assert completed(bash, "reader", "") == ["ls", "seek", "rm"]
    assert completed(bash, "tail", "data", "orders", "--f") == ["--from", "--follow"]
    assert "--node" in completed(bash, "check", "-")
    assert completed(bash, "insert", "data", "") == [], "files, by default"
    assert completed(bash, "nothing", "-") == []


def test_bash_uses_the_script_for_the_program(bash: Path) -> None:
    asked = f'source "{bash}"; complete -p streamingnode'
    shown = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True
    ).stdout
    assert shown == "complete -o default -F _streamingnode streamingnode\n"


def test_every_option_of_every_command_is_completed(bash: Path) -> None:
    for command in COMMANDS:
        options = {name for names, _ in command.arguments for name in names if name.startswith("-")}
        assert options | {"--json", "--help"} <= set(completed(bash, command.name, "-"))


@pytest.mark.parametrize("shell", ["zsh", "bash"])
def test_the_script_of_a_shell_has_no_mistake_of_its_grammar(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    (tmp_path / "script").write_text(script_of(shell))
    done = subprocess.run(
        [shell, "-n", tmp_path / "script"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
