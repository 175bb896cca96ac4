"""Builds the site: `make docs`, which is `sphinx-build -W -c docs . site`. Pages are those of the
checkout, as they are.

The navigation is added here, so that the pages stay plain Markdown that any forge shows. A warning
is an error: a link that leads nowhere, or a page that is not in the navigation.
"""

import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

NAVIGATION = {
    "Begin": ["docs/guide", "docs/why", "docs/commands", "docs/glossary"],
    "In production": [
        "docs/production",
        "docs/service",
        "docs/operations",
        "docs/configuration",
        "docs/metrics",
    ],
    "Tables and streams": ["docs/spark", "docs/streams"],
    "Reference": [
        "docs/api",
        "docs/guarantees",
        "docs/reliability",
        "docs/protocol",
        "docs/format",
    ],
    "Inside": [
        "docs/architecture",
        "docs/adr/README",
        "docs/names",
        "docs/dependencies",
        "CHANGELOG",
    ],
}
"""Every page but the first, and those that `docs/adr/README.md` lists; `tests/test_site.py` holds
it.
"""

project = "streamingnode"
author = "streamingnode"
copyright = "Apache-2.0"  # noqa: A001 - Sphinx names it
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "docs/adr/*.md"]
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "streamingnode"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False


def navigation() -> str:
    """Return the tables of contents at the end of the first page."""
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n" + "\n".join(NAVIGATION[name]) + "\n```"
        for name in NAVIGATION
    ]
    return "\n\n" + "\n\n".join(trees) + "\n"


def decisions() -> str:
    """Return the table of contents of the decision records."""
    names = sorted(path.stem for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def add_to_page(_app: Any, page: str, source: list[str]) -> None:
    """Add to a page what only the site has."""
    made = {root_doc: navigation, "docs/adr/README": decisions}.get(page)
    if made:
        source[0] += made()


def make_index(app: Any, error: Exception | None) -> None:
    """Make the first page what a web server shows for the directory, too."""
    if error is None:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", add_to_page)
    app.connect("build-finished", make_index)
