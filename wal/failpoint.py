"""Named places where a test can make the process die or fail; free when nothing is armed.

Code calls `failpoint("area.step")` between two steps whose order matters. Tests arm a name in the process, or from outside
through the environment variable `STREAMINGNODE_FAILPOINTS`, for example `append.written=kill@3,flush.cut_met=error`. What a
crash at each place leaves behind is told in docs/guarantees.md. Not for a per-row path, and no switch for behaviour.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

ENVIRONMENT_VARIABLE = "STREAMINGNODE_FAILPOINTS"

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
    """Run `action` at the `at`-th hit of `name` from now on, once; replaces what was armed."""
    _armed[name] = _Armed(action, at)


def disarm_all() -> None:
    """Forget everything that was armed and counted."""
    _armed.clear()


def arm_from(text: str) -> None:
    """Arm what `text` says: `name=action@hit` separated by commas; action `kill` or `error`. Raises `ValueError`."""
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, what = item.partition("=")
        word, _, hit = what.partition("@")
        if not separator or word not in {"kill", "error"}:
            raise ValueError(f"{item!r} in {ENVIRONMENT_VARIABLE} is not name=kill|error[@hit]")
        arm(name, _kill if word == "kill" else _error(name), at=int(hit or 1))


def _kill() -> None:
    """End this process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _error(name: str) -> Action:
    def fail() -> None:
        raise InjectedFault(name)

    return fail


def _hit(name: str) -> None:
    armed = _armed.get(name)
    if armed is None:
        return
    with _counting:
        armed.hits += 1
        fires = armed.hits == armed.at
    if fires:
        armed.action()


arm_from(os.environ.get(ENVIRONMENT_VARIABLE, ""))
