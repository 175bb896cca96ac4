"""The spool of a client: while its node is away, writes are kept on the client's disk, and sent in
order when it is back.

What keeps them is a node of the client's own, in a directory of its own, as messages of a topic.
Each write is sent under a sequence of the spool's own producer, by which the node knows it again
after any crash of either side, however much later (ADR 0009). One message is sent at a time, the
next when all of it is in the log or a dead letter: so what one caller wrote after the other takes
place in that order.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from flusher.run import CutScheduleOptions, FlushOptions
from interceptors.errors import ProducerFenced, SequenceTooOld
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from streamingnode.config import NodeConfig, ServeOptions
from streamingnode.errors import Unreachable
from streamingnode.node import Node
from streamingnode.remote.calls import Access
from streamingnode.remote.client import COMPANY_MIN, FRAMES_IN_FLIGHT_MAX, RemoteBackend
from streamingnode.remote.link import LinkState
from streamingnode.remote.writes import FIRST_EPOCH, FrameOfWrites, Lane, Unit, WireWrites, frame_of
from streamingnode.statistics import NodeStatistics, SpoolStatistics
from streamingnode.writing.target import WriteTarget
from wal.address import Address, LinkOptions
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Overloaded, StorageFailed, StorageFull, StreamingNodeError
from wal.files import make_directory, sync_directory, write_file
from wal.frames import FRAME_BYTES_MAX, PREFACE, FrameKind, FrameReader, encode_frame
from wal.headers import MessageType
from wal.packer import Packer
from wal.position import SEQUENCE_MAX, ProducerStamp, message_id_kind
from wal.queue import Signal
from wal.rocksmq.contract import Consumer, MessageQueue, MqOptions
from wal.rocksmq.messages import ConsumerMessage, ProducerMessage
from wal.runtime import event_log, in_thread, outlast, unix_ms
from wal.wire_types import Welcome, decode, encode

_log = event_log(__name__)

WRITES = "writes"
KNOWN = "node"
GROUP = "spool"
LETTERS_NAME = "dead-letters"
"""Topics of the spool's own node: frames of writes, and what is known of the node that they are
for; and a directory.
"""
CONFIG = NodeConfig(
    serve=ServeOptions(listen=False),
    flush=FlushOptions(schedule=CutScheduleOptions(interval_s=None)),
    mq=MqOptions(page_bytes=1 << 20, retention_s=0),
)
PAUSE_S = 0.5
"""Before a node that refuses everything for now is asked again."""
DONE_PER_RECORD = 2
"""Messages that are done before one more is kept behind them: so a replay ends, however much is
written meanwhile.
"""
COUNTED_AT_ONCE = 1_000
UNACKED_MAX = 8_192
"""Messages that are done and not acknowledged, on a disk that refuses; a group of a topic holds
twice as many.
"""
INDEX_BITS = 10
SALT_BITS = 21
"""Of a sequence: which write of its message it is, of `PACK_GROUPS_MAX` at most, and a number that
each opening draws: so of two copies of a directory none takes the other's sequences. The bits above
are the message's number."""
MESSAGES_MAX = SEQUENCE_MAX >> (INDEX_BITS + SALT_BITS)
"""That one directory may keep in its life: 4 billion, a month without a pause at the speed of a
single writer.
"""

SpoolState = Literal["direct", "spooling", "replaying", "closed"]
"""Where writes go: to the node, where nothing is kept; to the disk, while it is away, or behind
what is being sent to it.
"""


class Known(msgspec.Struct, frozen=True):
    """What a spool is opened with while its node is away; of `former` collections something may be
    kept.
    """

    producer: str
    """Its name at the node."""
    origin: int
    """Ids of messages are above it."""
    welcome: Welcome
    collections: tuple[CollectionInfo, ...]
    former: tuple[CollectionInfo, ...] = ()
    epoch: int = 0
    """That the producer was last opened with from this directory."""


