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
    """One write of one producer; sequences count from 1, may have gaps and may come out of order."""

    producer_id: int
    epoch: int
    sequence: int


def check_sequence(sequence: object) -> int:
    """Return a sequence as callers may pass one. Raises `InvalidArgument` for anything else."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 1 <= sequence <= SEQUENCE_MAX:
        raise InvalidArgument(
            f"sequence={sequence!r} — pass a number from 1 to {SEQUENCE_MAX}, another one for each write"
        )
    return sequence
