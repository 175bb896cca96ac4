"""The errors as callers meet them: few, importable from one place, told apart by their codes, each
with a next step.
"""

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import streamingnode as sn
from interceptors.errors import ProducerFenced, SchemaMismatch, SequenceTooOld
from scanner.deliver_policy import ReaderBusy
from spark_sink.errors import PackageMissing
from streamingnode.ownership import ROOT_PACKAGES
from wal.errors import (
    AlreadyOwned,
    Corrupt,
    Ends,
    StorageFull,
    StreamingNodeError,
    Truncated,
    ends_of,
)

ROOT = Path(__file__).resolve().parents[2]
DASH = " — "
CLASSES_MAX = 36
"""A class is worth its name when callers tell it from others by what they do next."""

QUOTED = {"error", "why", "text", "other", "reason"}
"""Names under which a text quotes one that has its next step already."""


@cache
def classes() -> dict[str, type[StreamingNodeError]]:
    """Return all error classes there are by name, from wherever they are."""
    for package in ROOT_PACKAGES:
        for path in (ROOT / package).rglob("errors.py"):
            import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = {}
    waiting = [StreamingNodeError]
    while waiting:
        each = waiting.pop()
        found[each.__name__] = each
        waiting += each.__subclasses__()
    return {
        name: each
        for name, each in found.items()
        if each.__module__.partition(".")[0] in ROOT_PACKAGES
    }


def test_error_classes_are_few_and_all_in_the_modules_of_errors() -> None:
    assert len(classes()) <= CLASSES_MAX
    # The scanner has one only, which stands with what it is raised for.
    assert {
        each.__module__ for each in classes().values() if not each.__module__.endswith(".errors")
    } == {ReaderBusy.__module__}


def test_every_error_class_is_told_by_one_module_and_by_its_own_code() -> None:
    assert all(getattr(sn.errors, name) is each for name, each in classes().items())
    assert len({each.code for each in classes().values()}) == len(classes())


def test_the_page_of_errors_names_every_one_that_ends_more_than_its_call() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    table = page.partition("| `ends` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert [ends for ends, _ in rows] == [each.value for each in Ends]
    named = {ends: set(re.findall(r"`(\w+)`", codes)) for ends, codes in rows}
    for ends in (Ends.TERM, Ends.LOG):
        assert named[ends.value] == {each.code for each in classes().values() if each.ends is ends}


def test_what_a_deadline_leaves_open_ends_its_call_alone() -> None:
    assert ends_of(sn.errors.DeadlineExceeded("late")) is Ends.CALL
    assert ends_of(OSError("a fault of the disk")) is Ends.CALL


@pytest.mark.parametrize("package", ROOT_PACKAGES)
def test_every_error_that_is_made_says_what_to_do_next(package: str) -> None:
    assert [at for at, call in calls(package) if not has_next_step(call)] == []


def calls(package: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield where errors are made that get their text there."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and takes_text(node.func.id)
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", node


def takes_text(name: str) -> bool:
    made = classes().get(name)
    return (
        made is not None
        and not made.next_step
        and (made is SchemaMismatch or "__init__" not in vars(made))
    )


def has_next_step(call: ast.Call) -> bool:
    first = call.args[0]
    parts = first.values if isinstance(first, ast.JoinedStr) else [first]
    return any(DASH in str(part.value) for part in parts if isinstance(part, ast.Constant)) or any(
        isinstance(node, ast.Name) and node.id in QUOTED for node in ast.walk(first)
    )


TOLD = [
    AlreadyOwned("data", 7),
    AlreadyOwned("data", 7, own=True),
    StorageFull("data", 1, 2),
    Truncated("rocks/1", "rocks/5"),
    ProducerFenced(1, 2),
    ProducerFenced(1, None),
    SequenceTooOld(1, 2),
    PackageMissing("pyspark", "spark"),
    PackageMissing("wal", other="/elsewhere"),
    PackageMissing("Java 17 or newer", "jre", tried=[]),
]


def test_every_error_that_words_its_own_text_says_what_to_do_next() -> None:
    assert {type(error) for error in TOLD} == {
        each for each in classes().values() if "__init__" in vars(each)
    } - {
        StreamingNodeError,
        SchemaMismatch,
    }
    assert all(DASH in str(error) for error in TOLD)


def test_a_general_next_step_is_said_where_the_text_has_none() -> None:
    assert str(Corrupt("bytes are wrong")) == f"bytes are wrong{DASH}{Corrupt.next_step}"
    assert str(Corrupt("bytes are wrong — copy the disk")) == "bytes are wrong — copy the disk"
    assert Corrupt("bytes are wrong").happened == "bytes are wrong"


def test_a_position_that_is_gone_is_answered_with_the_earliest() -> None:
    error = Truncated("rocks/1", "rocks/5")
    assert str(error) == "rocks/1 is no longer kept — start from rocks/5 or later"
    assert error.fields() == {"requested": "rocks/1", "earliest": "rocks/5"}


@pytest.mark.parametrize(
    "error",
    [
        AlreadyOwned("data", 7, brief=True),
        StorageFull("data", 1, 2),
        Truncated(1, 2, "start later"),
        SchemaMismatch("it is no int64 — convert it", column="id", row=3),
        ProducerFenced(1, 2),
        SequenceTooOld(1, 2),
        PackageMissing("pyspark", "spark"),
        sn.errors.DeadlineExceeded("the insert took longer"),
    ],
    ids=lambda error: error.code,
)
def test_an_error_crosses_to_another_process_with_its_text_and_its_fields(
    error: StreamingNodeError,
) -> None:
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(made) is type(error)
        assert (str(made), made.fields()) == (str(error), error.fields())
