"""Who wrote an append group, and which of its writes it is: what makes a retry recognisable. No I/O.

A stamp names one write of one producer on one log, for ever: whoever sends the same stamp again means the same write, and
gets its result instead of a second one. Sequences go on over restarts; the epoch says which life of the producer speaks,
and an older life is refused once a newer one has spoken. What is remembered, and how long: ADR 0009.
"""

import msgspec

from wal.errors import InvalidArgument

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
