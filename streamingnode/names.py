"""Names and paths as somebody typed them, checked: safe in paths, URLs and tables."""

import os
import re
from pathlib import Path

from wal.errors import InvalidArgument

NAME_CHARACTERS_MAX = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{NAME_CHARACTERS_MAX - 1}}}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also with the one slash that a `Path` makes of two


def check_name(kind: str, name: str) -> str:
    """Return `name` if a new "collection", "partition", "reader" or "producer" may carry it. Raises `InvalidArgument`."""
    if not isinstance(name, str):
        raise not_text(kind, name)
    if name.startswith("_"):
        raise InvalidArgument(
            f"{kind} name {name[:64]!r} is reserved: names that start with '_' are the node's — rename it"
        )
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidArgument(
            f"{kind} name {name[:64]!r} is not allowed — use 1 to {NAME_CHARACTERS_MAX} of a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or digit, without '..'"
        )
    return name


def check_path(what: str, path: str | os.PathLike[str]) -> Path:
    """Return the path given as `what`. Raises `InvalidArgument` for what can name no file or directory."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgument(f"{path!r} names no {what} — pass a path")
    if _URL.match(text):
        raise InvalidArgument(f"{text!r} is a URL — pass a path on a disk of this machine, without a scheme")
    return Path(text)


def not_text(kind: str, name: object) -> InvalidArgument:
    """Return the error for something in the place of a name that is no text at all."""
    return InvalidArgument(f"a {kind} name is text, not {type(name).__name__} — pass a str")
