"""The page that says where the names of the papers are: every one of them is there."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from streamingnode.ownership import ROOT_PACKAGES

PAGE = Path(__file__).parents[1] / "docs" / "names.md"
NAMES = sorted(
    set(re.findall(rf"`((?:{'|'.join(ROOT_PACKAGES)})\.[\w.]+)`", PAGE.read_text("utf-8")))
)


def found(name: str) -> object:
    """Return what a dotted name stands for: modules as far as they go, then attributes or
    fields.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing: object = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_name_on_the_page_leads_somewhere(name: str) -> None:
    assert found(name) is not None


def test_page_has_a_place_for_every_name() -> None:
    assert len(NAMES) > 50
