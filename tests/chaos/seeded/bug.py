"""What a seeded bug is: one function replaced by one that is wrong in the way a programmer could
have been.

Only the harness puts one in, to see whether the judge of histories finds it; nothing of the product
reaches it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Right = Callable[..., Any]
Wrong = Callable[[Right], Right]
"""Takes the right function and returns the wrong one."""


@dataclass(frozen=True, slots=True)
class SeededBug:
    """One bug: where it is, and what is wrong there."""

    name: str
    owner: object
    attribute: str
    wrong: Wrong


@contextmanager
def seeded(bug: SeededBug) -> Iterator[None]:
    """Have the bug while the block runs."""
    with patch.object(bug.owner, bug.attribute, bug.wrong(getattr(bug.owner, bug.attribute))):
        yield


def nothing(_right: Right) -> Right:
    """Do nothing at all."""
    return lambda *_arguments, **_options: None
