"""The site that `make docs` builds: its navigation holds every page."""

import importlib.util
from pathlib import Path

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
