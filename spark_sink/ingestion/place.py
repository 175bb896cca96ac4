"""Where tables may be: anywhere but inside their node, which takes what it does not know for a stranger's."""

from pathlib import Path

from wal.errors import InvalidArgument


def check_place(node: Path, tables: Path) -> None:
    """Raise `InvalidArgument` for tables in the node's own directory."""
    if tables.resolve().is_relative_to(node.resolve()):
        raise InvalidArgument(f"{tables} is inside the node {node} — name a directory of their own for the tables")
