"""Positions in a log that compare only with positions of the same kind of log."""

from dataclasses import dataclass
from typing import ClassVar, Self

import msgspec

from wal.errors import InvalidArgument

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
FIRST_POSITION = 1
"""Of the first message of a log; a log that begins above it was truncated."""
POSITION_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=False)
class MessageId:
    """Position of one message in its log: dense and ascending in one pchannel.

    Comparing ids of two kinds of log is a `TypeError`, never an answer: their numbers mean different things.
    """

    position: int
    wal_name: ClassVar[str] = ""

    def marshal(self) -> str:
        """Return the id as base-36 text, as `unmarshal` reads it."""
        return to_base36(self.position)

    @classmethod
    def unmarshal(cls, text: str) -> Self:
        """Return the id that `marshal` wrote. Raises `InvalidArgument` for anything else."""
        return cls(from_base36(text))

    def __lt__(self, other: object) -> bool:
        return self.position < self._own(other).position

    def __le__(self, other: object) -> bool:
        return self.position <= self._own(other).position

    def __gt__(self, other: object) -> bool:
        return self.position > self._own(other).position

    def __ge__(self, other: object) -> bool:
        return self.position >= self._own(other).position

    def __str__(self) -> str:
        return f"{self.wal_name}/{self.marshal()}"

    def _own(self, other: object) -> "MessageId":
        if type(other) is not type(self):
            raise TypeError(f"{self} compares with ids of its own log only, not with {other!r}")
        return other


class RocksMessageId(MessageId):
    """Position in a RocksMQ log."""

    __slots__ = ()
    wal_name = "rocksmq"


class MemoryMessageId(MessageId):
    """Position in an in-memory log."""

    __slots__ = ()
    wal_name = "memory"


_KINDS: dict[str, type[MessageId]] = {kind.wal_name: kind for kind in (RocksMessageId, MemoryMessageId)}


def message_id_kind(wal_name: str) -> type[MessageId]:
    """Return the id class of a kind of log. Raises `InvalidArgument` for an unknown one."""
    kind = _KINDS.get(wal_name)
    if kind is None:
        raise InvalidArgument(f"no kind of log is named {wal_name!r} — one of {', '.join(_KINDS)}")
    return kind


def parse_message_id(text: str) -> MessageId:
    """Return the id that `str(message_id)` wrote, for example `rocksmq/1a`."""
    wal_name, _, position = text.partition("/")
    return message_id_kind(wal_name).unmarshal(position)


def to_base36(number: int) -> str:
    """Return a non-negative integer in lower-case base 36."""
    if number < 0:
        raise InvalidArgument(f"{number} is negative and has no position text — positions count from 0")
    digits = ""
    while True:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
        if not number:
            return digits


def from_base36(text: str) -> int:
    """Return the integer `to_base36` wrote. Raises `InvalidArgument` for other text or over 63 bits."""
    if not text or any(character not in _DIGITS for character in text) or int(text, 36) > POSITION_MAX:
        raise InvalidArgument(f"{text!r} is no message position — give one that a message carries")
    return int(text, 36)


# --- producer stamp ---
#
# Who wrote an append group, and which of its writes it is: what makes a retry recognisable. No I/O.
#
# A stamp names one write of one producer on one log, for ever: whoever sends the same stamp again means the same write, and
# gets its result instead of a second one. Sequences go on over restarts; the epoch says which life of the producer speaks,
# and an older life is refused once a newer one has spoken. What is remembered, and how long: ADR 0009.


NODE_PRODUCER_ID = 1
"""The node's own writes. 0 is no producer; ids of named producers are drawn from above."""

PRODUCER_ID_MAX = (1 << 63) - 1
EPOCH_MAX = (1 << 31) - 1
SEQUENCE_MAX = (1 << 63) - 1


class ProducerStamp(msgspec.Struct, frozen=True, gc=False):
    """One write of one producer; sequences count from 1, may have gaps and may come out of order.

    On the way to the log 0 stands for the next one, which is drawn in the step that gives the group its place there.
    """

    producer_id: int
    epoch: int
    sequence: int


class Place:
    """Keeps the place of one write while somebody refers to it: whoever may still send the write, and its group.

    Not the stamp itself, because entries that readers keep in memory carry that, too.
    """

    __slots__ = ("__weakref__", "stamp")

    def __init__(self, stamp: ProducerStamp) -> None:
        self.stamp = stamp


def check_sequence(sequence: object) -> int:
    """Return a sequence as callers may pass one. Raises `InvalidArgument` for anything else."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 1 <= sequence <= SEQUENCE_MAX:
        raise InvalidArgument(
            f"sequence={sequence!r} — pass a number from 1 to {SEQUENCE_MAX}, another one for each write"
        )
    return sequence
