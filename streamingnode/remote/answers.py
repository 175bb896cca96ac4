"""The writes of one client: from frames to groups that wait for the log, and from outcomes to frames of results."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from streamingnode.embedded import EmbeddedBackend
from streamingnode.errors import AccessDenied
from streamingnode.remote.calls import Access, WireError, encode, error_to_wire
from streamingnode.remote.connection import Connection
from streamingnode.remote.writes import (
    FIRST_EPOCH,
    Targets,
    WireGroup,
    WireResult,
    WireTarget,
    WireWrites,
    groups_of,
    result_to_wire,
)
from streamingnode.writing.target import BatchTarget
from wal.append import AppendGroup, AppendResult
from wal.errors import ProtocolError, StreamingNodeError
from wal.frames import Frame, FrameKind
from wal.position import CLIENT_PRODUCER_IDS, NODE_PRODUCER_ID, SEQUENCE_MAX, ProducerStamp

EPOCH_END = 1 << 32
"""The log has 4 bytes for an epoch."""
WRITE_BYTES_MAX = 8 << 20
"""Frames of writes that one connection may have unanswered, besides the first."""


class Rights:
    """What a client may do; `everything` for who may open the node's directory anyway."""

    def __init__(
        self, name: str, allowed: dict[Access, frozenset[str]] | None = None, *, until_s: float = math.inf
    ) -> None:
        self.name, self.until_s = name, until_s
        """`until_s` is the Unix time at which they end."""
        self._allowed = allowed
        """By right: the collections, `*` for all."""

    def check(self, access: Access, collection: str | None) -> None:
        """Raise `AccessDenied` unless the client may do this with a collection, or with something for None."""
        if self._allowed is None:
            return
        names = self._allowed.get(access, frozenset())
        if names and (collection is None or "*" in names or collection in names):
            return
        raise AccessDenied(f"{self.name!r} may not {access.value} {collection or 'here'}")


class Told:
    """Passes on to its client what becomes of one write; the other side of `AppendGroup.waiter`."""

    __slots__ = ("_frame", "_group", "_is_done")

    def __init__(self, frame: "_Unanswered", group: int) -> None:
        self._frame, self._group, self._is_done = frame, group, False

    def done(self) -> bool:
        """Whether it was told, or cancelled."""
        return self._is_done

    def cancel(self) -> None:
        """Take no answer any more."""
        self._is_done = True

    def set_result(self, result: AppendResult, /) -> None:
        """Pass the result on."""
        self._is_done = True
        self._frame.writes.results.append(result_to_wire(self._frame.number, self._group, result))
        self._frame.answered()

    def set_exception(self, error: Exception, /) -> None:
        """Pass the error on."""
        self._is_done = True
        self._frame.writes.failures.append((self._frame.number, self._group, error_to_wire(error)))
        self._frame.answered()


class _Unanswered:
    """A frame of writes: whom its results are for, and how many are still to come."""

    __slots__ = ("left", "number", "size_bytes", "told", "writes")

    def __init__(self, writes: "ClientWrites", number: int, groups: int, size_bytes: int) -> None:
        self.writes, self.number, self.size_bytes, self.left = writes, number, size_bytes, groups
        self.told = [Told(self, group) for group in range(groups)]

    def answered(self) -> None:
        """Note that there is a result, or an error, to be sent: all of a turn of the event loop together."""
        self.writes.send_soon()
        self.left -= 1
        if not self.left:
            self.told = []  # which refer to this frame
            self.writes.forget(self.number)


