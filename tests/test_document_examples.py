"""Examples in the documents that no other test runs: settings, commands, and blocks of Python, each
as it is written.
"""

import logging
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import streamingnode as sn
from tests.parsed_command import named_by

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN_ELSEWHERE = {
    "README.md": "test_programs",
    "docs/guide.md": "test_guide",
    "docs/spark.md": "test_spark_page",
}


def blocks(kind: str) -> Iterator[tuple[str, str]]:
    """Yield (page, text) of every block of a kind."""
    for page in PAGES:
        for found, text in BLOCK.findall(page.read_text("utf-8")):
            if found == kind:
                yield page.relative_to(ROOT).as_posix(), text


PROGRAMS = [each for each in blocks("python") if each[0] not in RUN_ELSEWHERE]
COMMANDS = sorted(
    {
        (page, line.partition("#")[0].strip())
        for page, text in blocks("")
        for line in text.replace("\\\n", "").splitlines()
        if line.startswith("streamingnode ")
    }
)


@pytest.mark.parametrize("page, block", PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_block_of_python_runs_as_written(
    page: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [settings] = [text for of, text in blocks("toml") if of == "docs/configuration.md"]
    (tmp_path / "node.toml").write_text(settings)
    root = logging.getLogger()
    level = root.level
    try:
        exec(compile(block, page, "exec"), {"sn": sn})
    finally:
        root.setLevel(level)


def test_settings_of_the_documents_are_settings(tmp_path: Path) -> None:
    [settings] = [text for page, text in blocks("toml") if page == "docs/configuration.md"]
    file = tmp_path / "node.toml"
    file.write_text(settings)
    config = sn.load_config(file=file)
    assert (
        config.flush.schedule.interval_s
        == tomllib.loads(settings)["flush"]["schedule"]["interval_s"]
    )
    [(name, value)] = re.findall(
        r"`(STREAMINGNODE_\w+)=(\d+)`", (ROOT / "docs" / "configuration.md").read_text("utf-8")
    )
    assert sn.load_config(environment={name: value}).flush.schedule.interval_s == float(value)


@pytest.mark.parametrize("page, command", COMMANDS, ids=[command for _, command in COMMANDS])
def test_command_of_a_page_parses_as_written(page: str, command: str) -> None:
    assert named_by(shlex.split(command)[1:]) in command, page
