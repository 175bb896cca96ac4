"""Writes into docs/architecture.md which files an operation passes through, in order:
`python -m tests.walks`.

What a file does is the first sentence of its docstring, so that there is one place where it is
said.
"""

import argparse
import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
WALKS = {
    "insert": "One row",
    "read": "A read of nine messages",
    "cut": "A cut",
    "open": "Opening a node that exists",
}
BEGIN = "<!-- walks: python -m tests.walks -->"
END = "<!-- end of walks -->"


@cache
def walked() -> dict[str, list[str]]:
    """Return the files of each operation, in the order in which they are entered.

    Measured in a process of its own: the profiler of this one may be taken, and imports are part of
    an operation.
    """
    command = [sys.executable, "-m", "tests.doors", "--json"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(said.stdout)
    return found


def told() -> str:
    """Return the sections as the page has to have them."""
    parts = []
    for operation, what in WALKS.items():
        files = walked()[operation]
        parts.append(f"### {what}: {len(files)} files\n")
        parts += [f"1. `{path}`: {_first_sentence(path)}" for path in files]
        parts.append("")
    return "\n".join([BEGIN, "", *parts, END])


def on_page() -> str:
    """Return the sections as the page has them."""
    page = PAGE.read_text("utf-8")
    return page[page.index(BEGIN) : page.index(END) + len(END)]


def _first_sentence(path: str) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.walks", description=__doc__).parse_args()
    page = PAGE.read_text("utf-8")
    PAGE.write_text(page.replace(on_page(), told()), "utf-8")
