"""The states of a flusher, what changes them, and what an error of a run means for it. Pure.

    RECOVERING --recovered--> RUNNING --fault--> BACKING_OFF --retry--> RECOVERING
        any of these --damage--> FAILED        any of these --close--> CLOSED

`flusher` says what each of them is about.
"""

import errno
from enum import Enum, unique

from wal.errors import (
    ChannelFenced,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)


@unique
class FlusherState(Enum):
    """What the flusher is doing."""

    RECOVERING = "recovering"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    FAILED = "failed"
    CLOSED = "closed"


@unique
class FlusherEvent(Enum):
    """What changes that."""

    RECOVERED = "recovered"
    FAULT = "fault"
    RETRY = "retry"
    DAMAGE = "damage"
    CLOSE = "close"


@unique
class Shortage(Enum):
    """What a run may lack that the flusher cannot make room for: whoever waits for a cut hears of it."""

    DISK_SPACE = "disk space"
    DESCRIPTORS = "file descriptors"


ALIVE = (FlusherState.RECOVERING, FlusherState.RUNNING, FlusherState.BACKING_OFF)

TRANSITIONS: dict[tuple[FlusherState, FlusherEvent], FlusherState] = {
    (FlusherState.RECOVERING, FlusherEvent.RECOVERED): FlusherState.RUNNING,
    (FlusherState.RECOVERING, FlusherEvent.FAULT): FlusherState.BACKING_OFF,
    (FlusherState.RUNNING, FlusherEvent.FAULT): FlusherState.BACKING_OFF,
    (FlusherState.BACKING_OFF, FlusherEvent.RETRY): FlusherState.RECOVERING,
    **{(state, FlusherEvent.DAMAGE): FlusherState.FAILED for state in ALIVE},
    **{(state, FlusherEvent.CLOSE): FlusherState.CLOSED for state in ALIVE},
}


def classify(error: BaseException) -> FlusherEvent | None:
    """Return what an error of a run means for the flusher; None for one that is a bug and is not caught."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            events = [classify(each) for each in errors]
            order = (None, FlusherEvent.CLOSE, FlusherEvent.DAMAGE, FlusherEvent.FAULT)
            return next(event for event in order if event in events)
        case OnShutdown() | ChannelFenced():
            return FlusherEvent.CLOSE
        case OSError() | StorageFailed() | StreamingNodeError(retryable="yes" | "indeterminate"):
            return FlusherEvent.FAULT
        case StreamingNodeError():
            return FlusherEvent.DAMAGE
        case _:
            return None


def shortage_of(error: BaseException) -> Shortage | None:
    """Return what a run ended for want of, None when it was something else."""
    match error:
        case BaseExceptionGroup(exceptions=errors):
            return next((found for each in errors if (found := shortage_of(each)) is not None), None)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT) | StorageFull():
            return Shortage.DISK_SPACE
        case OSError(errno=errno.EMFILE | errno.ENFILE) | Overloaded():
            return Shortage.DESCRIPTORS  # nothing but the log store raises `Overloaded` in a run
        case _:
            return None
