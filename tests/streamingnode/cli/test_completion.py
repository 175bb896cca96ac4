"""What a shell completes with the script that `completion` prints: in a real bash, and in zsh and fish where they are."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamingnode.cli.program import COMMANDS, build_parser, words_of

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
    assert set(completed(bash, "")) == {command.name for command in COMMANDS} | {"--help", "--version"}
    assert completed(bash, "reader", "") == ["ls", "seek", "rm"]
    assert completed(bash, "tail", "data", "orders", "--f") == ["--from", "--follow"]
    assert completed(bash, "tail", "data", "orders", "-o", "") == ["json", "table", "arrow"]
    assert completed(bash, "tail", "data", "orders", "-o", "t") == ["table"]
    assert "--node" in completed(bash, "check", "-")
    assert completed(bash, "insert", "data", "") == [], "files, by default"
    assert completed(bash, "nothing", "-") == []


def test_bash_uses_the_script_for_the_program(bash: Path) -> None:
    asked = f'source "{bash}"; complete -p streamingnode'
    shown = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True).stdout
    assert shown == "complete -o default -F _streamingnode streamingnode\n"


def test_every_option_of_every_command_is_completed() -> None:
    found = {words.command: words for words in words_of(build_parser())}
    assert set(found) == {command.name for command in COMMANDS}
    for command in COMMANDS:
        options = {name for names, _ in command.arguments for name in names if name.startswith("-")}
        assert options | {"--json", "--help"} <= set(found[command.name].options)
    assert found["tail"].values["--output"] == ["json", "table", "arrow"]
    assert found["txn"].actions == ["ls", "abort"]


@pytest.mark.parametrize(
    "shell, check", [("zsh", ["zsh", "-n"]), ("fish", ["fish", "--no-execute"]), ("bash", ["bash", "-n"])]
)
def test_the_script_of_a_shell_has_no_mistake_of_its_grammar(tmp_path: Path, shell: str, check: list[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    (tmp_path / "script").write_text(script_of(shell))
    done = subprocess.run([*check, tmp_path / "script"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_offers_commands_and_what_they_do(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish: apt-get install fish")
    (tmp_path / "script").write_text(script_of("fish"))
    asked = "source script; complete -C 'streamingnode ta'; complete -C 'streamingnode txn '"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert {"tail", "ls", "abort"} <= {line.partition("\t")[0] for line in done.stdout.splitlines()}


def test_fish_has_a_line_for_each_option_with_its_help_quoted() -> None:
    lines = script_of("fish").splitlines()
    assert "complete -c streamingnode -n __fish_use_subcommand -f -a tail" in lines
    (output,) = [line for line in lines if "from tail'" in line and " -l output " in line]
    assert " -x -a 'json table arrow' -d " in output
    assert {tuple(shlex.split(line)[:3]) for line in lines} == {("complete", "-c", "streamingnode")}
