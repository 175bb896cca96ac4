"""A node in another process, with the interface of a node in this process: `async with
connect("unix:data/node.sock") as node`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import anyio
import msgspec

from interceptors.errors import TransactionExpired
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from scanner.deliver_policy import ReaderBusy, StartingPoint
from scanner.scanner import ScanBatch
from streamingnode.backend import Backend, Parts, ReadRequest
from streamingnode.config import NodeConfig, load_config
from streamingnode.errors import Unreachable
from streamingnode.node import Node
from streamingnode.remote import calls
from streamingnode.remote.calls import Access, Opened, ReadCall, TransactionCall
from streamingnode.remote.link import Link, LinkState
from streamingnode.remote.queue import RemoteCalls, RemoteQueue
from streamingnode.remote.streams import decode_batch
from streamingnode.remote.writes import FIRST_EPOCH, frame_of
from streamingnode.statistics import SpoolStatistics
from streamingnode.streams.channels import ChannelService
from wal.address import Address, LinkOptions
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, StreamingNodeError
from wal.frames import FRAME_BYTES_MAX, Frame, FrameKind
from wal.headers import MessageType
from wal.packer import Packer
from wal.position import SEQUENCE_MAX, ProducerStamp
from wal.queue import PendingBytes
from wal.rocksmq.contract import MessageQueue
from wal.runtime import Supervisor
from wal.wire_types import Welcome, WireError

GRACE_S = 3.0
"""How long closing waits for replies, in seconds."""
FRAMES_IN_FLIGHT_MAX = 2
"""While this many frames are unanswered, new writes wait and share the next frame. So both sides
pay the fixed cost of a frame less often.
"""
COMPANY_MIN = 16
"""While one frame is unanswered, fewer waiting writes than this wait for its results."""
STREAM_CREDIT_BYTES = 4 << 20
"""How many bytes the node may send a reader ahead of the batches that the reader has taken."""
CREDIT_STEP_BYTES = 1 << 20
"""A reader grants new credit in steps of at least this many bytes."""
BUSY_PAUSE_S = 0.05
"""Pause before another attempt to open a named reader while the node has not yet noticed that the
reader's last connection is lost.
"""


async def compose_remote(
    address: Address,
    options: LinkOptions,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    make: "Callable[[Address, LinkOptions], RemoteBackend] | None" = None,
) -> Node:
    """Connect to the node at an address; `closing` releases everything that was opened, even when
    this raises.
    """
    backend = (make or RemoteBackend)(address, options)
    closing.push_async_callback(backend.close)
    await backend.open()
    closing.push_async_callback(supervisor.stop)
    for work in backend.work():
        supervisor.spawn(work)
    parts: Parts = backend  # the class defines only these; all other methods are calls of the table
    return Node(cast(Backend, parts), supervisor, closing)


class _Named(msgspec.Struct):
    """A named producer: `last` is its highest sequence in the log, `reached` the highest that it
    has used.
    """

    last: int = 0
    reached: int = 0


def _changes(name: str) -> Any:
    """Return the method for a call that changes the catalog; its stamp makes the change happen
    once.
    """

    async def change(self: "RemoteBackend", *arguments: object, **options: bool) -> Any:
        with self._under_way():
            return await self._call_of(name, *arguments, **options, stamp=self._stamp(None))

    return change


class RemoteBackend(RemoteCalls):
    """A node in another process; see `Backend`. Methods that are not defined here are calls of the
    table.
    """

    def __init__(self, address: Address, options: LinkOptions) -> None:
        self.link = Link(address, options, self._take_catalog)
        super().__init__("", self.link.call_of)
        self.mq: MessageQueue | None = cast(
            MessageQueue, RemoteQueue(self.link.call_of, self.link.number)
        )
        self.channels = cast(ChannelService, RemoteCalls(calls.CHANNELS, self.link.call_of))
        self.catalog = Catalog()
        self._welcome: Welcome | None = None
        """The source of `config`, `path`, `node_id` and `wal_name`."""
        self._sequence = 0
        self._outstanding: dict[int, int] = {}
        """Maps each unanswered frame, commit or change, oldest first, to the client's own next
        sequence when it began.
        """
        self._named: dict[int, _Named] = {}
        """The named producers that this client has opened, by id."""

    async def open(self) -> None:
        """Connect and take over the node's settings; call it before anything else. Raises the
        errors of `Link.open`.
        """
        await self.link.open()

    def _take_welcome(self) -> None:
        """Take over settings and identity from the node's welcome; a restarted node may have other
        settings.
        """
        if (welcome := self.link.welcome) is self._welcome:
            return
        # a newer node may have further settings
        known = {setting.key for setting in NodeConfig().origins()}
        config = load_config(
            arguments={key: value for key, value in welcome.settings.items() if key in known}
        )
        # a group must fit in one frame
        group_bytes_max = min(config.wal.group_bytes_max, FRAME_BYTES_MAX // 2)
        self.config = replace(config, wal=replace(config.wal, group_bytes_max=group_bytes_max))
        self.path = welcome.path
        self.node_id = welcome.node_id
        self.wal_name = welcome.wal_name
        if self._welcome is None:
            self.pending = PendingBytes(self.config.writes.pending_bytes_max)
            self._packer = Packer(
                self._send,
                self.pending.rows,
                in_flight_max=FRAMES_IN_FLIGHT_MAX,
                company=COMPANY_MIN,
            )
        self._welcome = welcome

    def work(self) -> Iterable[Coroutine[None, None, None]]:
        """Return the background tasks that run until the node closes."""
        return (self.link.run(),)

    async def close(self) -> None:
        """Close everything that `open` has opened, even when it failed midway; idempotent."""
        await self.link.close()

    @property
    def spool(self) -> SpoolStatistics | None:
        """None: a client without a spool refuses writes that it cannot send."""
        return None

    def read(self, request: ReadRequest) -> "RemoteReading":
        """Return a reading of the node's log."""
        return RemoteReading(self.link, request)

    async def drain(self) -> None:
        """Wait up to `GRACE_S` for writes and changes that have begun; the closing link fails the
        ones that are still unanswered.
        """
        with anyio.move_on_after(GRACE_S):
            await self.link.drain(Access.PRODUCE, Access.ADMIN)

    # --- writes -----------------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group at the node: rows share a frame with other waiting rows, a step of a
        transaction is a call of its own.
        """
        stamp = group.producer
        if (
            stamp is not None
            and not stamp.sequence
            and self._named[stamp.producer_id].reached >= SEQUENCE_MAX
        ):
            raise InvalidArgument(
                f"the producer has used sequence {SEQUENCE_MAX} — use another producer"
            )
        return self._packer.append(group) if group.pieces else self._transaction(group)

    @contextmanager
    def _under_way(self) -> Iterator[int]:
        """Keep the node's memory of whatever the block sends until the block ends; yields the
        number to send it under.
        """
        number = self.link.number()
        self._outstanding[number] = self._sequence + 1
        try:
            yield number
        finally:
            del self._outstanding[number]

    async def _send(self, pack: Pack) -> None:
        await self.link.wait_ready()
        pack.drop_cancelled()
        if not pack.groups:
            return
        # From here on a cancelled caller must not be promised that its write had no effect, even
        # while the frame waits for room.
        pack.sent = True
        with self._under_way() as number:
            frame = frame_of(
                number,
                pack.groups,
                self._stamp,
                settled=next(iter(self._outstanding.values())),
                unit_bytes_max=self.config.wal.group_bytes_max // 2,
            )
            try:
                await self.link.send_writes(number, frame)
            except (Unreachable, OnShutdown):
                pack.sent = False
                raise
            finally:
                self._note_results(pack.groups)

    def _stamp(self, group: AppendGroup | None) -> ProducerStamp:
        """Return the stamp of a write: that of its named producer, or the client's own next one
        under producer id 0.
        """
        if group is None or group.producer is None:
            self._sequence += 1
            return ProducerStamp(0, FIRST_EPOCH, self._sequence)
        stamp = group.producer
        if not stamp.sequence:
            named = self._named[stamp.producer_id]
            named.reached += 1
            stamp = group.producer = ProducerStamp(stamp.producer_id, stamp.epoch, named.reached)
        return stamp

    def _note_results(self, groups: Iterable[AppendGroup]) -> None:
        """Record which writes of named producers are in the log."""
        for group in groups:
            stamp = group.producer
            if stamp is not None and isinstance(group.outcome, AppendResult):
                named = self._named[stamp.producer_id]
                named.last = max(named.last, stamp.sequence)

    async def _transaction(self, group: AppendGroup) -> AppendResult:
        """Take a step of a transaction. Only a commit has a stamp; the log keeps it, so a restarted
        node recognizes a retry.
        """
        first = group.messages[0]
        pack = Pack([group])
        encode = msgspec.msgpack.encode
        is_commit = first.type is MessageType.COMMIT_TXN
        with self._under_way():
            stamp = self._stamp(group) if is_commit else ProducerStamp(0, 0, 0)
            messages = [
                (each.type, each.vchannel, encode(each.header), bytes(each.payload))
                for each in group.messages
            ]
            request = TransactionCall(
                tuple(messages),
                first.txn_id,
                stamp.sequence,
                stamp.producer_id,
                stamp.epoch,
                group.settled,
            )
            try:
                await self.link.wait_ready()
                pack.sent = True
                result: AppendResult = await self.link.call(
                    calls.TRANSACTION, request, is_stamped=is_commit
                )
                group.outcome = result
                return result
            except StreamingNodeError as error:
                group.outcome = error
                # any other error means that the node has stored no part of it
                pack.sent = isinstance(error, Indeterminate)
                if is_commit or not pack.sent:
                    raise
                raise TransactionExpired(
                    f"transaction {first.txn_id} ended with its connection — repeat all of it"
                ) from error
            finally:
                self._note_results((group,))

    # --- calls ------------------------------------------------------------------------------------

    create_collection = _changes("create_collection")
    drop_collection = _changes("drop_collection")
    create_partition = _changes("create_partition")
    drop_partition = _changes("drop_partition")

    async def open_producer(self, name: str) -> tuple[ProducerRecord, int]:
        """Open a producer, creating it if it is new, and fence its previous user."""
        opened: tuple[ProducerRecord, int] = await self.link.call_of("open_producer", name)
        record, last_sequence = opened
        self._named[record.producer_id] = _Named(last_sequence, last_sequence)
        return opened

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 for none."""
        return self._named[producer_id].last

    def reach(self, producer_id: int, sequence: int) -> None:
        """Assign only sequences above this one to a producer's next writes."""
        named = self._named[producer_id]
        named.reached = max(named.reached, sequence)

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        self._take_welcome()  # the welcome arrives before the catalog
        # Keep the object of an unchanged collection, so that everything derived from it stays
        # valid.
        known = {info.id: info for info in self.catalog.collections()}
        self.catalog = Catalog(
            known[info.id] if known.get(info.id) == info else info for info in collections
        )


