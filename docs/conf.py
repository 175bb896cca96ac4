"""Builds the site: `make docs`, which is `sphinx-build -W -c docs . site`. Pages are those of the
checkout, as they are.

Navigation and the reference are added here, so that the pages stay plain Markdown that any forge
shows. A warning is an error: a link that leads nowhere, a page that is not in the navigation, a
public name without a docstring.
"""

import importlib
import inspect
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

NAVIGATION = {
    "Begin": ["docs/guide", "docs/why", "docs/names"],
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
        "docs/commands",
        "docs/guarantees",
        "docs/reliability",
        "docs/protocol",
        "docs/format",
    ],
    "Inside": ["docs/architecture", "docs/adr/README", "CHANGELOG"],
}
"""Every page but the first, and those that `docs/adr/README.md` lists; `tests/test_site.py` holds
it.
"""

PUBLIC = ("streamingnode", "spark_sink", "streamingnode.batching")
"""Packages and modules whose `__all__`, or own names, are the public interface, with
`streamingnode.streams`.
"""

project = "streamingnode"
author = "streamingnode"
copyright = "Apache-2.0"  # noqa: A001 - Sphinx names it
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "docs/*.md", "docs/adr/*.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "streamingnode"
html_show_sphinx = False
html_copy_source = False
myst_heading_anchors = 4
highlight_language = "none"
default_role = "code"  # docstrings write names in single backticks
smartquotes = False
suppress_warnings = ["ref.python"]  # two classes have an attribute `type`
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}


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


IN_PARTS = {"streamingnode.Node"}
"""Classes whose calls are in several files, and one class to a program."""


def reference() -> str:
    """Return what autodoc makes of each public name, one section for each module that a program
    imports.
    """
    parts = []
    shown = set[int]()
    for module in modules():
        values = {name: getattr(module, name) for name in public_names(module)}
        new = {
            name: value
            for name, value in values.items()
            if not inspect.ismodule(value) and id(value) not in shown
        }
        shown |= {id(value) for value in new.values()}
        head = (
            f".. automodule:: {module.__name__}\n   :no-members:\n   :no-index:\n\n.. module:: "
            f"{module.__name__}"
        )
        body = "\n\n".join([head, *(directive(module, name) for name in new)])
        parts.append(f"\n\n## {module.__name__}\n\n```{{eval-rst}}\n{body}\n```")
    return "".join(parts)


def modules() -> list[types.ModuleType]:
    """Return the modules that a program imports: those of `PUBLIC`, modules among their names, and
    the streams.
    """
    found = [importlib.import_module(name) for name in PUBLIC]
    inside = [getattr(module, name) for module in found for name in public_names(module)]
    streams = sorted(path.stem for path in (ROOT / "streamingnode" / "streams").glob("[a-z]*.py"))
    names = [f"streamingnode.streams.{name}" for name in streams if not name.endswith("_pb2")]
    return [*found, *filter(inspect.ismodule, inside), *map(importlib.import_module, names)]


def public_names(module: types.ModuleType) -> list[str]:
    """Return the names of `__all__`, or the classes and functions of a module, and the errors that
    it hands on.
    """
    if names := getattr(module, "__all__", None):
        return list(names)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and is_of(module, value)
    ]


def is_of(module: types.ModuleType, value: Any) -> bool:
    """Return whether a class or function is a module's to show."""
    if (
        inspect.isclass(value)
        and issubclass(value, Exception)
        and module.__name__.endswith(".errors")
    ):
        return True
    return (
        inspect.isclass(value) or inspect.isroutine(value)
    ) and value.__module__ == module.__name__


def directive(module: types.ModuleType, name: str) -> str:
    """Return the directive of one public name; one that names a class of another name shows
    that.
    """
    value = getattr(module, name)
    place = f"{module.__name__}.{name}"
    if inspect.isclass(value) and value.__name__ != name:
        return f"``{name}`` is\n\n.. autoclass:: {value.__module__}.{value.__qualname__}"
    if inspect.isclass(value):
        members = "\n   :inherited-members:" if place in IN_PARTS else ""
        return f".. autoclass:: {place}{members}"
    return (
        f".. autofunction:: {place}"
        if inspect.isroutine(value)
        else f".. autodata:: {place}\n   :no-value:"
    )


def add_to_page(_app: Any, page: str, source: list[str]) -> None:
    """Add to a page what only the site has."""
    made = {root_doc: navigation, "docs/adr/README": decisions, "docs/api": reference}.get(page)
    if made:
        source[0] += made()


def look_at_docstring(
    _app: Any, kind: str, name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Refuse a public name without a docstring, and mark the examples in one as code."""
    from sphinx.util import logging

    if not any(lines) and kind not in ("attribute", "data"):
        logging.getLogger(__name__).warning("%s is public and has no docstring", name)
    text = re.sub(r"(?m)^(\S.*\S)\n\n(?= {4}\S)", r"\1\n\n::\n\n", "\n".join(lines))
    lines[:] = text.split("\n")


def make_index(app: Any, error: Exception | None) -> None:
    """Make the first page what a web server shows for the directory, too."""
    if error is None:
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Any) -> None:
    """Connect what is above."""
    app.connect("source-read", add_to_page)
    app.connect("autodoc-process-docstring", look_at_docstring)
    app.connect("build-finished", make_index)
