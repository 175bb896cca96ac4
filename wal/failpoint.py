"""Named places where a test can kill the process or raise an error.

Code calls `failpoint` with a name, `area.step`, between two steps whose order matters. Tests arm it
in the process, or from outside through the environment variable `STREAMINGNODE_FAILPOINTS`:
`append.written=kill@3,flush.cut_met=error`. docs/guarantees.md lists what a crash at each leaves
behind. Do not use failpoints on per-row paths or to switch behaviour.
"""

import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path

ENVIRONMENT_VARIABLE = "STREAMINGNODE_FAILPOINTS"
_EVENT = "streamingnode.failpoint"

failpoint: Callable[[str], None] = partial(sys.audit, _EVENT)
"""Run the action armed at this name; callable from any thread. Raises whatever the action raises.

It is an audit event of the interpreter. Arming adds the hook; without it a failpoint costs one call
into C.
"""

_armed: dict[str, tuple[Callable[[], None], int, Iterator[int]]] = {}
"""For each name: the action, the hit to run it at, and a counter that gives each hit of any thread
its own number.
"""


def arm(name: str, action: Callable[[], None], *, at: int = 1) -> None:
    """Run `action` once, at the `at`-th hit of `name` from now on; replaces an armed action."""
    _add_hook()
    _armed[name] = action, at, count(1)


def disarm_all() -> None:
    """Remove all armed actions and counters."""
    _armed.clear()


def arm_from(text: str) -> None:
    """Arm the failpoints in `text`: `name=action@hit`, separated by commas, with action `kill` or
    `error`.

    Raises `ValueError` for another form, and for a name that no code has.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, what = item.partition("=")
        word, _, hit = what.partition("@")
        if not separator or word not in {"kill", "error"}:
            raise ValueError(f"{item!r} in {ENVIRONMENT_VARIABLE} is not name=kill|error[@hit]")
        if name not in placed_failpoints():
            raise ValueError(
                f"{name!r} in {ENVIRONMENT_VARIABLE} is no failpoint — docs/guarantees.md lists "
                "them"
            )
        arm(name, partial(_strike, name, word), at=int(hit or 1))


@cache
def placed_failpoints() -> frozenset[str]:
    """Return the names of all failpoints in the source of the packages."""
    root = Path(__file__).resolve().parent.parent
    packages = ("wal", "interceptors", "scanner", "flusher", "spark_sink", "streamingnode")
    sources = (
        source.read_text("utf-8")
        for package in packages
        for source in (root / package).rglob("*.py")
    )
    return frozenset(
        name
        for text in sources
        for name in re.findall(r'\bfailpoint\("([a-z_]+\.[a-z_]+)"\)', text)
    )


def _strike(name: str, word: str) -> None:
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.EIO, f"failpoint {name}")


@cache
def _add_hook() -> None:
    sys.addaudithook(_on_event)  # cached: a hook cannot be removed


def _on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == _EVENT and arguments[0] in _armed:
        action, at, hits = _armed[str(arguments[0])]
        if next(hits) == at:
            action()


arm_from(os.environ.get(ENVIRONMENT_VARIABLE, ""))
