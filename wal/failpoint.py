"""Named places where a test can make the process die, fail or be counted; free when nothing is armed.

Code calls `failpoint("area.step")` between two steps whose order matters. Tests arm a name in the process, or from outside
through the environment variable `STREAMINGNODE_FAILPOINTS`, for example `append.written=kill@3,flush.renamed=error`. What a
crash at each place leaves behind is in `wal.failpoint_table`. Not for a per-row path, and no switch for behaviour.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from wal.failpoint_table import FAILPOINTS

ENVIRONMENT_VARIABLE = "STREAMINGNODE_FAILPOINTS"

EVERY_HIT = 0
"""Fire at each hit instead of at one."""

Action = Callable[[], None]


class InjectedFault(OSError):
    """What an armed failpoint raises; an `EIO` to everybody but the test that armed it."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EIO, f"failpoint {name}")


@dataclass(slots=True)
class _Armed:
    action: Action
    at: int
    hits: int = 0


_armed: dict[str, _Armed] = {}
_counting = threading.Lock()


def failpoint(name: str) -> None:
    """Run what is armed at `name`; callable from any thread. Raises what the armed action raises."""
    if _armed:
        _hit(name)


def arm(name: str, action: Action, *, at: int = 1) -> None:
    """Run `action` at the `at`-th hit of `name` from now on, once, or at each with `at=EVERY_HIT`; replaces what was armed.

    `name` is one of `FAILPOINTS`; a `KeyError` otherwise.
    """
    if name not in FAILPOINTS:
        raise KeyError(f"no failpoint {name!r} — its names are in wal/failpoint_table.py")
    _armed[name] = _Armed(action, at)


def disarm_all() -> None:
    """Forget everything that was armed and counted."""
    _armed.clear()


def names() -> tuple[str, ...]:
    """Return the names of all failpoints, in the order of the table."""
    return tuple(FAILPOINTS)


def hits(name: str) -> int:
    """Return how often `name` was passed since it was armed; 0 when it is not."""
    armed = _armed.get(name)
    return 0 if armed is None else armed.hits


def kill() -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Freeze this process until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def error(name: str) -> Action:
    """Return an action that raises an `OSError` which names the failpoint."""

    def fail() -> None:
        raise InjectedFault(name)

    return fail


def count() -> None:
    """Do nothing: the hit is counted, `hits` tells."""


def arm_from(text: str) -> None:
    """Arm what `text` says: `name=action@hit` separated by commas; action `kill`, `stop`, `error` or `count`; `@*` each hit.

    Raises `ValueError` for a text that says something else, `KeyError` for an unknown name.
    """
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, what = item.partition("=")
        word, _, hit = what.partition("@")
        actions: dict[str, Action] = {"kill": kill, "stop": stop, "error": error(name), "count": count}
        if not separator or word not in actions:
            raise ValueError(f"{item!r} in {ENVIRONMENT_VARIABLE} is not name=kill|stop|error|count[@hit]")
        arm(name, actions[word], at=EVERY_HIT if hit == "*" else int(hit or 1))


def _hit(name: str) -> None:
    assert name in FAILPOINTS, f"failpoint {name!r} is not in wal/failpoint_table.py"
    armed = _armed.get(name)
    if armed is None:
        return
    with _counting:
        armed.hits += 1
        fires = armed.at in (EVERY_HIT, armed.hits)
    if fires:
        armed.action()


arm_from(os.environ.get(ENVIRONMENT_VARIABLE, ""))
