"""A node directory with something in it, and the program as a function."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamingnode.cli import main

Run = Callable[..., "Printed"]


class Printed:
    """What one run of the program left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def document(self) -> dict[str, object]:
        """The one JSON document on stdout."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def lines(self) -> list[dict[str, object]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program with these arguments."""

    def run_program(*arguments: object) -> Printed:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Printed(code, printed.out, printed.err)

    return run_program


@pytest.fixture
def data(tmp_path: Path, run: Run) -> Path:
    """A node with the collection `orders` (two shards, three rows), made by the program itself."""
    rows = tmp_path / "orders.jsonl"
    rows.write_text('{"id": 1, "item": "tea"}\n{"id": 2, "item": "milk"}\n{"id": 3, "item": "salt"}\n')
    path = tmp_path / "data"
    made = run("insert", path, "orders", rows, "--create", "--primary-key", "id", "--shards", "2")
    assert made.code == 0, made.err
    return path
