"""Named places where a test can make the process die or fail.

Code calls `failpoint` with a name, `area.step`, between two steps whose order matters. Tests arm it
in the process, or from outside through the environment variable `STREAMINGNODE_FAILPOINTS`:
`append.written=kill@3,flush.cut_met=error`. What is left behind at each is told in
docs/guarantees.md. Not for a per-row path, and no switch for behaviour.
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
"""Run what is armed at this name; callable from any thread. Raises what the armed action raises.

An audit event of the interpreter: without a hook, which arming adds, it costs one call into C.
"""

_armed: dict[str, tuple[Callable[[], None], int, Iterator[int]]] = {}
"""By name: what to do, at which hit, and the numbers of the hits, which two threads never both
draw.
"""


def arm(name: str, action: Callable[[], None], *, at: int = 1) -> None:
    """Run `action` at the `at`-th hit of `name` from now on, once; replaces what was armed."""
    _add_hook()
    _armed[name] = action, at, count(1)


def disarm_all() -> None:
    """Forget everything that was armed and counted."""
    _armed.clear()


def arm_from(text: str) -> None:
    """Arm what `text` says: `name=action@hit` separated by commas; action `kill` or `error`.

    Raises `ValueError` for another form, and for a name that no code passes.
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
    """Return the names of all failpoints, as the source of the packages has them."""
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
    sys.addaudithook(_hear)  # once: no hook is ever removed


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event == _EVENT and arguments[0] in _armed:
        action, at, hits = _armed[str(arguments[0])]
        if next(hits) == at:
            action()


arm_from(os.environ.get(ENVIRONMENT_VARIABLE, ""))