class ClientWrites:
    """What one client has written and was not told of. `work` runs what its connection's end does not cut off."""

    def __init__(
        self,
        backend: EmbeddedBackend,
        targets: Targets,
        connection: Connection,
        client_id: int,
        rights: Rights,
        work: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._backend, self._targets, self._connection = backend, targets, connection
        self._client_id, self._rights, self._work = client_id, rights, work
        self._loop = asyncio.get_running_loop()
        self.results: list[WireResult] = []
        self.failures: list[tuple[int, int, WireError]] = []
        self._unanswered: dict[int, _Unanswered] = {}
        """Frames of writes, by number."""
        self._unanswered_bytes = 0
        self._without_room: deque[AppendGroup] = deque()
        """Those that wait for room in the node's memory; bounded by what may be unanswered."""
        self._is_joining = self._is_sending = False

    @property
    def is_busy(self) -> bool:
        """Whether the client is to hear of some."""
        return bool(self._unanswered or self.results or self.failures)

    def take(self, frame: Frame) -> None:
        """Have the writes of a frame wait for the log. Raises `ProtocolError`."""
        writes: WireWrites = frame.value(WireWrites)
        size_bytes = len(frame.meta) + len(frame.payload)
        if self._unanswered and self._unanswered_bytes + size_bytes > WRITE_BYTES_MAX:
            raise ProtocolError(f"over {WRITE_BYTES_MAX} bytes of writes without an answer")
        if frame.number in self._unanswered:
            raise ProtocolError(f"a second frame of writes {frame.number}")
        self._backend.channel.settle_client(self._client_id, writes.settled)
        taken = groups_of(writes, memoryview(frame.payload), self.target, self._stamp, self._backend.config.wal)
        unanswered = self._unanswered[frame.number] = _Unanswered(self, frame.number, len(taken), size_bytes)
        self._unanswered_bytes += size_bytes
        groups: list[AppendGroup] = []
        for group, told in zip(taken, unanswered.told, strict=True):
            if not isinstance(group, AppendGroup):
                told.set_exception(group)
                continue
            group.waiter = told
            stamp = group.producer
            if stamp is not None and stamp.producer_id < CLIENT_PRODUCER_IDS:
                group.place = self._backend.place(stamp.producer_id, stamp.epoch, stamp.sequence)
            groups.append(group)
        if self._without_room or not self._backend.channel.wal.packer.try_join(groups):
            self._without_room += groups
            if not self._is_joining:
                self._is_joining = True
                self._work(self._join())

    async def _join(self) -> None:
        """Have those wait for the log for which there was no room in memory, in order."""
        try:
            while self._without_room:
                group = self._without_room[0]
                try:
                    if not group.cancelled:
                        await self._backend.channel.wal.packer.join(group)
                except StreamingNodeError as error:
                    group.settle(error)
                self._without_room.popleft()
        finally:
            self._is_joining = False

    def target(self, wire: WireTarget) -> BatchTarget:
        """Return where rows go. Raises as `Targets.find` does, and `AccessDenied`."""
        target = self._targets.find(wire)
        self._rights.check(Access.PRODUCE, self._backend.catalog.live(wire.collection_id).name)
        return target

    def _stamp(self, group: WireGroup) -> ProducerStamp:
        return self.stamp(group.producer_id, group.epoch, group.sequence)

    def stamp(self, producer_id: int, epoch: int, sequence: int) -> ProducerStamp:
        """Return the stamp of a write of this client, producer id 0, or of a named producer that is open.

        Raises `ProducerFenced`, and `ProtocolError` for the node's own producer, another client, and numbers that are none.
        """
        is_own = producer_id == 0 and epoch == FIRST_EPOCH
        is_named = NODE_PRODUCER_ID < producer_id < CLIENT_PRODUCER_IDS and 0 < epoch < EPOCH_END
        if not 1 <= sequence <= SEQUENCE_MAX or not (is_own or is_named):
            raise ProtocolError(f"sequence {sequence} of producer {producer_id}, epoch {epoch}")
        if is_named:
            self._backend.channel.check_producer(producer_id, epoch)
        return ProducerStamp(producer_id or self._client_id, epoch, sequence)

    def send_soon(self) -> None:
        """Send results and errors at the end of this turn of the event loop."""
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send_results)

    def forget(self, number: int) -> _Unanswered | None:
        """Keep nothing of a frame any more; return what was kept."""
        if (frame := self._unanswered.pop(number, None)) is not None:
            self._unanswered_bytes -= frame.size_bytes
        return frame

    def _send_results(self) -> None:
        self._is_sending = False
        results, self.results = self.results, []
        failures, self.failures = self.failures, []
        if results or failures:
            self._connection.send(FrameKind.RESULTS, 0, None, encode((results, failures)))

    def cancel(self, number: int) -> None:
        """Leave out of the log what of a frame is not in it, and answer none of it."""
        if (frame := self.forget(number)) is not None:
            for each in frame.told:
                each.cancel()
