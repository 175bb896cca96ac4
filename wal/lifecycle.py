"""States of a WAL and what moves it between them. Pure.

    OPENING --first tick--> RECOVERING --recovered--> AVAILABLE --close--> CLOSING --drained--> CLOSED
       |                        |                      |     |                ^
       +--------close-----------+--> CLOSED            |     +--fence--> FENCED, write failed--> POISONED --close--+

Only AVAILABLE takes appends. FENCED and POISONED never return: a new term is a new WAL. A fence outranks a failed write,
because reopening helps only against the latter.
"""

from enum import Enum, unique

from wal.errors import ChannelFenced, OnShutdown, StorageFailed, StreamingNodeError


@unique
class WalState(Enum):
    """What a WAL can do now."""

    OPENING = "opening"
    """The first tick of the term is not durable yet."""
    RECOVERING = "recovering"
    """State is being rebuilt from the log; nothing else is appended."""
    AVAILABLE = "available"
    FENCED = "fenced"
    """A newer term owns the log."""
    POISONED = "poisoned"
    """A write failed with an unknown outcome; the log must be reopened and verified."""
    CLOSING = "closing"
    """New appends are refused, those in flight end."""
    CLOSED = "closed"


@unique
class WalEvent(Enum):
    """What happens to a WAL."""

    FIRST_TICK_DURABLE = "first tick durable"
    RECOVERED = "recovered"
    FENCE = "fence"
    WRITE_FAILED = "write failed"
    CLOSE = "close"
    DRAINED = "drained"


_S, _E = WalState, WalEvent
TRANSITIONS: dict[tuple[WalState, WalEvent], WalState] = {
    (_S.OPENING, _E.FIRST_TICK_DURABLE): _S.RECOVERING,
    (_S.OPENING, _E.CLOSE): _S.CLOSED,
    (_S.RECOVERING, _E.RECOVERED): _S.AVAILABLE,
    (_S.RECOVERING, _E.CLOSE): _S.CLOSED,
    (_S.AVAILABLE, _E.FENCE): _S.FENCED,
    (_S.AVAILABLE, _E.WRITE_FAILED): _S.POISONED,
    (_S.AVAILABLE, _E.CLOSE): _S.CLOSING,
    (_S.FENCED, _E.FENCE): _S.FENCED,
    (_S.FENCED, _E.WRITE_FAILED): _S.FENCED,
    (_S.FENCED, _E.CLOSE): _S.CLOSING,
    (_S.POISONED, _E.FENCE): _S.FENCED,
    (_S.POISONED, _E.WRITE_FAILED): _S.POISONED,
    (_S.POISONED, _E.CLOSE): _S.CLOSING,
    (_S.CLOSING, _E.FENCE): _S.CLOSING,
    (_S.CLOSING, _E.WRITE_FAILED): _S.CLOSING,
    (_S.CLOSING, _E.CLOSE): _S.CLOSING,
    (_S.CLOSING, _E.DRAINED): _S.CLOSED,
    (_S.CLOSED, _E.CLOSE): _S.CLOSED,
}


class WalLifecycle:
    """The state of one WAL."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = WalState.OPENING

    def apply(self, event: WalEvent) -> WalState:
        """Move on and return the new state; an event that has no place in this state is a bug and changes nothing."""
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"{event.name} has no place in {self.state.name}"
        self.state = following
        return following


def refusal(state: WalState, name: str) -> StreamingNodeError:
    """Return the error of an append on the WAL of pchannel `name` in `state`; it did nothing."""
    match state:
        case WalState.FENCED:
            return ChannelFenced(f"a newer owner has taken over log {name} — connect to that owner")
        case WalState.POISONED:
            return StorageFailed(f"log {name} takes no appends since a write failed — it is being reopened, try again")
        case WalState.CLOSING | WalState.CLOSED:
            return OnShutdown(f"log {name} is {state.value}")
        case WalState.OPENING | WalState.RECOVERING | WalState.AVAILABLE:
            return OnShutdown(f"log {name} is {state.value} — append once it has opened")
