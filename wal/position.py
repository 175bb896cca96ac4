"""Positions of messages in a log, and the stamps that identify the writes of producers. No I/O."""

import re
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from wal.errors import InvalidArgument, shown

FIRST_POSITION = 1
"""The position of the first message of a log; a log that begins above it was truncated."""
POSITION_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, order=True)
class MessageId:
    """Position of one message in its log: dense and ascending in one pchannel.

    Comparing the order of ids of two kinds of log raises `TypeError`, because their numbers are
    unrelated.
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
"""Producer ids from here on belong to clients without a named producer, which draw their own id.
Named producers have lower ids; 0 means no producer.
"""
SEQUENCE_MAX = POSITION_MAX


class ProducerStamp(msgspec.Struct, frozen=True, gc=False):
    """Identifies one write of one producer on one log for ever: sending the same stamp again means
    the same write (ADR 0009).

    Sequences start at 1, continue over restarts, may have gaps and may arrive out of order. The
    epoch is a fencing token of the producer's openings: an older epoch is refused after a newer
    one. On the way to the log, sequence 0 stands for the next one, which is drawn in the step that
    gives the group its place in the log.
    """

    producer_id: int
    epoch: int
    sequence: int


def check_sequence(sequence: object) -> int:
    """Return a sequence passed by a caller, checked. Raises `InvalidArgument` unless it is from 1
    to `SEQUENCE_MAX`.
    """
    if (
        isinstance(sequence, bool)
        or not isinstance(sequence, int)
        or not 1 <= sequence <= SEQUENCE_MAX
    ):
        raise InvalidArgument(
            f"sequence={shown(sequence)} — pass a number from 1 to {SEQUENCE_MAX}, a new one for "
            "each write"
        )
    return sequence
