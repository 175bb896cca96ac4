"""The demo for real: processes of this machine, RocksDB, Spark; and it must fail when a table
lies.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamingnode.cli import main
from streamingnode.demo import Check, DemoResult

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """One demo of three seconds, in a process of its own."""
    directory = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "streamingnode", "demo", "--seconds", "3", "--json"]
    done = subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


def test_tables_hold_exactly_what_was_acknowledged(demo: tuple[Path, dict[str, object]]) -> None:
    _, result = demo
    assert result["passed"] is True
    assert isinstance(result["checks"], list)
    assert len(result["checks"]) >= 2
    assert isinstance(result["samples"], int)
    assert result["samples"] > 0


def test_it_was_killed_while_a_round_was_written_and_has_that_once(
    demo: tuple[Path, dict[str, object]],
) -> None:
    _, result = demo
    killed = result["killed_round"]
    assert isinstance(killed, int)
    assert isinstance(result["rounds"], int)
    assert 0 < killed <= result["rounds"]
    assert isinstance(result["away_s"], float)
    assert result["away_s"] > 0
    assert isinstance(result["checks"], list)
    found = {check["what"]: check["passed"] for check in result["checks"]}
    assert found[f"round {killed}, killed while it was written, is there once"]


def test_what_it_says_to_try_next_works_as_printed(demo: tuple[Path, dict[str, object]]) -> None:
    directory, result = demo
    assert isinstance(result["next"], list)
    assert len(result["next"]) == 3
    for command in result["next"]:
        done = subprocess.run(
            command,
            shell=True,
            cwd=directory,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_picture_is_a_picture(demo: tuple[Path, dict[str, object]]) -> None:
    directory, result = demo
    picture = (directory / str(result["picture"])).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "streamingnode.cli.command.find_spec", lambda name: None if name == "psutil" else object()
    )
    assert main(["demo", "--dir", str(tmp_path / "demo")]) == 3
    assert ".[demo]" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_directory_of_somebody_else_is_refused_before_sampling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    assert "--dir" in capsys.readouterr().err


def test_failed_check_exits_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = DemoResult(
        rounds=1,
        samples=2,
        cuts=1,
        checks=(Check("live", False, 1),),
        top=(),
    )
    monkeypatch.setattr("streamingnode.demo.run_demo", lambda *_: failed)
    assert main(["demo", "--dir", str(tmp_path / "demo")]) == 1
    assert "FAIL  live (1 row)" in capsys.readouterr().out
