"""Where a message is in its log, and which write of which producer it is. No I/O."""

import re
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from wal.errors import InvalidArgument, shown

FIRST_POSITION = 1
"""Of the first message of a log; a log that begins above it was truncated."""
POSITION_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """Position of one message in its log: dense and ascending in one pchannel.

    Ordering ids of two kinds of log is a `TypeError`, never an answer: their numbers mean different
    things.
    """

    position: int
    wal_name: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"{self.wal_name}/{np.base_repr(self.position, 36).lower()}"


class RocksMessageId(MessageId):
    """Position in a log on RocksDB."""

    __slots__ = ()
    wal_name = "rocks"


class MemoryMessageId(MessageId):
    """Position in an in-memory log."""

    __slots__ = ()
    wal_name = "memory"


MESSAGE_ID_KINDS: dict[str, type[MessageId]] = {
    kind.wal_name: kind for kind in (RocksMessageId, MemoryMessageId)
}


def message_id_kind(wal_name: str) -> type[MessageId]:
    """Return the id class of a kind of log. Raises `InvalidArgument` for an unknown one."""
    if wal_name not in MESSAGE_ID_KINDS:
        raise InvalidArgument(
            f"no kind of log is named {wal_name!r} — one of {', '.join(MESSAGE_ID_KINDS)}"
        )
    return MESSAGE_ID_KINDS[wal_name]


def parse_message_id(text: str) -> MessageId:
    """Return the id that `str(message_id)` wrote, for example `rocks/1a`. Raises `InvalidArgument`
    for other text.
    """
    wal_name, _, digits = text.partition("/")
    kind = message_id_kind(wal_name)
    if not re.fullmatch("[0-9a-z]{1,13}", digits) or int(digits, 36) > POSITION_MAX:
        raise InvalidArgument(
            f"{shown(digits)} is no message position — give one that a message carries"
        )
    return kind(int(digits, 36))


CLIENT_PRODUCER_IDS = 1 << 62
"""From here on they are of clients without a name, which draw their own; ids of named producers are
below. 0 is no producer.
"""
SEQUENCE_MAX = POSITION_MAX


class ProducerStamp(msgspec.Struct, frozen=True, gc=False):
    """One write of one producer on one log, for ever: whoever sends it again means the same write
    (ADR 0009).

    Sequences count from 1, go on over restarts, may have gaps and may come out of order; the epoch
    says which life of the producer speaks, and an older one is refused once a newer one has spoken.
    On the way to the log sequence 0 stands for the next one, which is drawn in the step that gives
    the group its place there.
    """

    producer_id: int
    epoch: int
    sequence: int


def check_sequence(sequence: object) -> int:
    """Return a sequence as callers may pass one. Raises `InvalidArgument` for anything else."""
    if (
        isinstance(sequence, bool)
        or not isinstance(sequence, int)
        or not 1 <= sequence <= SEQUENCE_MAX
    ):
        raise InvalidArgument(
            f"sequence={shown(sequence)} — pass a number from 1 to {SEQUENCE_MAX}, another one for "
            "each write"
        )
    return sequence