def letters_of(
    writes: WireWrites, payload: memoryview, refused: dict[int, StreamingNodeError], known: Known
) -> dict[str, bytes]:
    """Return writes that were refused as Arrow files, by their names: one for the rows or keys of
    each collection.
    """
    infos = {(each.id, each.schema_version): each for each in (*known.former, *known.collections)}
    lanes = list[tuple[Lane | memoryview, dict[str, str]]]()
    at = 0
    letters = dict[str, bytes]()
    for wire in writes.targets:
        data = payload[at : at + wire.payload_bytes]
        at = at + wire.payload_bytes
        info = infos.get((wire.collection_id, wire.schema_version))
        if info is None:  # made and dropped between two catalogs: its rows as they were sent
            lanes.append((data, {}))
            continue
        target = WriteTarget(info)
        is_delete = wire.type == MessageType.DELETE
        into = target.deletes if is_delete else target.inserts(wire.partition_id)
        said = {"kind": "delete" if is_delete else "insert", "collection": info.name}
        said["partition"] = "".join(
            [each.name for each in info.partitions if each.id == wire.partition_id]
        )
        lanes.append((Lane(into, data, is_plain=wire.is_plain), said))
    for index, group in enumerate(writes.groups):
        for piece, (number, length) in enumerate(group.pieces):
            lane, said = lanes[number]
            rows = lane if isinstance(lane, memoryview) else lane.take(length).rows
            if (error := refused.get(index)) is None:
                continue
            if isinstance(lane, memoryview):
                letters[f"{group.sequence}-{piece}.rows"] = bytes(lane)
                continue
            batch = lane.target.joined([rows]).replace_schema_metadata(
                said | {"code": error.code, "error": str(error)}
            )
            with pa.ipc.new_file(sink := pa.BufferOutputStream(), batch.schema) as file:
                file.write_batch(batch)
            letters[f"{group.sequence}-{piece}.arrow"] = sink.getvalue().to_pybytes()
    return letters


