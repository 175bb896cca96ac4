"""What docs/architecture.md says of the structure is what is there."""

import re

import pytest

from tests.picture import PICTURE, drawn
from tests.walks import PAGE, ROOT, WALKS, on_page, told

AT_ONCE = {"insert", "cut", "open"}
"""Walks whose steps run on several threads at once, so that their order is not always the same."""


def sections(text: str) -> list[list[str]]:
    """Return the lines of each walk."""
    return [part.splitlines() for part in text.split("### ")[1:]]


@pytest.mark.parametrize("number", range(len(WALKS)), ids=list(WALKS))
def test_the_page_names_the_files_of_a_walk_in_order_and_no_others(number: int) -> None:
    there = sections(on_page())[number]
    seen = sections(told())[number]
    if list(WALKS)[number] in AT_ONCE:
        there = sorted(there)
        seen = sorted(seen)
    assert there == seen, "python -m tests.walks writes them again"


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text("utf-8") == drawn(), "python -m tests.picture draws it again"


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE.read_text("utf-8")))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]
