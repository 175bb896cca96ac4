"""The spool of a client: its writes go to an outbox on the client's disk and from there to the
node, in order and exactly once, even while the node is away.

A local node in its own directory stores the writes as messages of a topic. One task sends the
oldest message. The next one follows when every write of that message is in the log or is a dead
letter, so the writes of one caller keep their order. Each write has a sequence of the spool's own
named producer. By it the node recognizes the write after a crash of either side, however much later
(ADR 0009).
"""

import asyncio
import secrets
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import pyarrow as pa
from msgspec.structs import replace

from flusher.run import CutScheduleOptions, FlushOptions
from interceptors.errors import ProducerFenced, SequenceTooOld
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from streamingnode.config import NodeConfig, ServeOptions
from streamingnode.node import Node
from streamingnode.remote.client import GRACE_S, RemoteBackend
from streamingnode.remote.link import LinkState
from streamingnode.remote.writes import FIRST_EPOCH, FrameOfWrites, Lane, Unit, WireWrites, frame_of
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.streams.messages import parts_within
from streamingnode.writing.target import WriteTarget
from wal.address import Address, LinkOptions
from wal.append import AppendGroup, AppendResult, Pack, SpooledResult
from wal.errors import Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.frames import FRAME_BYTES_MAX, PREFACE, FrameKind, FrameReader, encode_frame
from wal.headers import MessageType
from wal.packer import Packer
from wal.position import SEQUENCE_MAX, MessageId, ProducerStamp
from wal.queue import Signal
from wal.rocksmq.contract import MessageQueue, MqOptions
from wal.rocksmq.messages import (
    DEAD_SUFFIX,
    PRODUCE_BYTES_MAX,
    ConsumerMessage,
    ProducerMessage,
    dead_letter,
)
from wal.runtime import event_log, outlast, unix_ms
from wal.wire_types import Welcome, decode, encode

_log = event_log(__name__)

WRITES = "writes"
KNOWN = "node"
DEAD = WRITES + DEAD_SUFFIX
"""Topics of the local node: frames of writes, the known state of the target node, and refused
writes.
"""
GROUP = "spool"
CONFIG = NodeConfig(
    serve=ServeOptions(listen=False),
    flush=FlushOptions(schedule=CutScheduleOptions(interval_s=None)),
    mq=MqOptions(page_bytes=1 << 20, retention_s=0),
)
PAUSE_S = 0.5
"""Pause before a temporarily refused message is sent again."""
INDEX_BITS = 10
SALT_BITS = 21
"""Bits of a sequence, from the lowest: the index of a write in its message, which has at most
`PACK_GROUPS_MAX` writes; a random number of each opening, so that two copies of a directory never
use the same sequence; and the number of the message.
"""
MESSAGES_MAX = SEQUENCE_MAX >> (INDEX_BITS + SALT_BITS)
"""The number of messages that one directory may ever keep: 4 billion, a month of uninterrupted
writes by a single writer.
"""
SPOOLED = SpooledResult(MessageId, 0, 0, 0, 0, spooled=True)

SpoolState = Literal["connected", "refused", "away", "closed"]
"""Whether the node accepts kept messages: yes, temporarily not, no connection, or the client is
closed.
"""


class Known(msgspec.Struct, frozen=True):
    """The stored state of the node, used to open a spool while the node is away. The outbox may
    hold writes to `former` collections.
    """

    producer: str
    """The name of the spool's producer at the node."""
    origin: int
    """All message ids are above this one."""
    welcome: Welcome
    collections: tuple[CollectionInfo, ...]
    former: tuple[CollectionInfo, ...] = ()
    epoch: int = 0
    """The epoch that the producer was last opened with from this directory."""


