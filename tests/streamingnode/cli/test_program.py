"""The program as a whole: parsing, help, exit codes, errors, and readers that go away."""

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from streamingnode.cli import main
from tests.parsed_command import COMMANDS, named_by

ROOT = Path(__file__).resolve().parents[3]
INTERRUPTED = """
import sys

class Interrupted:
    def find_spec(name, *_):
        if name == "streamingnode.cli.program":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
import streamingnode.cli
"""
HELP_MODULES_MAX = 180
"""What `--help` may load, the interpreter's own modules with it: they are what its start takes time
for.
"""

EXAMPLES = [(name, each) for name, command in COMMANDS.items() for each in command.examples]


@pytest.mark.parametrize("name, example", EXAMPLES)
def test_example_of_the_help_parses_as_written(name: str, example: str) -> None:
    words = shlex.split(example)
    if "|" in words:  # the part of the pipe that is ours
        start = words.index("streamingnode")
        end = words.index("|", start) if "|" in words[start:] else len(words)
        words = words[start:end]
    assert words[0] == "streamingnode"
    assert named_by(words[1:]) == name


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_with_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert "--json" in shown.partition("Examples:")[2]


def test_help_lines_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("", *COMMANDS, *{name.split()[0] for name in COMMANDS}):
        assert main([*name.split(), "--help"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if len(line) > 120]


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"streamingnode {version('streamingnode')}\n"


def test_unknown_command_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err


def test_typed_error_prints_code_and_next_step_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collection", "ls", str(tmp_path / "absent")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("INVALID_ARGUMENT: ")
    assert " — " in printed.err
    assert "Traceback" not in printed.err


def test_typed_error_is_a_document_with_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "show", str(tmp_path), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert error["retryable"] == "no"


@pytest.mark.parametrize(
    "command, words",
    [
        ("collection ls", []),
        ("collection ls", ["d", "--nope"]),
        ("tail", ["d", "c", "-n", "x"]),
        ("topic", ["nope"]),
        ("topic", []),
        ("", ["nope"]),
        ("", []),
    ],
)
def test_wrong_use_is_one_line_that_names_the_command_and_a_document_with_json(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), *words]
    assert main([*words, "--json"]) == 2
    printed = capsys.readouterr()
    error = json.loads(printed.out)["error"]
    assert printed.err == f"INVALID_ARGUMENT: {error['message']}\n"
    path = f"streamingnode {command}".rstrip()
    assert error["message"].endswith((f" see {path} --help", f"? `{path} --help` lists all"))


@pytest.mark.parametrize(
    "words, wrong, meant",
    [
        (["insertt", "d", "c"], "there is no command 'insertt'", "insert"),
        (["collections", "ls", "d"], "there is no command 'collections'", "collection"),
        (["partitions", "list", "d"], "there is no command 'partitions'", "partition"),
        (["partition", "list", "d"], "streamingnode partition has no action 'list'", "ls"),
        (["ls", "d"], "there is no command 'ls'", "collection ls"),
        (["top", "d"], "there is no command 'top'", "info top"),
        (["config", "show"], "there is no command 'config'", "info config"),
        (["help"], "there is no command 'help'", "--help"),
        (["init", "d"], "there is no command 'init'", "collection create"),
        (["create-collection"], "there is no command 'create-collection'", "collection create"),
        (["inspect", "d"], "there is no command 'inspect'", "info show"),
        (["metrics", "d"], "there is no command 'metrics'", "serve --http"),
        (["version"], "there is no command 'version'", "--version"),
        (["topic", "creat", "d", "t"], "streamingnode topic has no action 'creat'", "create"),
        (["topic", "list", "d"], "streamingnode topic has no action 'list'", "ls"),
        (["topic", "delete", "d", "t"], "streamingnode topic has no action 'delete'", "rm"),
        (["collection", "rm", "d", "c"], "streamingnode collection has no action 'rm'", "drop"),
        (
            ["tail", "d", "c", "-o", "jsno"],
            "invalid value for '-o' / '--output': 'jsno' is not one of 'json', 'table', 'arrow'",
            "json",
        ),
        (["tail", "d", "c", "--limt", "4"], "there is no option '--limt'", "--limit"),
        (["tail", "--limt=4", "d", "c"], "there is no option '--limt'", "--limit"),
        (["insert", "--creat-it"], "there is no option '--creat-it'", "--create"),
        (["collection", "ls", "d", "--jsno"], "there is no option '--jsno'", "--json"),
        (["--verison"], "there is no option '--verison'", "--version"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(
    words: list[str], wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        f"INVALID_ARGUMENT: {wrong} — did you mean '{meant}'? "
    )


@pytest.mark.parametrize(
    "verb, some",
    [
        ("create", "collection create, partition create"),
        ("rm", "collection drop, "),
        ("drop", "partition drop, reader rm"),
    ],
)
def test_an_action_without_its_group_is_answered_with_the_groups(
    verb: str, some: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "d", "orders"]) == 2
    said = capsys.readouterr().err
    assert f"there is no command '{verb}' — choose from " in said
    assert some in said


@pytest.mark.parametrize(
    "words", [["--json", "collection", "ls", "d"], ["collection", "--json", "ls", "d"]]
)
def test_an_option_before_the_action_is_answered_with_where_it_stands(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "there is no option '--json' here: options stand behind the action — as in" in said


def test_a_name_that_is_like_none_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["topic", "frobnicate", "d"]) == 2
    said = capsys.readouterr().err.replace("'", "")
    assert "choose from create, info, ls, rm; see streamingnode topic --help" in said
    assert main(["collection", "ls", "d", "--frobnicate"]) == 2
    assert (
        "there is no option '--frobnicate' — see streamingnode collection ls --help"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words",
    [
        ["serve", ""],
        ["collection", "ls", ""],
        ["check", "--node", ""],
        ["doctor", ""],
        ["restore", "b", ""],
        ["export", "d", ""],
    ],
)
def test_an_empty_name_is_not_the_directory_it_runs_in(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert (
        capsys.readouterr().err == "INVALID_ARGUMENT: '' names no file or directory — give a path\n"
    )
    assert not list(tmp_path.iterdir())


def test_what_it_takes_to_connect_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, there in ((["collection", "ls", "--help"], False), (["--help"], True)):
        assert main(arguments) == 0
        assert ("--tls-ca" in capsys.readouterr().out) is there


def test_path_that_is_no_text_is_in_a_document_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "a\udcff"
    place.mkdir()
    assert main(["doctor", str(place), "--json"]) == 0
    assert f"{place} holds no node yet" in json.loads(capsys.readouterr().out)["facts"]["node"]


@pytest.mark.parametrize(
    "name, code", [("\u00e9t\u00e9", 0), ("a\udcff", 1)], ids=["UTF-8", "no UTF-8"]
)
def test_a_node_is_where_the_bytes_of_its_path_say_whatever_the_locale(
    data: Path, name: str, code: int
) -> None:
    place = data.rename(data.with_name(name))
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command: list[str | Path] = [sys.executable, "-m", "streamingnode", "backup", place, data]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert (b"is not UTF-8, which RocksDB requires of paths" in done.stderr) is bool(code)
    assert data.exists() is not bool(code)


def test_debug_shows_the_traceback_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "show", str(tmp_path), "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_reading_a_missing_directory_makes_none(tmp_path: Path) -> None:
    more = {"tail": ["c"], "insert": ["c"], "ingest": ["--tables", str(tmp_path / "t")]}
    for command in ("collection ls", "info show", "flush", "tail", "insert", "ingest"):
        place = tmp_path / command
        assert main([*command.split(), str(place), *more.get(command, [])]) == 2
        assert not place.exists()


def test_interrupt_before_the_program_is_loaded_exits_with_130_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamingnode.cli.program._run", interrupt)
    assert main([]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["info", "config"], ["--help"]], ids=["command", "help"])
def test_reader_that_goes_away_ends_the_program_quietly(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "streamingnode", *arguments]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()  # long before the program has started
        assert running.stderr.read() == ""
    assert running.returncode in {0, 141}  # where nothing is read, nothing may be noticed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
def test_output_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "streamingnode", "info", "config"]
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("STORAGE_FAILED: the output: No space left")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
def test_an_error_that_cannot_be_told_on_stderr_has_its_exit_code_and_its_document() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "streamingnode", "collection", "ls", "absent", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, text=True, check=False
        )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device")
