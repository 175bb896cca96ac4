import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.errors import InvalidTransactionState, TransactionExpired
from interceptors.txn_session import (
    CLIENT_EVENTS,
    TRANSITIONS,
    Failure,
    Session,
    SessionEvent,
    SessionState,
    TxnLimits,
)
from wal.headers import DeleteHeader, MessageType
from wal.message import Change
from wal.timetick import compose_tick

TXN_ID = compose_tick(1_000)
T0_MS = 500
BODY = Change(MessageType.DELETE, "p0_1v0", DeleteHeader(1, 1), 36)


def session(keepalive_ms: int = 10, **limits: float) -> Session:
    return Session(TXN_ID, keepalive_ms, TxnLimits(**limits), T0_MS, T0_MS)  # type: ignore[arg-type]


def test_idle_session_is_due_at_exactly_its_keepalive() -> None:
    idle = session(keepalive_ms=10)
    assert idle.due(T0_MS + 10 - 1) is None
    assert idle.due(T0_MS + 10) is Failure.EXPIRED


def test_only_a_body_that_succeeded_extends_the_keepalive() -> None:
    extended = session(keepalive_ms=10)
    for acknowledged_ms, expected in [(None, Failure.EXPIRED), (T0_MS + 5, None)]:
        extended.add_bodies([BODY])
        extended.bodies_ended(acknowledged_ms)
        assert extended.due(T0_MS + 10) is expected


def test_session_with_a_body_on_its_way_is_not_idle() -> None:
    busy = session(keepalive_ms=10)
    busy.add_bodies([BODY])
    assert busy.due(T0_MS + 1000) is None


def test_age_ends_a_session_even_with_a_body_on_its_way() -> None:
    busy = session(age_s_max=1)
    busy.add_bodies([BODY])
    assert busy.due(T0_MS + 1000) is Failure.TOO_OLD


@pytest.mark.parametrize(
    "failure, error",
    [
        (Failure.EXPIRED, TransactionExpired),
        (Failure.OVERTAKEN, TransactionExpired),
        (Failure.COMMIT_FAILED, TransactionExpired),
        (Failure.TOO_LARGE, TransactionExpired),
        (Failure.TOO_OLD, TransactionExpired),
    ],
)
def test_failed_session_stays_so_and_says_why(failure: Failure, error: type[Exception]) -> None:
    failed = session()
    failed.fail(failure)
    for _ in range(2):
        with pytest.raises(error, match=failure.value):
            failed.add_bodies([BODY])
        with pytest.raises(error, match=failure.value):
            failed.request_commit()
    assert failed.bodies == []
    assert failed.in_flight == 0


def test_commit_waits_for_bodies_on_their_way_and_takes_no_more() -> None:
    busy = session()
    busy.add_bodies([BODY])
    assert not busy.request_commit()
    with pytest.raises(InvalidTransactionState):
        busy.add_bodies([BODY])
    assert busy.bodies_ended(T0_MS + 1)
    assert busy.request_commit()


def test_commit_may_be_asked_for_again_until_it_is_handed_over() -> None:
    busy = session()
    busy.add_bodies([BODY])
    assert not busy.request_commit()
    busy.bodies_ended(T0_MS + 1)
    assert busy.request_commit()
    with pytest.raises(InvalidTransactionState):
        busy.request_commit()


def test_commit_sent_back_out_of_place_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        session().apply(SessionEvent.SENT_BACK)


@pytest.mark.parametrize("state", SessionState)
@pytest.mark.parametrize("event", SessionEvent)
def test_event_outside_the_table_raises_and_changes_nothing(
    state: SessionState, event: SessionEvent
) -> None:
    at = session()
    at.state = state
    if (state, event) in TRANSITIONS:
        at.apply(event)
        assert at.state is TRANSITIONS[state, event]
        return
    with pytest.raises(InvalidTransactionState if event in CLIENT_EVENTS else AssertionError):
        at.apply(event)
    assert at.state is state


@given(st.lists(st.booleans(), max_size=20))
def test_size_is_that_of_the_bodies_kept(succeeds: list[bool]) -> None:
    counted = session()
    for succeeded in succeeds:
        counted.add_bodies([BODY, BODY])
        if not succeeded:
            counted.drop_bodies([BODY, BODY])
        counted.bodies_ended(T0_MS if succeeded else None)
    assert counted.size_bytes == 100 * len(counted.bodies) == 200 * sum(succeeds)


def test_bodies_overflow_by_size_and_by_count() -> None:
    assert not session(size_bytes_max=200, bodies_max=2).overflows([BODY, BODY])
    assert session(size_bytes_max=199).overflows([BODY, BODY])
    assert session(bodies_max=1).overflows([BODY, BODY])
