"""How large the project is: lines, files, doors, settings, errors. A bound may only go down; beside
it stands its aim.

Who needs more room takes it from another row, or says in the commit why the project has to grow.
"""

import ast
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.ownership import ROOT_PACKAGES
from wal.append import AppendTicket, Pack
from wal.rocks.log import RocksLog

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parent.parent
# a file is a chapter
LINES_MIN = 40
LINES_MAX = 500
SHORT_BY_NATURE = {"__init__.py", "__main__.py"}  # what a package is, and how it starts


class Budget(NamedTuple):
    """What holds today, and what shall hold."""

    bound: int
    target: int


LINES = {
    "wal": Budget(7_988, 7_000),
    "interceptors": Budget(3_086, 3_086),
    "scanner": Budget(1_117, 1_117),
    "flusher": Budget(2_585, 2_500),
    "spark_sink": Budget(2_801, 2_801),
    "streamingnode": Budget(16_515, 13_500),
}
LINES_IN_ALL = Budget(34_092, 32_000)
FILES = Budget(175, 159)
SETTINGS = Budget(55, 55)
ERROR_CLASSES = Budget(35, 34)  # an unknown reader is not found as a collection is not

COROUTINES_MAX = 10

DOORS = {
    "insert": Budget(32, 32),
    "insert of a batch": Budget(34, 34),
    "upsert": Budget(34, 34),
    "transaction": Budget(34, 34),
    "read": Budget(22, 22),
    "cut": Budget(42, 42),
    "open": Budget(48, 48),
}
"""Files that one operation passes through; see `tests.doors`."""


def product_files() -> Iterator[Path]:
    for package in ROOT_PACKAGES:
        # generated
        yield from (
            path for path in (ROOT / package).rglob("*.py") if not path.name.endswith("_pb2.py")
        )


def own_files() -> Iterator[Path]:
    yield from product_files()
    for folder in ("tests", "bench"):
        yield from (ROOT / folder).rglob("*.py")


@cache
def length(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@pytest.fixture(scope="module")
def doors() -> dict[str, int]:
    """Measure in a process of its own: the profiler of this one may be taken, and imports are part
    of an operation.
    """
    command = [sys.executable, "-m", "tests.doors", "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(said.stdout)
    return {operation: len(files) for operation, files in found.items()}


@pytest.mark.parametrize("package", LINES)
def test_a_package_has_no_more_lines_than_its_budget(package: str) -> None:
    assert (
        sum(length(path) for path in product_files() if path.is_relative_to(ROOT / package))
        <= LINES[package].bound
    )


def test_every_package_of_the_product_has_a_budget() -> None:
    assert sorted(LINES) == sorted(ROOT_PACKAGES)


def test_the_product_has_no_more_lines_than_its_budget() -> None:
    assert sum(length(path) for path in product_files()) <= LINES_IN_ALL.bound


def test_the_product_has_no_more_files_than_its_budget() -> None:
    assert len(list(product_files())) <= FILES.bound


def test_no_python_file_outgrows_its_chapter() -> None:
    assert not [path.relative_to(ROOT) for path in own_files() if length(path) > LINES_MAX]


def test_no_file_of_the_product_is_shorter_than_a_chapter() -> None:
    """Those of tests mirror what they test, and some of that takes few lines to test."""
    short = [
        path
        for path in product_files()
        if length(path) < LINES_MIN and path.name not in SHORT_BY_NATURE
    ]
    assert not [path.relative_to(ROOT) for path in short]


@pytest.mark.parametrize("operation", DOORS)
def test_an_operation_passes_through_no_more_files_than_its_budget(
    operation: str, doors: dict[str, int]
) -> None:
    assert doors[operation] <= DOORS[operation].bound, "python -m tests.doors --list names them"


@pytest.mark.may_block  # it imports the node
async def test_few_coroutines_are_nested_between_the_caller_of_an_insert_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    append = RocksLog.append

    def counted(log: RocksLog, pack: Pack) -> AppendTicket:
        stack = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        own = [
            code
            for code in stack
            if any(code.co_filename.startswith(f"{ROOT / name}/") for name in ROOT_PACKAGES)
        ]
        depths.append(sum(bool(code.co_flags & inspect.CO_COROUTINE) for code in own))
        return append(log, pack)

    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection(
            "orders", pa.schema([pa.field("id", pa.int64())]), primary_key="id"
        )
        # the first of a collection goes by another task, where others may join it
        for number in range(3):
            await node.insert("orders", [{"id": number}])
        monkeypatch.setattr(RocksLog, "append", counted)
        await node.insert("orders", [{"id": 9}])
    assert depths[0] <= COROUTINES_MAX


def test_every_operation_that_is_walked_has_a_budget(doors: dict[str, int]) -> None:
    assert sorted(doors) == sorted(DOORS)


def test_there_are_no_more_settings_than_the_budget_has() -> None:
    assert len(sn.load_config().origins()) <= SETTINGS.bound


def test_there_are_no_more_error_classes_than_the_budget_has() -> None:
    assert len(error_classes()) <= ERROR_CLASSES.bound


def error_classes() -> set[str]:
    """Return the errors a user may meet, by following base classes; nothing has to be imported."""
    parents = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    found = {sn.StreamingNodeError.__name__}
    while more := {name for name, bases in parents.items() if bases & found} - found:
        found |= more
    return found


def test_every_bound_is_on_its_way_to_its_target() -> None:
    single = {
        "lines": LINES_IN_ALL,
        "files": FILES,
        "settings": SETTINGS,
        "errors": ERROR_CLASSES,
    }
    assert not [
        name for name, budget in (LINES | DOORS | single).items() if budget.bound < budget.target
    ]
