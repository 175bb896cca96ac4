"""The node's own producer: numbers every write that has no stamp of its own, and repeats it until its outcome is known.

In come append groups of the node's callers: inserts that were put together, single writes, transactions, schema changes.
Each gets a sequence of its own here, once, whatever its callers do with timeouts and cancellation. Writes that carry a named
producer's stamp are repeated in the same way.
"""

from streamingnode.writing.retry import Retry
from streamingnode.writing.retry_room import RetryRoom
from wal.append import AppendGroup, AppendResult
from wal.producer_stamp import NODE_PRODUCER_ID, ProducerStamp


class OwnProducer:
    """The node's writes on one log; `epoch` is the term it was opened with, sequences go on after `last_sequence`."""

    def __init__(self, retry: Retry, room: RetryRoom, *, epoch: int, last_sequence: int) -> None:
        self._retry = retry
        self._room = room
        self._epoch = epoch
        self._first_sequence = last_sequence + 1

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group, once; raises and can be cancelled as `Retry.append`.

        With too many open outcomes before it, it waits until the oldest is known.
        """
        if group.producer is not None:
            return await self._retry.append(group)
        place = await self._room.enter()
        try:
            group.producer = ProducerStamp(NODE_PRODUCER_ID, self._epoch, self._first_sequence + place)
            return await self._retry.append(group)
        finally:
            self._room.leave(place)