def test_an_arrow_stream_that_cannot_be_written_is_an_error_without_a_traceback(data: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [
            sys.executable,
            "-m",
            "streamingnode",
            "tail",
            str(data),
            "orders",
            "-o",
            "arrow",
        ]
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("STORAGE_FAILED: the output: No space left")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["check", "tée"], ["info", "show", "té€", "--json"]])
def test_output_is_utf_8_whatever_the_locale(words: list[str]) -> None:
    command = [sys.executable, "-m", "streamingnode", *words]
    locale = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, env=locale)
    assert done.returncode == (0 if words == ["--help"] else 2)
    assert "—" in done.stdout.decode("utf-8")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command, more",
    [
        ("insert", ["c", "/dev/null"]),
        ("info top", []),
        ("tail", ["c", "--follow"]),
        ("collection ls", []),
    ],
)
def test_a_node_that_cannot_be_opened_is_told_once(
    tmp_path: Path, command: str, more: list[str]
) -> None:
    (tmp_path / "backup.json").touch()
    (tmp_path / "floor").touch()
    words = [sys.executable, "-m", "streamingnode", *command.split(), str(tmp_path), *more]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("is a backup") == done.stderr.count("\n") == 1


def test_program_started_with_its_output_closed_works(tmp_path: Path) -> None:
    command = f"{sys.executable} -m streamingnode collection ls {tmp_path} --json >&-"
    done = subprocess.run(
        command, cwd=ROOT, shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert (done.returncode, done.stderr.split(":")[0]) == (2, "INVALID_ARGUMENT")


def test_program_started_with_nothing_open_ends_as_otherwise(data: Path) -> None:
    """uvloop ends the process by an abort when a socket of its own has the place of stdin, stdout
    or stderr.
    """
    command = f"{sys.executable} -m streamingnode collection ls {data} <&- >&- 2>&-"
    assert subprocess.run(command, cwd=ROOT, shell=True, check=False).returncode == 0


def test_path_that_no_file_can_have_is_an_error_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["collection", "ls", "x" * 256]) == 1
    assert capsys.readouterr().err.startswith("STORAGE_FAILED: xxx")


def test_file_in_place_of_a_directory_is_called_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["collection", "ls", str(file)]) == 2
    assert "is a file — " in capsys.readouterr().err


def test_help_loads_few_modules_and_nothing_heavy() -> None:
    heavy = (
        "{'pyarrow', 'anyio', 'rocksdict', 'rich', 'numpy', 'msgspec', 'pyspark', "
        "'importlib.metadata'}"
    )
    program = (
        "import sys; from streamingnode.cli import main; main(['--help']); "
        f"print(len(sys.modules), *{heavy} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules, *found = done.stderr.split()
    assert found == []
    assert int(modules) < HELP_MODULES_MAX
