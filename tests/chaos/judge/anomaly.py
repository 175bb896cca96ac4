"""What can be wrong with a history."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What is wrong."""

    LOST = "lost write"
    DUPLICATE = "duplicate"
    ABORTED = "aborted read"
    INVENTED = "read of what nobody wrote"
    CHANGED = "changed bytes"
    POSITION = "inconsistent position"
    OFFSET = "inconsistent row offset"
    SKIPPED = "skipped read"
    BACKWARDS = "backwards read"
    TORN = "torn transaction"
    STATE = "wrong state"
    ORDER = "real-time order"
    CYCLE = "cycle"
    ERROR = "strange error"
    BELOW = "damage below"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One thing that must not be, with the values, ticks and calls to look at."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"
