"""A guard against another distribution that ships a `wal` or a `scanner` of its own; see ADR 0001.

Installers overwrite silently when two distributions carry the same root package, and imports find
whichever came last.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from spark_sink.errors import PackageMissing

DISTRIBUTION = "streamingnode"
ROOT_PACKAGES = ("streamingnode", "spark_sink", "flusher", "interceptors", "scanner", "wal")

_ROOT_IN_RECORD = re.compile(rf"^({'|'.join(ROOT_PACKAGES)})(?:/|\.py,|\.[^/,]*so,)", re.MULTILINE)


@functools.cache
def assert_sole_owner() -> None:
    """Check, once in a process, that every root package is ours. Raises `PackageMissing`. It reads
    file lists for 10 ms.
    """
    check_owners(distributions())
    check_places({root: _place(root) for root in ROOT_PACKAGES})


def check_owners(installed: Iterable[Distribution]) -> None:
    """Raise `PackageMissing` for the first root package in which another distribution has files."""
    # `importlib.metadata.packages_distributions` answers this for all packages, in ten times the
    # time.
    for distribution in installed:
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        if name != DISTRIBUTION and (
            found := _ROOT_IN_RECORD.search(distribution.read_text("RECORD") or "")
        ):
            raise PackageMissing(found[1], other=name)


def check_places(places: Mapping[str, Path | None]) -> None:
    """Raise `PackageMissing` for the first root package that is not in the directory of
    `streamingnode`, for a checkout.
    """
    for root, place in places.items():
        if place is None or place != places[DISTRIBUTION]:
            raise PackageMissing(root, other=str(place or "nowhere"))


def _place(root: str) -> Path | None:
    spec = find_spec(root)
    return (
        None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent.parent
    )
