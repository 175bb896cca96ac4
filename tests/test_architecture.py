"""What docs/architecture.md says of the structure is what is there."""

import re

from tests.picture import PICTURE, drawn
from tests.walks import PAGE, ROOT, on_page, told


def test_the_page_names_the_files_of_each_walk_in_order_and_no_others() -> None:
    assert on_page() == told(), "python -m tests.walks writes them again"


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text("utf-8") == drawn(), "python -m tests.picture draws it again"


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", PAGE.read_text("utf-8")))
    assert named
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]