class SpoolingBackend(RemoteBackend):
    """A node of another process whose writes are kept in a directory while it is away; see
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
        self._is_behind = True
        """Whether there may be something that comes before what is written now."""
        self._path = str(directory)
        self._letters_directory = directory / LETTERS_NAME
        self._bytes_max = bytes_max
        self._opening = own
        self._own: Node | None = None
        self._kept: MessageQueue
        self._consumer: Consumer
        self._first: ConsumerMessage | None = None
        """The oldest that is not done."""
        self._last_id = 0
        """Of the messages that were kept, done or not."""
        self._salt = secrets.randbits(SALT_BITS)
        self._unacked: list[int] = []
        """What is done, and comes again when this process ends before it is acknowledged."""
        self._frames = self._writes = self._bytes = 0
        """Of what is not done."""
        self._letters: list[tuple[str, int]] = []
        """Names and sizes of the dead letters' files."""
        self._known: Known
        self._news: tuple[CollectionInfo, ...] | None = None
        """The collections, when they are not those that are known."""
        self._turn = asyncio.Lock()
        """Of who changes what is kept."""
        self._wanted = asyncio.Event()
        """Set when there may be something to replay, or news."""
        self._moved = Signal()
        """Woken when the state changes, and when a message is done."""
        self._done = 0
        """How many messages, so far."""
        self._producer: ProducerRecord | None = None
        self._reached = 0
        """The producer's last sequence in the log when it was opened, if it is ours: messages
        before that one's are done.
        """
        self._direct: Packer
        self._spooling: Packer

    async def open(self) -> None:
        """Open the spool, then connect, which may come later when the node is known. Raises as
        `open_node` does.
        """
        self._own = await self._opening
        known = await self._look_at_kept(self._own)
        await in_thread(self._look_at_letters)
        await self.link.open(known.welcome if known else None)
        self._known = known or Known(
            f"spool-{secrets.token_hex(8)}", self._last_id, self.link.welcome, ()
        )
        if known and self.link.state is not LinkState.READY:
            self.catalog = Catalog(known.collections)
        self._take_welcome()
        make = partial(Packer, self._keep_or_send, self.pending.rows, company=COMPANY_MIN)
        self._direct = make(in_flight_max=FRAMES_IN_FLIGHT_MAX)
        self._spooling = make(in_flight_max=1)
        await self._save()
        self.link.on_state = self._on_state
        self._on_state(self.link.state)

    async def _look_at_kept(self, own: Node) -> Known | None:
        mq = self._kept = own.mq
        for topic in (WRITES, KNOWN):
            await mq.create_topic(topic)
            if not await mq.exist_consumer_group(topic, GROUP):
                await mq.create_consumer_group(topic, GROUP)
        async with await mq.register_consumer(WRITES, GROUP, ack_timeout_s=None) as counting:
            while found := await counting.consume(COUNTED_AT_ONCE):
                for each in found:
                    self._count(each)
        kept = (await mq.info())[WRITES]
        self._last_id = kept.end_id
        frames = kept.groups[GROUP].lag
        # more than a consumer may hold; their bytes are no more than the topic's
        if frames > self._frames:
            self._frames = frames
            self._bytes = kept.bytes
        self._consumer = await mq.register_consumer(WRITES, GROUP, ack_timeout_s=None)
        await self._take_first()
        known = await mq.consume(KNOWN, GROUP, 1)
        return decode(known[0].payload, Known) if known else None

    async def _take_first(self) -> None:
        self._first = next(iter(await self._consumer.consume(1)), None)
        if self._first is None:  # whatever was counted
            self._frames = self._writes = self._bytes = 0

    def _count(self, message: ProducerMessage | ConsumerMessage, sign: int = 1) -> None:
        # Not below 0: what failed while it was kept may be there, uncounted.
        self._frames, self._bytes = (
            max(0, self._frames + sign),
            max(0, self._bytes + sign * len(message.payload)),
        )
        self._writes = max(0, self._writes + sign * int(message.properties["writes"]))

    def work(self) -> Iterable[Coroutine[None, None, None]]:
        """Return what runs in the background until the node closes."""
        return (*super().work(), self._replay())

    async def close(self) -> None:
        """Close the connection and give the directory back, what is in it stays; idempotent."""
        await super().close()
        async with self._turn:
            if self._own is not None:
                await self._own.aclose()

    @property
    def state(self) -> SpoolState:
        """Where writes go now: the connection's state, and whether all that was kept is done."""
        if self.link.state is LinkState.READY and not self.link.is_leaving:
            return "replaying" if self._is_behind else "direct"
        return "closed" if self.link.state is LinkState.CLOSED else "spooling"

    @property
    def spool(self) -> SpoolStatistics:
        """What is kept."""
        now_ms = unix_ms()
        since_ms = now_ms if self._first is None else int(self._first.properties["at_ms"])
        return SpoolStatistics(
            state=self.state,
            frames=self._frames,
            writes=self._writes,
            bytes=self._bytes,
            bytes_max=self._bytes_max,
            age_s=max(0, now_ms - since_ms) / 1000,
            dead_letters=len({name.partition("-")[0] for name, _ in self._letters}),
        )

    async def statistics(self) -> NodeStatistics:
        """As `Node.statistics`."""
        told: NodeStatistics = await self.link.call_of("statistics")
        return replace(told, spool=self.spool)

    # --- keeping ----------------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group at the node, or keep it; what is not kept waits for the node, and for all
        that is.
        """
        is_direct = self.state == "direct"
        if group.pieces and group.producer is None:
            return (self._direct if is_direct else self._spooling).append(group)
        return super().append(group) if is_direct else self._append_behind(group)

    async def _append_behind(self, group: AppendGroup) -> AppendResult:
        while self.state != "direct":
            await self.link.wait_ready()
            if self.state == "replaying":
                await self._moved.wait()
        return await super().append(group)

    async def _keep_or_send(self, pack: Pack) -> None:
        while True:
            due = self._done + DONE_PER_RECORD
            while self.state == "replaying" and self._done < due:
                await self._moved.wait()
            if self.state != "direct" and await outlast(self._keep(pack)):
                return None
            with suppress(Unreachable):  # lost while it waited to be sent
                return await self._send(pack)

    async def _keep(self, pack: Pack) -> bool:
        """Keep the writes of a pack in one record, durably; return False when they are to go to the
        node, after all.
        """
        async with self._turn:
            if self.state in {"direct", "closed"}:
                return False
            await self._save()  # whatever becomes of its collection, what is kept can be read
            pack.drop_cancelled()
            if not pack.groups:
                return True
            # it gets others when it is sent
            stamps = (ProducerStamp(0, FIRST_EPOCH, sequence) for sequence in count(1))
            bytes_max = self.config.wal.group_bytes_max // 2
            frame = frame_of(
                0, pack.groups, lambda _: next(stamps), settled=0, unit_bytes_max=bytes_max
            )
            self._check_room(frame.size_bytes)
            about = {"writes": len(frame.units), "at_ms": unix_ms(), "salt": self._salt}
            message = ProducerMessage(
                b"".join(frame.parts), {name: str(value) for name, value in about.items()}
            )
            pack.sent = True
            (self._last_id,) = await self._kept.produce(WRITES, [message])
            self._count(message)
            if self._first is None:
                await self._take_first()
        result = AppendResult(message_id_kind(self.wal_name), 0, 0, 0, 0, spooled=True)
        for group in pack.groups:
            group.settle(result)
        return True

    def _check_room(self, size_bytes: int) -> None:
        free_bytes = max(
            0, self._bytes_max - self._bytes - sum([size for _, size in self._letters])
        )
        if free_bytes < size_bytes:
            raise Overloaded(
                f"the spool {self._path} has room for {free_bytes} of {self._bytes_max} bytes, "
                f"{size_bytes} do not fit — wait for the node, clear {LETTERS_NAME}/ or raise "
                "spool_bytes_max"
            )
        if self._last_id - self._known.origin >= MESSAGES_MAX:
            raise Overloaded(
                f"the spool {self._path} has kept {MESSAGES_MAX} messages, more it cannot number — "
                "connect with another directory when this one is empty"
            )

    def _look_at_letters(self) -> None:
        self._letters = [
            (each.name, each.stat().st_size) for each in self._letters_directory.glob("*")
        ]

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        super()._take_catalog(collections)
        self._news = collections
        self._wanted.set()

    async def _save(self) -> None:
        """Bring what is known of the node to the disk, if there is news."""
        if (news := self._news) is None:
            return
        old = self._known
        former = tuple([info for info in old.collections if info not in news]) + (
            old.former if self._frames else ()
        )
        epoch = self._producer.epoch if self._producer else old.epoch
        self._known = replace(
            old, welcome=self.link.welcome, collections=news, former=former, epoch=epoch
        )
        ids = await self._kept.produce(KNOWN, [encode(self._known)])
        await self._kept.seek(KNOWN, GROUP, ids[0])  # the last one is what an opening finds
        if self._news is news:  # none have come meanwhile
            self._news = None

    def _on_state(self, state: LinkState) -> None:
        """Follow the connection."""
        if state is not LinkState.READY or self.link.is_leaving:
            self._is_behind = True
            # what was not sent need not wait for answers to what was
            self._direct.hand_over(self._spooling)
        self._moved.wake()
        self._wanted.set()

    # --- replaying --------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Replay whenever the node is there, until cancelled."""
        while True:
            self._wanted.clear()
            try:
                async with self._turn:
                    await self._save()
                while self.state == "replaying":
                    await self._replay_one()
            except (StreamingNodeError, OSError) as error:
                _log.warning(
                    "spool_not_replayed", path=self._path, error=f"{type(error).__name__}: {error}"
                )
                self._step(DONE_PER_RECORD)  # a node that refuses everything makes nobody wait
                await asyncio.sleep(PAUSE_S)
            else:
                await self._wanted.wait()

    async def _replay_one(self) -> None:
        """Send the oldest record and be done with it, or end the replay when there is none."""
        await self.link.drain(Access.PRODUCE)  # what was sent before the spool comes before it
        if (first := self._first) is not None:
            await self._send_again(first)
        async with self._turn:
            if first is not None and self._unacked[-1:] != [first.message_id]:
                self._count(first, -1)
                self._unacked.append(first.message_id)
            if self._unacked:
                # It stays where the disk refuses: what is done is known to the node. But who holds
                # too many gets no more.
                with suppress(
                    *(StorageFull, StorageFailed) if len(self._unacked) < UNACKED_MAX else ()
                ):
                    await self._kept.ack(WRITES, GROUP, self._unacked)
                    self._unacked = []
            # also where there was none: one that failed while it was kept may be there
            if self._first is first:
                await self._take_first()
            if self._first is None and self.state == "replaying":
                self._is_behind = False
            self._step(int(first is not None))

    def _step(self, done: int) -> None:
        self._done += done
        self._moved.wake()

    async def _send_again(self, message: ConsumerMessage) -> None:
        """Return when each write of a message is in the log, or a dead letter. Raises what the node
        refuses with for now.
        """
        if self._producer is None:
            self._producer, reached = await self.open_producer(self._known.producer)
            # one epoch more: nobody else has opened it meanwhile
            self._reached = reached if self._producer.epoch == self._known.epoch + 1 else 0
            self._news = self.catalog.collections()
            async with self._turn:
                await self._save()
        number = message.message_id - self._known.origin
        sequence = (number << SALT_BITS | int(message.properties["salt"])) << INDEX_BITS
        if sequence + (1 << INDEX_BITS) <= self._reached:
            return  # it was sent before the one that the log has
        (frame,) = FrameReader(FRAME_BYTES_MAX).feed(PREFACE + message.payload)
        writes: WireWrites = frame.value(WireWrites)
        stamp = {"producer_id": self._producer.producer_id, "epoch": self._producer.epoch}
        stamped = enumerate(writes.groups, sequence)
        writes = replace(
            writes, groups=tuple([replace(each, sequence=own, **stamp) for own, each in stamped])
        )
        number = self.link.number()
        told = [AppendGroup() for _ in writes.groups]
        parts = encode_frame(FrameKind.WRITES, number, writes, frame.payload)
        sent = FrameOfWrites([Unit([each]) for each in told], parts, sum(map(len, parts)))
        await self.link.send_writes(number, sent)
        refused = dict[int, StreamingNodeError]()
        for index, (group, each) in enumerate(zip(writes.groups, told, strict=True)):
            if isinstance(error := each.outcome, StreamingNodeError) and self._is_final(
                error, group.sequence
            ):
                refused[index] = error
        if refused:
            letters = letters_of(writes, memoryview(frame.payload), refused, self._known)
            await in_thread(self._put_letters, letters)
        for index, error in refused.items():
            own = writes.groups[index].sequence
            _log.error("spooled_write_refused", sequence=own, code=error.code, error=str(error))

    def _is_final(self, error: StreamingNodeError, sequence: int) -> bool:
        """Whether the node refuses a write, which is no more in doubt. Raises the error when it may
        be another one later.
        """
        if isinstance(error, ProducerFenced):
            self._producer = None  # deleted, or opened by who has a copy of the directory
        # nobody knows any more whether it is there, unless it was the last
        if isinstance(error, SequenceTooOld):
            return sequence != self._reached
        if not error.decides or error.retryable != "no":
            raise error
        return True

    def _put_letters(self, letters: dict[str, bytes]) -> None:
        make_directory(self._letters_directory)
        for name, data in letters.items():
            write_file(new := self._letters_directory / f"{name}.new", data)
            new.rename(self._letters_directory / name)
        sync_directory(self._letters_directory)
        self._look_at_letters()
