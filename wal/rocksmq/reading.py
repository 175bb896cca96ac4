"""Reads messages of topics for consumers: from memory, or from the log into memory."""

import asyncio
from collections.abc import Sequence
from time import monotonic

from wal.errors import Corrupt, Truncated
from wal.rocksmq import writes
from wal.rocksmq.messages import ConsumerMessage, EntryCache, TopicEntry
from wal.rocksmq.topic import Topic
from wal.rocksmq.writes import TopicWriter, tell_slow
from wal.runtime import mark_heard

READ_BYTES = 1 << 20
"""Bytes that are read and checked at once: consumers mostly ask for the following messages next."""


class TopicReader:
    """Reads the topics of a writer, and caches the last read or produced entries."""

    def __init__(self, writer: TopicWriter) -> None:
        self._writer = writer
        self._cache = EntryCache()
        self._reading = asyncio.Lock()
        self._ahead: asyncio.Future[bool] | None = None

    def recent(self, topic: Topic, ids: Sequence[int], start: int = 0) -> list[ConsumerMessage]:
        """Return the messages of `ids[start:]` that are in the entry of `ids[start]`; empty when
        that entry is not in memory. The ids ascend.
        """
        return self._cache.messages(topic.log_id, ids, start)

    def keep(self, topic: Topic, entry: TopicEntry) -> None:
        """Cache a produced entry."""
        self._cache.put(topic.log_id, entry)

    async def read(self, topic: Topic, first_id: int) -> bool:
        """Read a message and those that follow into memory; return False if the message was deleted
        meanwhile.

        Raises `Corrupt` for damage.
        """
        try:
            await self._read(topic, first_id)
        except Truncated:
            await self._wait_given_up(topic, first_id)
            return False
        except Corrupt:
            if self._writer.topics.get(topic.name) is not topic:
                return False
            raise
        return True

    def read_ahead(self, topic: Topic, delivered_id: int) -> None:
        """Read the next messages once half of the last read is delivered, while its
        acknowledgements are under way.
        """
        if delivered_id in topic.newest_half and (self._ahead is None or self._ahead.done()):
            self._ahead = asyncio.ensure_future(self.read(topic, topic.newest_half.stop))
            self._ahead.add_done_callback(mark_heard)  # the reader that needs it gets the error

    async def close(self) -> None:
        """Wait for the running read-ahead."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def _read(self, topic: Topic, first_id: int) -> None:
        began = monotonic()
        async with self._reading:
            # Another consumer may have read it meanwhile: consumers want the same messages at the
            # same time.
            if self._cache.find(topic.log_id, first_id):
                return
            turn = monotonic()
            entries = await self._read_some(topic, first_id)
        for each in reversed(entries):  # so that the requested entry is evicted last
            self._cache.put(topic.log_id, each)
        first = entries[0].first_position
        end = entries[-1].last_position + 1
        if end <= topic.end_id:
            topic.newest_half = range((first + end) // 2, end)
        taken = monotonic()
        if taken - began > writes.SLOW_S:
            tell_slow("consume", topic, began, turn=turn, taken=taken)

    async def _read_some(self, topic: Topic, first_id: int) -> list[TopicEntry]:
        try:
            return await topic.log.read(first_id, bytes_max=READ_BYTES)
        except Corrupt:
            # the requested entry alone may be sound
            return await topic.log.read(first_id, bytes_max=1)

    async def _wait_given_up(self, topic: Topic, message_id: int) -> None:
        """Return once a topic begins above a message, or the write that deletes it has failed."""
        if topic.begin_id <= message_id and self._writer.topics.get(topic.name) is topic:
            await self._writer.landed.wait()
