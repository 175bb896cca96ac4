"""The site that `make docs` builds: its navigation holds every page, and what is public has to say
what it is.
"""

import importlib.util
import logging
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
assert SPEC is not None
assert SPEC.loader is not None
conf = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(conf)


def test_navigation_holds_every_page_once() -> None:
    pages = sorted(
        path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "docs").glob("*.md")
    )
    linked = sorted(page for pages in conf.NAVIGATION.values() for page in pages)
    assert linked == sorted([*pages, "docs/adr/README", "CHANGELOG"])


def test_every_page_of_the_documents_is_named_on_the_first_one() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert not [
        path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in text
    ]


def test_reference_has_every_name_that_the_packages_export() -> None:
    reference = conf.reference()
    for module in (importlib.import_module(name) for name in conf.PUBLIC):
        for name in conf.public_names(module):
            assert re.search(rf"[.`]{name}\b", reference), name


def test_reference_has_the_calls_of_a_node_that_it_inherits() -> None:
    assert "autoclass:: streamingnode.Node\n   :inherited-members:" in conf.reference()


def test_public_name_without_a_docstring_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        conf.look_at_docstring(
            None, "method", "streamingnode.Node.insert", None, None, ["Add rows."]
        )
        assert not caplog.records
        conf.look_at_docstring(None, "method", "streamingnode.Node.insert", None, None, [])
    assert "streamingnode.Node.insert is public" in caplog.text


def test_example_in_a_docstring_becomes_code() -> None:
    lines = ["Does it.", "", "    node.insert()", ""]
    conf.look_at_docstring(None, "function", "a", None, None, lines)
    assert lines == ["Does it.", "", "::", "", "    node.insert()", ""]
