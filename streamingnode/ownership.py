"""Who owns the root packages: a guard against another distribution that ships a `wal` or a `scanner` of its own.

Installers overwrite silently when two distributions carry the same root package, and the import then finds whichever
came last. In: the metadata of what is installed here. Out: nothing, or `PackageMissing`. The composition root asks
before it opens anything, `doctor` shows the whole table. Nothing happens at import time. Why there are six roots at
all: `docs/adr/0001-six-root-packages.md`.
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
    """Check, once in a process, that every root package is ours; call it before a node opens.

    Reads the file lists of all installed distributions (10 ms for 90 of them, so from an event loop call it in a
    thread). In a source checkout nobody owns the roots by metadata; what counts then is that all six come from one
    place.

    Raises:
        PackageMissing: another distribution ships one of the roots too, or a root is imported from elsewhere.
    """
    check_owners(root_owners(distributions()))
    check_places(root_places())


def root_owners(installed: Iterable[Distribution]) -> dict[str, frozenset[str]]:
    """Return, for each root package, the names of the distributions that ship files in it.

    `importlib.metadata.packages_distributions` answers the same question for all packages, in ten times the time.
    """
    owners: dict[str, set[str]] = {root: set() for root in ROOT_PACKAGES}
    for distribution in installed:
        for root in _roots_of(distribution):
            owners[root].add(_normalized(distribution.name))
    return {root: frozenset(names) for root, names in owners.items()}


def check_owners(owners: Mapping[str, frozenset[str]]) -> None:
    """Raise `PackageMissing` for the first root that somebody else ships."""
    for root, names in owners.items():
        if strangers := names - {DISTRIBUTION}:
            raise PackageMissing(root, other=", ".join(sorted(strangers)))


def root_places() -> dict[str, Path | None]:
    """Return, for each root package, the directory an import finds it in; None when it is not found as a package."""
    return {root: _place(root) for root in ROOT_PACKAGES}


def check_places(places: Mapping[str, Path | None]) -> None:
    """Raise `PackageMissing` for the first root that is not imported from where `streamingnode` itself is."""
    home = places[DISTRIBUTION]
    for root, place in places.items():
        if place is None or place != home:
            raise PackageMissing(root, other=str(place or "nowhere"))


def _roots_of(distribution: Distribution) -> set[str]:
    return set(_ROOT_IN_RECORD.findall(distribution.read_text("RECORD") or ""))


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _place(root: str) -> Path | None:
    spec = find_spec(root)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent.parent
