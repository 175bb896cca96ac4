"""The structure in docs/architecture.md is the structure of the code."""

import re
from pathlib import Path

from tests.picture import PICTURE, drawn

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text("utf-8") == drawn(), "python -m tests.picture draws it again"


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE.read_text("utf-8")))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]
