"""What a command is: a name, help with examples, its arguments, and what it does."""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from streamingnode.cli.output import Output

A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the program; `run` returns the exit code and raises typed errors.

    `examples` are complete command lines; `details` says what the summary leaves out.
    """

    name: str
    summary: str
    details: str
    examples: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Output], int]


def take(kind: Callable[..., A], namespace: argparse.Namespace) -> A:
    """Return the parsed arguments as the frozen dataclass `kind`; each of its fields is an argument of that name."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass is callable
    return kind(**{name: getattr(namespace, name) for name in names})
