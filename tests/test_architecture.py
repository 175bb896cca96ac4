"""What docs/architecture.md says of the structure is what is there."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tests.picture import PICTURE, ROOT, drawn

PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
WALKS = ("insert", "read", "cut", "open")


@cache
def walked() -> dict[str, list[str]]:
    """Measure in a process of its own: the profiler of this one may be taken."""
    command = [sys.executable, "-m", "tests.doors", "--json", "--list"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return msgspec.json.decode(said.stdout, type=dict[str, list[str]])


def told(operation: str) -> list[str]:
    """Return the files of one walk as the page has them."""
    section = PAGE.partition(f"### The files of {operation}\n")[2].partition("\n#")[0]
    return re.findall(r"`([a-z_/]+\.py)`", section)


@pytest.mark.parametrize("operation", WALKS)
def test_the_page_names_the_files_of_an_operation_and_no_others(operation: str) -> None:
    assert sorted(told(operation)) == sorted(walked()[operation])


@pytest.mark.parametrize("operation", WALKS)
def test_the_page_names_the_files_in_the_order_in_which_they_are_entered(operation: str) -> None:
    assert told(operation) == walked()[operation]


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text("utf-8") == drawn(), "python -m tests.picture draws it again"


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE))
    assert named
    assert not [name for name in sorted(named) if not Path(ROOT / name).is_file()]
