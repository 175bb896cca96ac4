"""One streamed transaction as a state machine. Pure: times come in as arguments; waits and the log
are in `txn`.

IN_FLIGHT takes bodies. A commit waits until no body is in flight (ON_COMMIT). Then the log has it
(COMMITTING), and only the log's result ends that state. A session that can no longer commit is
FAILED until its rollback is in the log. Once its commit or rollback is in the log, the session is
removed.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from interceptors.errors import InvalidTransactionState, TransactionExpired
from wal.message import MESSAGE_OVERHEAD_BYTES, Change


class SessionState(Enum):
    """The state of a transaction."""

    IN_FLIGHT = auto()
    ON_COMMIT = auto()
    COMMITTING = auto()
    FAILED = auto()
    ON_ROLLBACK = auto()


class SessionEvent(Enum):
    """What can happen to a transaction."""

    BODY = auto()
    COMMIT = auto()
    HAND_OVER = auto()  # the commit goes to the log
    SENT_BACK = auto()  # the commit has to wait for a segment and will come again
    FAIL = auto()  # also when its commit or rollback failed before the log had it
    ROLLBACK = auto()


_S = SessionState
_E = SessionEvent
TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (_S.IN_FLIGHT, _E.BODY): _S.IN_FLIGHT,
    (_S.IN_FLIGHT, _E.COMMIT): _S.ON_COMMIT,
    (_S.ON_COMMIT, _E.COMMIT): _S.ON_COMMIT,
    (_S.ON_COMMIT, _E.HAND_OVER): _S.COMMITTING,
    (_S.COMMITTING, _E.SENT_BACK): _S.ON_COMMIT,
    (_S.IN_FLIGHT, _E.FAIL): _S.FAILED,
    (_S.ON_COMMIT, _E.FAIL): _S.FAILED,
    (_S.COMMITTING, _E.FAIL): _S.FAILED,
    (_S.ON_ROLLBACK, _E.FAIL): _S.FAILED,
    (_S.IN_FLIGHT, _E.ROLLBACK): _S.ON_ROLLBACK,
    (_S.ON_COMMIT, _E.ROLLBACK): _S.ON_ROLLBACK,
    (_S.FAILED, _E.ROLLBACK): _S.ON_ROLLBACK,
}

CLIENT_EVENTS = frozenset({_E.BODY, _E.COMMIT, _E.ROLLBACK})
"""A client may request these in a wrong state; any other illegal event is our bug."""

OPEN = frozenset({_S.IN_FLIGHT, _S.ON_COMMIT})
"""States in which a session may still fail: neither its commit nor its rollback went to the log."""


class Failure(Enum):
    """Why a transaction can no longer commit; the value is the reason in its rollback message."""

    EXPIRED = "no body within its keepalive"
    TOO_OLD = "over its maximum age"
    TOO_LARGE = "over its maximum size"
    OVERTAKEN = "a schema change of one of its collections came in between"
    COMMIT_FAILED = "its commit could not be written"
    ROLLBACK_FAILED = "its rollback could not be written"


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnLimits:
    """Bounds of streamed transactions; a begin that names no keepalive gets the default."""

    keepalive_ms_default: int = 10_000
    age_s_max: float = 600  # an open transaction holds back truncation
    size_bytes_max: int = 128 << 20  # readers hold a transaction in memory until its commit
    # a commit carries one assignment for each body and must fit in a log entry
    bodies_max: int = 65_536
    sessions_max: int = 1024


@dataclass(slots=True, eq=False)
class Session:
    """One transaction; `bodies` are in log order. Milliseconds are of a monotonic clock
    (ADR 0013).
    """

    txn_id: int  # the tick of its begin
    keepalive_ms: int
    limits: TxnLimits
    begun_ms: int
    active_ms: int  # when its last body was acknowledged
    state: SessionState = SessionState.IN_FLIGHT
    failure: Failure | None = None
    in_flight: int = 0
    size_bytes: int = 0
    bodies: list[Change] = field(default_factory=list)

    @property
    def vchannels(self) -> frozenset[str]:
        """The vchannels the transaction has bodies on."""
        return frozenset(body.vchannel for body in self.bodies)

    def apply(self, event: SessionEvent) -> None:
        """Move along `TRANSITIONS`.

        Raises a typed error for a client's illegal event; the session is then unchanged.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            assert event in CLIENT_EVENTS, f"{event} in {self.state}"
            if self.failure is not None:
                raise TransactionExpired(
                    f"transaction {self.txn_id} is rolled back: {self.failure.value} — begin a new "
                    "one"
                )
            raise InvalidTransactionState(
                f"transaction {self.txn_id} is ending already ({self.state.name}) — begin a new one"
            )
        self.state = after

    def due(self, now_ms: int) -> Failure | None:
        """Return why the transaction may not go on at `now_ms`, None if it may."""
        if self.state not in OPEN:
            return None
        if now_ms - self.begun_ms >= self.limits.age_s_max * 1000:
            return Failure.TOO_OLD
        # A client with a body in flight is not idle: it waits for the disk.
        if not self.in_flight and now_ms - self.active_ms >= self.keepalive_ms:
            return Failure.EXPIRED
        return None

    def overflows(self, bodies: list[Change]) -> bool:
        """Whether `bodies` would pass the size limits."""
        size_bytes = self.size_bytes + size_of_bodies(bodies)
        return (
            size_bytes > self.limits.size_bytes_max
            or len(self.bodies) + len(bodies) > self.limits.bodies_max
        )

    def fail(self, failure: Failure) -> None:
        """Make the session unable to commit; a rollback has to follow."""
        self.apply(SessionEvent.FAIL)
        self.failure = self.failure or failure

    def add_bodies(self, bodies: list[Change]) -> None:
        """Add bodies in flight, in log order. Raises a typed error when the session takes none."""
        self.apply(SessionEvent.BODY)
        self.bodies += bodies
        self.size_bytes += size_of_bodies(bodies)
        self.in_flight += 1

    def drop_bodies(self, bodies: list[Change]) -> None:
        """Remove the bodies last added: the log never had them."""
        assert self.bodies[-len(bodies) :] == bodies, (
            "bodies are refused in the step that added them"
        )
        del self.bodies[-len(bodies) :]
        self.size_bytes -= size_of_bodies(bodies)

    def bodies_ended(self, acknowledged_ms: int | None) -> bool:
        """Count one append of bodies as ended; return whether none is in flight any more.

        `acknowledged_ms` is None when it failed.
        """
        assert self.in_flight > 0, "an append of bodies ends once"
        self.in_flight -= 1
        if acknowledged_ms is not None:
            self.active_ms = max(self.active_ms, acknowledged_ms)
        return not self.in_flight

    def request_commit(self) -> bool:
        """Request the commit; return True if it may go to the log now, False if it has to wait for
        bodies in flight.
        """
        # This may be called again: after a wait, and by a client whose first commit timed out. The
        # first request that is handed over is the commit.
        self.apply(SessionEvent.COMMIT)
        if self.in_flight:
            return False
        self.apply(SessionEvent.HAND_OVER)
        return True


def size_of_bodies(bodies: list[Change]) -> int:
    """Return the size of bodies as it counts against the limit of a transaction."""
    return sum(body.payload_bytes for body in bodies) + MESSAGE_OVERHEAD_BYTES * len(bodies)
