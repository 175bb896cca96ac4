"""How densely the product is written, and how many doors one operation passes through.

Lines may grow; statements and decisions grow only with a feature, and doors do not grow. A bound
that a feature needs is raised in its commit, with the reason. No bound is met by folding code:
that is what the decisions per 100 lines and the width are for. Beside each bound stands its aim.
"""

import ast
import inspect
import json
import re
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
from tests.density import WIDTH, Density, density_of, product_files
from wal.append import AppendTicket, Pack
from wal.rocks.log import RocksLog

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parent.parent
LINES_MIN = 40
LINES_MAX = 600  # a file is a chapter
LONGER = {
    "spark_sink/table.py": 610,
    "streamingnode/demo.py": 690,
    "streamingnode/remote/server.py": 660,
}
"""Chapters that wait to be divided; these bounds only go down."""
SHORT_BY_NATURE = {"__init__.py", "__main__.py"}  # what a package is, and how it starts


class Budget(NamedTuple):
    """The bound today, and where it shall go."""

    bound: int
    target: int


DENSITY = {
    # 139 are the blocking client, 260 are topics on the contract of entry logs, in two stores,
    # 33 a store that is opened for reading, 100 the replies that a node keeps for its clients, 23
    # checks of a delivery and of dead letters after a wait or a failed write, 29 what the command
    # line answers to a mistake
    "statements": Budget(18_100, 14_000),
    "decisions": Budget(6_430, 5_200),
    "tuple_assignments": Budget(10, 10),
    "awaits": Budget(970, 800),  # 25 are one loop for all who reach a directory
}
DECISIONS_PER_100_LINES = Budget(15, 11)

SETTINGS = Budget(55, 55)  # `log.kind` names where the log is
ERROR_CLASSES = Budget(35, 34)  # an unknown reader is not found as a collection is not

COROUTINES_MAX = 10

DOORS = {
    "insert": Budget(32, 30),
    "insert of a batch": Budget(34, 31),
    "upsert": Budget(34, 30),
    "transaction": Budget(34, 31),
    "read": Budget(23, 23),
    "cut": Budget(43, 41),  # the contract of entry logs
    "open": Budget(50, 47),  # who gets a directory, and what a log of entries is, have a file
}
"""Files that one operation passes through; see `tests.doors`."""

PACKAGE_CHANGES = {
    "insert": Budget(32, 20),
    "read": Budget(180, 60),
    "cut": Budget(140, 60),
}
"""Calls on the event loop from one package into another during one operation."""


def own_files() -> Iterator[Path]:
    yield from product_files()
    for folder in ("tests", "bench"):
        yield from (ROOT / folder).rglob("*.py")


@cache
def length(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


@pytest.fixture(scope="module")
def density() -> Density:
    return density_of(product_files())


@pytest.fixture(scope="module")
def doors() -> dict[str, dict[str, int]]:
    """Measure in another process: the profiler of this one may be taken."""
    command = [sys.executable, "-m", "tests.doors", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    figures: dict[str, dict[str, int]] = json.loads(result.stdout)
    return figures


@pytest.mark.parametrize("figure", DENSITY)
def test_the_product_keeps_its_budget(figure: str, density: Density) -> None:
    assert getattr(density, figure) <= DENSITY[figure].bound, "python -m tests.density shows where"


def test_the_product_is_not_folded(density: Density) -> None:
    assert density.decisions_per_100_lines <= DECISIONS_PER_100_LINES.bound


def test_no_python_file_outgrows_its_chapter() -> None:
    def lines_max(path: Path) -> int:
        return LONGER.get(path.relative_to(ROOT).as_posix(), LINES_MAX)

    assert not [path.relative_to(ROOT) for path in own_files() if length(path) > lines_max(path)]


def test_no_file_of_the_product_is_shorter_than_a_chapter() -> None:
    """Files of tests mirror what they test, and some of that takes few lines to test."""
    short = [
        path.relative_to(ROOT)
        for path in product_files()
        if length(path) < LINES_MIN and path.name not in SHORT_BY_NATURE
    ]
    assert not short


@pytest.mark.parametrize("operation", DOORS)
def test_an_operation_passes_through_no_more_files_than_its_budget(
    operation: str, doors: dict[str, dict[str, int]]
) -> None:
    found = doors[operation]["files"]
    assert found <= DOORS[operation].bound, "python -m tests.doors --list names them"


@pytest.mark.parametrize("operation", PACKAGE_CHANGES)
def test_an_operation_changes_packages_no_more_often_than_its_budget(
    operation: str, doors: dict[str, dict[str, int]]
) -> None:
    assert doors[operation]["package changes"] <= PACKAGE_CHANGES[operation].bound


@pytest.mark.may_block  # it imports the node
async def test_few_coroutines_are_nested_between_the_caller_of_an_insert_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    append = RocksLog.append

    def is_own(filename: str) -> bool:
        return any(filename.startswith(f"{ROOT / name}/") for name in ROOT_PACKAGES)

    def counted(log: RocksLog, pack: Pack) -> AppendTicket:
        stack = [frame.f_code for frame, _ in traceback.walk_stack(None)]
        own = [code for code in stack if is_own(code.co_filename)]
        depths.append(sum(bool(code.co_flags & inspect.CO_COROUTINE) for code in own))
        return append(log, pack)

    schema = pa.schema([pa.field("id", pa.int64())])
    async with sn.open_node(tmp_path / "node") as node:
        await node.create_collection("orders", schema, primary_key="id")
        # The first insert of a collection goes by another task, where others may join it.
        for number in range(3):
            await node.insert("orders", [{"id": number}])
        monkeypatch.setattr(RocksLog, "append", counted)
        await node.insert("orders", [{"id": 9}])
    assert depths[0] <= COROUTINES_MAX


def test_every_operation_that_is_walked_has_a_budget(doors: dict[str, dict[str, int]]) -> None:
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
        "decisions per 100 lines": DECISIONS_PER_100_LINES,
        "settings": SETTINGS,
        "errors": ERROR_CLASSES,
    }
    budgets = [*DENSITY.items(), *DOORS.items(), *PACKAGE_CHANGES.items(), *single.items()]
    assert not [name for name, budget in budgets if budget.bound < budget.target]


# --- width ----------------------------------------------------------------------------------------

ADDRESS = re.compile(r"https?://|\]\(")
PRAGMA = re.compile(r"\s*# (noqa|type: ignore)\b.*$")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a document outside of its blocks of code."""
    is_code = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line


def wide_lines(path: Path) -> list[str]:
    """Return the lines over the width, but for rows of tables and lines with a link or a URL.

    A comment for a tool at the end of a line cannot stand elsewhere and is not counted.
    """
    is_code = path.suffix == ".py"
    lines = enumerate(path.read_text("utf-8").splitlines(), 1) if is_code else prose(path)
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for number, line in lines
        if len(PRAGMA.sub("", line)) > WIDTH
        and not line.lstrip().startswith("|")
        and not ADDRESS.search(line)
    ]


def test_no_line_of_code_is_wider_than_the_width() -> None:
    assert not [line for path in own_files() for line in wide_lines(path) if "_pb2" not in line]


def test_no_line_of_a_document_is_wider_than_the_width() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("findings/*.md")]
    assert not [line for path in pages for line in wide_lines(path)]