def dead_letters(
    writes: WireWrites, payload: memoryview, refused: dict[int, StreamingNodeError], known: Known
) -> Iterator[tuple[bytes, dict[str, str], StreamingNodeError]]:
    """Yield a dead letter for each refused write and each of its targets: its rows or keys, their
    properties, and the error.

    A body is an Arrow IPC stream, or for an unknown collection the bytes that the frame has for it.
    """
    infos = {(each.id, each.schema_version): each for each in (*known.former, *known.collections)}
    lanes = list[tuple[Lane | memoryview, dict[str, str]]]()
    at = 0
    for wire in writes.targets:
        data = payload[at : at + wire.payload_bytes]
        at = at + wire.payload_bytes
        is_delete = wire.type == MessageType.DELETE
        about = {"kind": "delete" if is_delete else "insert"}
        info = infos.get((wire.collection_id, wire.schema_version))
        if info is None:  # created and dropped between two catalogs
            lanes.append((data, about))
            continue
        target = WriteTarget(info)
        into = target.deletes if is_delete else target.inserts(wire.partition_id)
        about["collection"] = info.name
        about["partition"] = "".join(
            [each.name for each in info.partitions if each.id == wire.partition_id]
        )
        lanes.append((Lane(into, data, is_plain=wire.is_plain), about))
    for index, group in enumerate(writes.groups):
        for number, length in group.pieces:
            lane, about = lanes[number]
            rows = lane if isinstance(lane, memoryview) else lane.take(length).rows
            if (error := refused.get(index)) is None:
                continue
            about = {**about, "code": error.code, "sequence": str(group.sequence)}
            if isinstance(lane, memoryview):
                yield bytes(lane), about, error
                continue
            batch = lane.target.joined([rows])
            with pa.ipc.new_stream(sink := pa.BufferOutputStream(), batch.schema) as stream:
                stream.write_batch(batch)
            yield sink.getvalue().to_pybytes(), about, error


