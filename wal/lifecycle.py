"""The state machine that decides whether a log takes appends, from the opening of its node to the
close. Pure.

    RECOVERING --recovered--> OPEN --lost--> ENDING --ended--> REOPENING --verified--> RECOVERING
                                                                ^  |                    |
                                                                |  +-------fault--------+
                                                              retry          v
                                                                +-------- WAITING
    any of these --damage--> FAILED        any of these --close--> CLOSED

A write with an unknown outcome ends the term: its appends fail, and its state is discarded. The
store is then closed, verified as at a start and opened under the next term, whose state is rebuilt
from the log. A failed step is retried after a pause. Damage and another owner end the log for good.
"""

from dataclasses import dataclass
from enum import Enum, unique

import msgspec

from wal.errors import AlreadyOwned, Corrupt, Ends, UnsupportedFormat, ends_of


@unique
class LogState(Enum):
    """The state of a log. Only `OPEN` takes appends; in all other states but the last two they
    wait.
    """

    RECOVERING = "recovering"
    """The term's state is being rebuilt from the log."""
    OPEN = "open"
    ENDING = "ending"
    """A write failed; the appends of the term are being failed."""
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
    """How a failed log is reopened; all times in seconds.

    A call waits `wait_s` before it is refused with `LOG_REOPENING`, or with `INDETERMINATE` when
    its own write failed: longer than it takes to verify 1 GiB, shorter than the patience of users.
    After a failed attempt it pauses for `first_pause_s`, doubled each time up to `longest_pause_s`,
    so that appends resume within 5 s after the disk works again.
    """

    wait_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


OBSTACLES = (Corrupt, AlreadyOwned, UnsupportedFormat)
"""Errors that do not go away by themselves, if they are real."""
OBSTACLES_SEEN_MAX = 3
"""A temporary read error looks like damage, and an uncollected handle of this process looks like
the lock of another owner. So an obstacle counts as real after three attempts in a row.
"""


def is_final(error: Exception, *, obstacles_seen: int) -> bool:
    """Return whether a failed attempt to reopen is the last one; `obstacles_seen` counts
    consecutive attempts that met an obstacle.
    """
    return obstacles_seen >= OBSTACLES_SEEN_MAX or ends_of(error) is Ends.LOG


class LogStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The current status of one log.

    `store` is the condition of its log store. `reopened` counts successful reopenings, `attempts`
    the failed ones since the log last took appends. `last_error` is the latest error of all these.
    """

    pchannel: str
    state: str
    store: str
    term: int
    reopened: int = 0
    attempts: int = 0
    last_error: str = ""
