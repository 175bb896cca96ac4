"""From every state of a log that failed there is a way back to OPEN, and none from where it
ended.
"""

import pytest

from wal.errors import (
    AlreadyOwned,
    ChannelFenced,
    Corrupt,
    Indeterminate,
    OnShutdown,
    StorageFailed,
    StorageFull,
    UnsupportedFormat,
)
from wal.lifecycle import OBSTACLES, OBSTACLES_SEEN_MAX, TRANSITIONS, LogState, is_final

ENDED = {LogState.FAILED, LogState.CLOSED}


def reachable(state: LogState) -> set[LogState]:
    reached = {state}
    last = set[LogState]()
    while reached != last:
        last = set(reached)
        reached |= {after for before in last for after in TRANSITIONS[before]}
    return reached


@pytest.mark.parametrize("state", LogState)
def test_log_comes_back_from_every_state_but_those_that_end_it(state: LogState) -> None:
    assert (LogState.OPEN in reachable(state)) == (state not in ENDED)


def test_log_opens_only_after_its_state_was_rebuilt() -> None:
    assert {state for state, after in TRANSITIONS.items() if LogState.OPEN in after} == {
        LogState.RECOVERING
    }


@pytest.mark.parametrize("state", LogState)
def test_log_can_be_closed_in_every_state_and_damaged_in_every_one_that_lives(
    state: LogState,
) -> None:
    assert (LogState.CLOSED in TRANSITIONS[state]) == (state is not LogState.CLOSED)
    assert (LogState.FAILED in TRANSITIONS[state]) == (state not in ENDED)


@pytest.mark.parametrize(
    "error", [StorageFailed("x"), StorageFull("x", 0, 1), Indeterminate("x"), OSError(5, "x")]
)
def test_fault_of_the_disk_is_tried_again_for_ever(error: Exception) -> None:
    assert not isinstance(error, OBSTACLES)
    assert not is_final(error, obstacles_seen=0)


@pytest.mark.parametrize("error", [ChannelFenced("x"), OnShutdown("x")])
def test_another_owner_or_the_close_is_not_outlived(error: Exception) -> None:
    assert is_final(error, obstacles_seen=0)


@pytest.mark.parametrize("error", [Corrupt("x"), AlreadyOwned("x", 1), UnsupportedFormat("x")])
def test_damage_another_format_or_a_lock_of_others_is_believed_when_it_is_seen_often_enough(
    error: Exception,
) -> None:
    assert isinstance(error, OBSTACLES)
    verdicts = [
        is_final(error, obstacles_seen=seen)
        for seen in (1, OBSTACLES_SEEN_MAX - 1, OBSTACLES_SEEN_MAX)
    ]
    assert verdicts == [False, False, True]
