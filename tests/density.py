"""How densely the product is written: `python -m tests.density [PACKAGE ...]`.

Read the columns beside each other. A program with few lines and many decisions a line is not
small, it is folded.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from streamingnode.ownership import ROOT_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.Assert,
    ast.With,
    ast.AsyncWith,
    ast.match_case,
)
_AWAITS = (ast.Await, ast.AsyncFor, ast.AsyncWith)


@dataclass
class Density:
    """Counts over some files."""

    lines: int = 0
    wide_lines: int = 0
    """Lines with more than `WIDTH` characters."""
    statements: int = 0
    """All but definitions, imports and docstrings."""
    decisions: int = 0
    """Branches, loops, handlers, assertions, comprehensions, and each further operand of and/or."""
    tuple_assignments: int = 0
    """Assignments of a written-out tuple to a written-out tuple."""
    awaits: int = 0

    @property
    def decisions_per_100_lines(self) -> float:
        """Return how many decisions stand on a hundred lines on average."""
        return 100 * self.decisions / max(1, self.lines)

    def add(self, text: str) -> None:
        """Count the source text of one file, too."""
        lines = text.splitlines()
        self.lines += len(lines)
        self.wide_lines += sum(len(line) > WIDTH for line in lines)
        for node in ast.walk(ast.parse(text)):
            self._add_node(node)

    def _add_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self.statements += not _is_definition_or_docstring(node)
        if isinstance(node, _BRANCHES):
            self.decisions += 1
        if isinstance(node, ast.BoolOp):
            self.decisions += len(node.values) - 1
        if isinstance(node, ast.Assign):
            self.tuple_assignments += _assigns_tuple_to_tuple(node)
        if isinstance(node, _AWAITS):
            self.awaits += 1


def product_files() -> Iterator[Path]:
    """Yield the Python files of the six packages but those that `protoc` writes."""
    for package in ROOT_PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                yield path


def density_of(paths: Iterable[Path]) -> Density:
    """Return the counts over these files."""
    found = Density()
    for path in paths:
        found.add(path.read_text("utf-8"))
    return found


def _is_definition_or_docstring(node: ast.stmt) -> bool:
    if isinstance(node, _DEFINITIONS):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _assigns_tuple_to_tuple(node: ast.Assign) -> bool:
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def main() -> None:
    """Print the counts of each package and of the product."""
    columns = [field.name for field in fields(Density)]
    print(f"{'':16}" + "".join(f"{column:>20}" for column in columns) + f"{'per 100 lines':>16}")
    packages = sys.argv[1:] or [*ROOT_PACKAGES, ""]
    for package in packages:
        found = density_of(path for path in product_files() if path.is_relative_to(ROOT / package))
        counts = "".join(f"{getattr(found, column):>20,}" for column in columns)
        print(f"{package or 'product':16}{counts}{found.decisions_per_100_lines:>16.1f}")


if __name__ == "__main__":
    main()
