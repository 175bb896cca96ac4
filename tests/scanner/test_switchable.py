"""The table of modes, by itself."""

from scanner.source import TRANSITIONS, Event, Mode


def test_every_mode_can_be_left_and_reached() -> None:
    assert {mode for mode, _ in TRANSITIONS} == set(Mode)
    assert set(TRANSITIONS.values()) == set(Mode)
    assert {event for _, event in TRANSITIONS} == set(Event)


def test_only_an_eviction_leaves_the_tail() -> None:
    leaving = {event for (mode, event), after in TRANSITIONS.items() if mode is Mode.TAILING and after is not mode}
    assert leaving == {Event.EVICTED}
