"""Whether a log takes appends: the one state machine of that question, from the opening of its node
to the close. Pure.

    RECOVERING --recovered--> OPEN --lost--> ENDING --ended--> REOPENING --verified--> RECOVERING
                                                                ^  |                    |
                                                                |  +-------fault--------+
                                                              retry          v
                                                                +-------- WAITING
    any of these --damage--> FAILED        any of these --close--> CLOSED

A write with an open outcome ends the term: its appends hear of it, and what it knew is thrown away.
The store is then closed, verified as at a start and opened under the next term, whose state is
rebuilt from the log; a step that fails is tried again after a pause. Damage, or another owner, is
not outlived.
"""

from dataclasses import dataclass
from enum import Enum, unique

import msgspec

from wal.errors import AlreadyOwned, Corrupt, Ends, UnsupportedFormat, ends_of


@unique
class LogState(Enum):
    """What a log is doing; only `OPEN` takes appends, and in all others but the last two they
    wait.
    """

    RECOVERING = "recovering"
    """The term's state is being rebuilt from the log."""
    OPEN = "open"
    ENDING = "ending"
    """A write failed; the appends of the term are told."""
    REOPENING = "reopening"
    """The store is being closed, verified and opened; see the store's own condition."""
    WAITING = "waiting"
    """An attempt failed; the next one comes after a pause."""
    FAILED = "failed"
    CLOSED = "closed"


_S = LogState
_ENDS = {_S.FAILED, _S.CLOSED}
TRANSITIONS: dict[LogState, set[LogState]] = {
    _S.RECOVERING: {_S.OPEN, _S.WAITING} | _ENDS,
    _S.OPEN: {_S.ENDING} | _ENDS,
    _S.ENDING: {_S.REOPENING} | _ENDS,
    _S.REOPENING: {_S.RECOVERING, _S.WAITING} | _ENDS,
    _S.WAITING: {_S.REOPENING} | _ENDS,
    _S.FAILED: {_S.CLOSED},
    _S.CLOSED: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenOptions:
    """How a log that failed comes back, in seconds.

    A call waits `wait_s` for it before it is refused with `LOG_REOPENING`, or with `INDETERMINATE`
    when its write is the one that failed: longer than verifying 1 GiB takes, shorter than patience.
    After a failed attempt comes a pause of `first_pause_s`, twice as long each time up to
    `longest_pause_s`: appends are to resume within 5 s after the disk works again.
    """

    wait_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


OBSTACLES = (Corrupt, AlreadyOwned, UnsupportedFormat)
"""What does not pass by itself, if it is what it looks like."""
OBSTACLES_SEEN_MAX = 3
"""A disk that cannot be read for a moment looks like damage, and a handle of this process that is
not collected yet like another owner's lock; three looks in a row that find it are believed."""


def is_final(error: Exception, *, obstacles_seen: int) -> bool:
    """Whether a failed attempt to reopen is the last one; `obstacles_seen` counts attempts in a row
    that met an obstacle.
    """
    return obstacles_seen >= OBSTACLES_SEEN_MAX or ends_of(error) is Ends.LOG


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Where one log stands now.

    `store` is the condition of the log store under it. `reopened` counts how often the log came
    back by itself, `attempts` the failed ones since it last took appends; `last_error` is what the
    latest of all these was about.
    """

    pchannel: str
    state: str
    store: str
    term: int
    reopened: int = 0
    attempts: int = 0
    last_error: str = ""