class SpoolingBackend(RemoteBackend):
    """A node in another process that gets writes without a named producer from an outbox; see
    `Backend`.
    """

    def __init__(
        self,
        address: Address,
        options: LinkOptions,
        *,
        directory: Path,
        own: Awaitable[Node],
        bytes_max: int,
    ) -> None:
        super().__init__(address, options)
        self._call_of = self._call_behind
        self._path = str(directory)
        self._bytes_max = bytes_max
        self._opening = own
        self._own: Node | None = None
        self._kept: MessageQueue
        self._outbox: Packer
        self._next_id = 0
        """The id of the oldest message that is not done."""
        self._last_id = 0
        """The id of the newest message."""
        self._first: ConsumerMessage | None = None
        """The message `_next_id`, once it is read."""
        self._salt = secrets.randbits(SALT_BITS)
        self._writes = 0
        self._bytes = 0
        """`_writes` and `_bytes` count the messages that are not done."""
        self._letters = 0
        self._letters_bytes = 0
        self._buried_id = 0
        """The last message whose dead letters are all stored: it and all earlier messages are
        done.
        """
        self._are_letters_known = False
        """False after a write of letters whose outcome is open."""
        self._known: Known
        self._is_saved = False
        """Whether the current `_known` state is on disk."""
        self._saving = asyncio.Lock()
        self._moved = Signal()
        """Woken when the connection's state changes, the catalog arrives, or a message is kept,
        done or refused.
        """
        self._refusal: Exception | None = None
        """Why the oldest message could not be forwarded; None when the last attempt succeeded or
        the connection is new.
        """
        self._producer: ProducerRecord | None = None
        self._reached = 0
        """The producer's last sequence in the log when it was opened, 0 if another opening came
        between. Messages before the one with this sequence are done.
        """

    async def open(self) -> None:
        """Open the spool, then connect. A known node may be unreachable now; the connection is made
        later. Raises the errors of `open_node` and `Link.open`.
        """
        self._own = await self._opening
        self._kept = self._own.mq
        known = await self._look_at_kept()
        await self.link.open(known.welcome if known else None)
        self._known = known or Known(
            f"spool-{secrets.token_hex(8)}", self._last_id, self.link.welcome, ()
        )
        if known and self.link.state is not LinkState.READY:
            self.catalog = Catalog(known.collections)
        self._take_welcome()
        # one message at a time, in the order of the calls
        self._outbox = Packer(self._keep, self.pending.rows, in_flight_max=1)
        await self._save()
        self.link.on_state = self._on_state

    async def _look_at_kept(self) -> Known | None:
        """Count the messages in the outbox; return the stored state of the node, None for a new
        spool.
        """
        mq = self._kept
        for topic in (WRITES, KNOWN):
            await mq.create_topic(topic)
            if not await mq.exist_consumer_group(topic, GROUP):
                await mq.create_consumer_group(topic, GROUP)
        outbox = (await mq.info())[WRITES]
        self._next_id = outbox.groups[GROUP].current_id
        self._last_id = outbox.end_id
        for message_id in range(self._next_id, self._last_id + 1):
            if message := await mq.get_message(WRITES, message_id):
                self._count(message)
        await self._count_letters()
        known = await mq.consume(KNOWN, GROUP, 1)
        return decode(known[0].payload, Known) if known else None

    async def _count_letters(self) -> ConsumerMessage | None:
        """Count the dead letters that are stored, and return the last one."""
        dead = (await self._kept.info()).get(DEAD)
        last = None
        if dead is not None:
            self._letters = dead.end_id + 1 - dead.begin_id
            self._letters_bytes = dead.bytes
            last = await self._kept.get_message(DEAD, dead.end_id)
        if last is not None and last.properties["left"] == "0":
            self._buried_id = int(last.properties["id"])
        self._are_letters_known = True
        return last

    def _count(self, message: ProducerMessage | ConsumerMessage, sign: int = 1) -> None:
        # Not below 0: a message whose write failed may be stored but not counted.
        writes = sign * int(message.properties["writes"])
        self._writes = max(0, self._writes + writes)
        self._bytes = max(0, self._bytes + sign * len(message.payload))

    def work(self) -> Iterable[Coroutine[None, None, None]]:
        """Return the background tasks that run until the node closes."""
        return (*super().work(), self._forward())

    async def drain(self) -> None:
        """Wait for writes that have begun, and for kept messages while the node accepts them; at
        most `GRACE_S`. The rest stays for the next opening.
        """
        with anyio.move_on_after(GRACE_S):
            await self._outbox.drain()
            while self.state == "connected" and self._next_id <= self._last_id:
                await self._moved.wait()
        await super().drain()

    async def close(self) -> None:
        """Close the connection and the local node, which keeps its data; idempotent."""
        await super().close()
        if self._own is not None:
            await self._own.aclose()

    @property
    def state(self) -> SpoolState:
        """Whether the node accepts kept messages now."""
        if self.link.state is LinkState.CLOSED:
            return "closed"
        if self.link.state is not LinkState.READY or self.link.is_leaving:
            return "away"
        return "connected" if self._refusal is None else "refused"

    @property
    def spool(self) -> SpoolStatistics:
        """Statistics of the outbox."""
        now_ms = unix_ms()
        since_ms = now_ms if self._first is None else int(self._first.properties["at_ms"])
        return SpoolStatistics(
            state=self.state,
            frames=max(0, self._last_id + 1 - self._next_id),
            writes=self._writes,
            bytes=self._bytes,
            bytes_max=self._bytes_max,
            age_s=max(0, now_ms - since_ms) / 1000,
            dead_letters=self._letters,
        )

    async def statistics(self) -> NodeStatistics:
        """See `Node.statistics`; does not wait for the outbox."""
        reply: NodeStatistics = await self.link.call_of("statistics")
        return replace(reply, spool=self.spool)

    # --- what is kept -----------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Store a group of rows without a named producer in the outbox; append any other group at
        the node, after the kept messages.
        """
        if group.pieces and group.producer is None:
            return self._outbox.append(group)
        return self._append_behind(group)

    async def _append_behind(self, group: AppendGroup) -> AppendResult:
        await self._forwarded()
        return await super().append(group)

    async def _call_behind(self, name: str, *arguments: object, **options: object) -> Any:
        await self._forwarded()
        return await self.link.call_of(name, *arguments, **options)

    async def _forwarded(self) -> None:
        """Return when every message kept before this call is in the log or a dead letter.

        Raises the errors of `Link.wait_ready`, and `Overloaded` while the node refuses the oldest
        message.
        """
        last_id = self._last_id
        while self._next_id <= last_id:
            await self.link.wait_ready()
            if self._refusal is not None:
                raise Overloaded(
                    f"earlier writes wait in the spool {self._path}: {self._refusal} — try again "
                    "once the node takes them"
                ) from self._refusal
            await self._moved.wait()

    async def _keep(self, pack: Pack) -> None:
        """Store the writes of a pack durably in one message; waits for space while the node accepts
        messages.
        """
        while True:
            # so that the message stays readable even if its collection is dropped
            await self._save()
            pack.drop_cancelled()
            if not pack.groups:
                return
            frame = self._frame_of(pack)
            if self._has_room(frame.size_bytes):
                break
            await self._moved.wait()
        about = {"writes": len(frame.units), "at_ms": unix_ms(), "salt": self._salt}
        properties = {name: str(value) for name, value in about.items()}
        pack.sent = True
        await outlast(self._put(pack, ProducerMessage(b"".join(frame.parts), properties)))

    def _frame_of(self, pack: Pack) -> FrameOfWrites:
        """Return the frame of a pack; its writes get their final stamps when they are sent."""
        stamps = (ProducerStamp(0, FIRST_EPOCH, sequence) for sequence in count(1))
        bytes_max = self.config.wal.group_bytes_max // 2
        return frame_of(0, pack.groups, lambda _: next(stamps), settled=0, unit_bytes_max=bytes_max)

    async def _put(self, pack: Pack, message: ProducerMessage) -> None:
        try:
            (self._last_id,) = await self._kept.produce(WRITES, [message])
            self._count(message)
        finally:  # a message whose write failed may be stored
            self._moved.wake()
        for group in pack.groups:
            group.settle(SPOOLED)

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether a message fits; False when waiting will free space. Raises `Overloaded`
        when it will not.
        """
        if self._last_id - self._known.origin >= MESSAGES_MAX:
            raise Overloaded(
                f"the spool {self._path} has numbered {MESSAGES_MAX} messages, the limit — "
                "connect with another directory when this one is empty"
            )
        free_bytes = max(0, self._bytes_max - self._bytes - self._letters_bytes)
        if size_bytes <= free_bytes:
            return True
        if self.state == "connected" and self._next_id <= self._last_id:
            return False
        raise Overloaded(
            f"the spool {self._path} has room for {free_bytes} of {self._bytes_max} bytes, "
            f"{size_bytes} do not fit — wait for the node, consume topic {DEAD!r} of the spool or "
            "raise spool_bytes_max"
        )

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        super()._take_catalog(collections)
        self._is_saved = False
        self._moved.wake()

    async def _save(self) -> None:
        """Store the state of the node, if it has changed."""
        async with self._saving:
            if self._is_saved:
                return
            self._is_saved = True  # a change during the write resets it
            old = self._known
            news = self.catalog.collections()
            former = [info for info in old.collections if info not in news]
            if self._next_id <= self._last_id:
                former += old.former
            self._known = replace(
                old,
                welcome=self.link.welcome,
                collections=news,
                former=tuple(former),
                epoch=self._producer.epoch if self._producer else old.epoch,
            )
            try:
                ids = await self._kept.produce(KNOWN, [encode(self._known)])
                await self._kept.seek(KNOWN, GROUP, ids[0])  # an opening reads the last message
            except BaseException:
                self._is_saved = False
                raise

    def _on_state(self, state: LinkState) -> None:
        """Note a new state of the connection."""
        if state is LinkState.READY:
            self._refusal = None
        self._moved.wake()

    # --- what is sent -----------------------------------------------------------------------------

    async def _forward(self) -> None:
        """Forward kept messages, oldest first, until cancelled."""
        while True:
            try:
                await self._save()
                await self._forward_one()
            except (StreamingNodeError, OSError) as error:
                why = f"{type(error).__name__}: {error}"
                _log.warning("spool_not_forwarded", path=self._path, error=why)
                self._refusal = error
                self._moved.wake()
                await asyncio.sleep(PAUSE_S)

    async def _forward_one(self) -> None:
        """Forward the oldest message. Without one, or without a connection, wait for a change and
        return.
        """
        self._first = await self._kept.get_message(WRITES, self._next_id)
        if self._first is None or self.state in {"away", "closed"}:
            if self._is_saved:
                await self._moved.wait()
            return
        message = self._first
        if not self._are_letters_known:
            await self._count_letters()
        if message.message_id > self._buried_id:
            await self._send_kept(message)
        # On a full disk the message stays and is not sent again: its sequence is in the log.
        with suppress(StorageFull, StorageFailed):
            await self._kept.seek(WRITES, GROUP, self._next_id + 1)
        self._refusal = None
        self._count(message, -1)
        self._next_id += 1
        self._last_id = max(self._last_id, message.message_id)
        self._first = None
        self._moved.wake()

    async def _send_kept(self, message: ConsumerMessage) -> None:
        """Return when each write of a message is in the log or a dead letter. Raises the error of a
        temporary refusal.
        """
        if self._producer is None:
            self._producer, reached = await self.open_producer(self._known.producer)
            # exactly one epoch later: nobody else has opened it in between
            self._reached = reached if self._producer.epoch == self._known.epoch + 1 else 0
            self._is_saved = False
            await self._save()
        number = message.message_id - self._known.origin
        sequence = (number << SALT_BITS | int(message.properties["salt"])) << INDEX_BITS
        if sequence + (1 << INDEX_BITS) <= self._reached:
            return  # the log has a later message, and messages are sent in order
        (frame,) = FrameReader(FRAME_BYTES_MAX).feed(PREFACE + message.payload)
        writes: WireWrites = frame.value(WireWrites)
        stamp = {"producer_id": self._producer.producer_id, "epoch": self._producer.epoch}
        stamped = enumerate(writes.groups, sequence)
        writes = replace(
            writes, groups=tuple([replace(each, sequence=own, **stamp) for own, each in stamped])
        )
        number = self.link.number()
        outcomes = [AppendGroup() for _ in writes.groups]
        parts = encode_frame(FrameKind.WRITES, number, writes, frame.payload)
        sent = FrameOfWrites([Unit([each]) for each in outcomes], parts, sum(map(len, parts)))
        await self.link.send_writes(number, sent)
        refused = dict[int, StreamingNodeError]()
        for index, (group, each) in enumerate(zip(writes.groups, outcomes, strict=True)):
            error = each.outcome
            if isinstance(error, StreamingNodeError) and self._is_final(error, group.sequence):
                refused[index] = error
        if refused:
            await self._bury(message.message_id, writes, memoryview(frame.payload), refused)

    def _is_final(self, error: StreamingNodeError, sequence: int) -> bool:
        """Return whether the error is a final refusal; False when the write is in the log. Raises
        the error when a later attempt may end differently.
        """
        if isinstance(error, ProducerFenced):
            # the producer was deleted, or opened from a copy of the directory
            self._producer = None
        # the window has forgotten whether the write is in the log, unless it was the last one
        if isinstance(error, SequenceTooOld):
            return sequence != self._reached
        if not error.decides or error.retryable != "no":
            raise error
        return True

    async def _bury(
        self,
        message_id: int,
        writes: WireWrites,
        payload: memoryview,
        refused: dict[int, StreamingNodeError],
    ) -> None:
        """Produce the dead letters of a message. `left` of each is the number of letters that
        follow, so a crash or a failed write leaves no doubt about which are stored.
        """
        await self._kept.create_topic(DEAD)
        last = await self._count_letters()
        found = list(dead_letters(writes, payload, refused, self._known))
        letters = [
            dead_letter(
                body,
                {**about, "left": str(len(found) - number)},
                error=str(error),
                topic=WRITES,
                message_id=message_id,
                bridge=self._known.producer,
            )
            for number, (body, about, error) in enumerate(found, 1)
        ]
        if last is not None and last.properties["id"] == str(message_id):
            del letters[: max(0, len(letters) - int(last.properties["left"]))]
        self._are_letters_known = False
        for part in parts_within(letters, PRODUCE_BYTES_MAX // 2):
            await self._kept.produce(DEAD, part)
        await self._count_letters()
        for index, error in refused.items():
            own = writes.groups[index].sequence
            _log.error("spooled_write_refused", sequence=own, code=error.code, error=str(error))
