import itertools

import pytest

from wal.errors import ChannelFenced, OnShutdown, StorageFailed
from wal.lifecycle import TRANSITIONS, WalEvent, WalLifecycle, WalState, refusal


def walk(*events: WalEvent) -> WalState:
    lifecycle = WalLifecycle()
    for event in events:
        lifecycle.apply(event)
    return lifecycle.state


OPENED = (WalEvent.FIRST_TICK_DURABLE, WalEvent.RECOVERED)


def test_first_tick_comes_before_recovery_and_recovery_before_appends() -> None:
    assert walk() is WalState.OPENING
    assert walk(*OPENED[:1]) is WalState.RECOVERING
    assert walk(*OPENED) is WalState.AVAILABLE
    with pytest.raises(AssertionError):
        walk(WalEvent.RECOVERED)


@pytest.mark.parametrize("stage", range(3))
def test_every_stage_can_be_closed(stage: int) -> None:
    assert walk(*OPENED[:stage], WalEvent.CLOSE) in (WalState.CLOSED, WalState.CLOSING)


def test_close_drains_before_it_is_closed_and_stays_closed() -> None:
    assert walk(*OPENED, WalEvent.CLOSE) is WalState.CLOSING
    assert walk(*OPENED, WalEvent.CLOSE, WalEvent.DRAINED, WalEvent.CLOSE) is WalState.CLOSED


def test_fence_outranks_a_failed_write() -> None:
    assert walk(*OPENED, WalEvent.WRITE_FAILED) is WalState.POISONED
    assert walk(*OPENED, WalEvent.WRITE_FAILED, WalEvent.FENCE) is WalState.FENCED
    assert walk(*OPENED, WalEvent.FENCE, WalEvent.WRITE_FAILED) is WalState.FENCED


def test_nothing_leads_back_to_available() -> None:
    for (state, _), following in TRANSITIONS.items():
        assert following is not WalState.AVAILABLE or state is WalState.RECOVERING


def test_illegal_event_changes_nothing() -> None:
    for state, event in itertools.product(WalState, WalEvent):
        lifecycle = WalLifecycle()
        lifecycle.state = state
        if (state, event) not in TRANSITIONS:
            with pytest.raises(AssertionError):
                lifecycle.apply(event)
            assert lifecycle.state is state


@pytest.mark.parametrize(
    "state, error",
    [
        (WalState.OPENING, OnShutdown),
        (WalState.RECOVERING, OnShutdown),
        (WalState.FENCED, ChannelFenced),
        (WalState.POISONED, StorageFailed),
        (WalState.CLOSING, OnShutdown),
        (WalState.CLOSED, OnShutdown),
    ],
)
def test_refusal_names_the_log_and_the_next_step(state: WalState, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"log p0.* — "):
        raise refusal(state, "p0")