class RemoteReading:
    """A reading of the log of another process. It continues over a new connection after a loss; see
    `Reading`.
    """

    def __init__(self, link: Link, request: ReadRequest) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        ids = tuple(info.id for info in request.infos)
        of = ids[0] if len(ids) == 1 else ids
        start = request.policy.plain
        types = tuple(sorted(request.types))
        self._request = ReadCall(
            of, *start, request.until, request.name, types, None, STREAM_CREDIT_BYTES
        )
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        """Frames received on the stream; None when its connection is lost or the reading is closed.
        """
        self._stream = 0
        self._taken_bytes = 0
        self._is_closed = False
        self._is_open = False
        """Whether the stream delivers frames, judging by the frames taken so far."""
        self._opened_on = 0
        """The number of the connection that carries the stream."""

    async def open(self) -> int:
        """Open the stream at the node, which finds the start position; returns the acknowledged
        position, 0 if there is none.
        """
        # set first, so that after a cancellation the next call opens another stream
        self._is_open = False
        frame = None
        give_up_at = self._loop.time() + self._link.options.give_up_s
        while frame is None:
            await self._link.wait_ready()
            was_asked = self._stream > 0
            self._frames = asyncio.Queue()
            self._stream = self._link.open_stream(
                self._request, calls.READ.name, self._frames.put_nowait
            )
            try:
                frame = await self._next_frame()
            except BaseException:  # cancelled, or closed by another task
                self._link.end(self._stream)
                raise
            if frame is not None and frame.kind != FrameKind.OPENED:
                self._link.end(self._stream)
                error = frame.value(WireError).error()
                # The reader is busy either through a lost connection of this client that the node
                # has not noticed yet, or through another client.
                if not (
                    isinstance(error, ReaderBusy) and was_asked and self._loop.time() < give_up_at
                ):
                    raise error
                await asyncio.sleep(BUSY_PAUSE_S)
                frame = None
        opened: Opened = frame.value(Opened)
        self._is_open = True
        self._opened_on = self._link.connections
        # A reader that starts at the end of the log resumes from here, even if the connection is
        # lost before its first batch.
        if self._request.resume is None:
            self._request = msgspec.structs.replace(
                self._request, resume=StartingPoint(opened.position, opened.tick)
            )
        return opened.acknowledged_position

    async def next_batch(self) -> ScanBatch:
        """Return the next batch; continues over the next connection when this one is lost."""
        frame = None
        while frame is None:
            if not self._is_open:
                await self.open()
            frame = await self._next_frame()
            self._is_open = frame is not None and frame.kind != FrameKind.ERROR
        if not self._is_open:
            self._link.end(self._stream)  # the next call opens another stream
            raise frame.value(WireError).error()
        batch = decode_batch(memoryview(frame.payload), self._link.welcome.wal_name)
        self._taken_bytes += len(frame.payload)
        if self._taken_bytes >= CREDIT_STEP_BYTES:
            self._link.send(FrameKind.CREDIT, self._stream, self._taken_bytes)
            self._taken_bytes = 0
        # A new connection resumes here, whatever is acknowledged, so each message is delivered
        # exactly once.
        resume = StartingPoint(batch.resume_position, batch.confirmed_tick)
        self._request = msgspec.structs.replace(self._request, resume=resume)
        return batch

    async def ack(self, position: int, tick: int) -> None:
        """Acknowledge everything up to `position`: the named reader resumes after it."""
        while True:
            try:
                await self._link.call_of(calls.ACK.name, self._stream, position, tick)
                return
            except InvalidArgument:  # the stream belonged to a lost connection
                if (
                    self._opened_on == self._link.connections
                    and self._link.state is LinkState.READY
                ):
                    raise
                await self.open()  # acknowledging is idempotent

    async def close(self) -> None:
        """Close the reading; idempotent."""
        self._is_closed = True
        self._link.end(self._stream)
        self._frames.put_nowait(None)

    async def _next_frame(self) -> Frame | None:
        frame = None if self._is_closed else await self._frames.get()
        if self._is_closed:
            raise OnShutdown("the reader is closed — open another with node.read()")
        return frame
