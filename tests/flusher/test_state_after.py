"""What the flusher does after an error of a run."""

import pytest

from flusher.flusher import FlusherState, state_after
from wal.errors import (
    ChannelFenced,
    Corrupt,
    Indeterminate,
    LogReopening,
    OnShutdown,
    StorageFailed,
)


@pytest.mark.parametrize(
    "error, state",
    [
        (OnShutdown("x"), FlusherState.CLOSED),
        (ChannelFenced("x"), FlusherState.CLOSED),
        (Indeterminate("x"), FlusherState.BACKING_OFF),
        (LogReopening("x"), FlusherState.BACKING_OFF),
        (StorageFailed("x"), FlusherState.BACKING_OFF),
        (OSError(5, "x"), FlusherState.BACKING_OFF),
        (Corrupt("x"), FlusherState.FAILED),
        (KeyError("x"), None),
    ],
)
def test_the_flusher_goes_on_unless_the_log_has_ended_or_there_is_damage(
    error: Exception, state: FlusherState | None
) -> None:
    assert state_after(error) is state
