"""A node of another process, with the interface of one of this:
`async with connect("unix:data/node.sock") as node`.
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
"""How long closing waits for answers."""
FRAMES_IN_FLIGHT_MAX = 2
"""With as many unanswered, writes wait and go together: what a frame costs once, both sides, is
paid less often.
"""
COMPANY_MIN = 16
"""With one unanswered, fewer writes than this wait for its answer."""
STREAM_CREDIT_BYTES = 4 << 20
"""What a reader may be sent ahead of what it has taken."""
CREDIT_STEP_BYTES = 1 << 20
"""Credit is given back in steps of at least this."""
BUSY_PAUSE_S = 0.05
"""Before a named reader is opened again whose last connection the node has not given up yet."""


async def compose_remote(
    address: Address,
    options: LinkOptions,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    make: "Callable[[Address, LinkOptions], RemoteBackend] | None" = None,
) -> Node:
    """Connect to the node at an address; `closing` closes what is open, also when this raises."""
    backend = (make or RemoteBackend)(address, options)
    closing.push_async_callback(backend.close)
    await backend.open()
    closing.push_async_callback(supervisor.stop)
    for work in backend.work():
        supervisor.spawn(work)
    parts: Parts = backend  # no more is to be found in the class: the rest are calls of the table
    return Node(cast(Backend, parts), supervisor, closing)


class _Named(msgspec.Struct):
    """A named producer: the highest sequence that is in the log, and the highest that was used."""

    last: int = 0
    reached: int = 0


def _changes(name: str) -> Any:
    """Return the method that makes a call which changes the catalog: once, under a stamp."""

    async def change(self: "RemoteBackend", *arguments: object, **options: bool) -> Any:
        with self._under_way():
            return await self._call_of(name, *arguments, **options, stamp=self._stamp(None))

    return change


class RemoteBackend(RemoteCalls):
    """A node of another process; see `Backend`. What it has no method for here is a call of the
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
        """What `config` and the like were taken from."""
        self._sequence = 0
        self._outstanding: dict[int, int] = {}
        """Of each frame, commit or change without an answer, oldest first: the client's own next
        sequence when it began.
        """
        self._named: dict[int, _Named] = {}
        """The named producers that were opened here, by id."""

    async def open(self) -> None:
        """Connect, and take over the node's settings; comes first. Raises as `Link.open`."""
        await self.link.open()

    def _take_welcome(self) -> None:
        """Take over what the node says of itself; it may have been opened with other settings
        since.
        """
        if (welcome := self.link.welcome) is self._welcome:
            return
        known = {setting.key for setting in NodeConfig().origins()}  # a newer node may have others
        config = load_config(
            arguments={key: value for key, value in welcome.settings.items() if key in known}
        )
        # a group goes in one frame
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
        """Return what runs in the background until the node closes."""
        return (self.link.run(),)

    async def close(self) -> None:
        """Close what `open` opened, however far it came; idempotent."""
        await self.link.close()

    @property
    def spool(self) -> SpoolStatistics | None:
        """None: what cannot be sent is refused."""
        return None

    def read(self, request: ReadRequest) -> "RemoteReading":
        """Return a way through the node's log."""
        return RemoteReading(self.link, request)

    async def drain(self) -> None:
        """Wait for writes and changes that were begun; what is not answered in time is refused when
        the link closes.
        """
        with anyio.move_on_after(GRACE_S):
            await self.link.drain(Access.PRODUCE, Access.ADMIN)

    # --- writes -----------------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group at the node: rows with others that wait, a step of a transaction by
        itself.
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
        """Have the node remember what is sent in the block until it was answered; yields a number
        for it.
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
        # who is cancelled from here on, while it waits for room, must not hear that nothing was
        # done
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
                self._told(pack.groups)

    def _stamp(self, group: AppendGroup | None) -> ProducerStamp:
        """Return the stamp of a write: a named producer's, or the client's next one, who is
        producer 0.
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

    def _told(self, groups: Iterable[AppendGroup]) -> None:
        """Note which writes of named producers are in the log."""
        for group in groups:
            stamp = group.producer
            if stamp is not None and isinstance(group.outcome, AppendResult):
                named = self._named[stamp.producer_id]
                named.last = max(named.last, stamp.sequence)

    async def _transaction(self, group: AppendGroup) -> AppendResult:
        """Take a step of a transaction; only a commit has a stamp, which the log of any node
        knows.
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
                # after any other error the node has nothing of it
                pack.sent = isinstance(error, Indeterminate)
                if is_commit or not pack.sent:
                    raise
                raise TransactionExpired(
                    f"transaction {first.txn_id} ended with its connection — repeat all of it"
                ) from error
            finally:
                self._told((group,))

    # --- calls ------------------------------------------------------------------------------------

    create_collection = _changes("create_collection")
    drop_collection = _changes("drop_collection")
    create_partition = _changes("create_partition")
    drop_partition = _changes("drop_partition")

    async def open_producer(self, name: str) -> tuple[ProducerRecord, int]:
        """Open a producer, made if it is new, and fence whoever had it open."""
        opened: tuple[ProducerRecord, int] = await self.link.call_of("open_producer", name)
        record, last_sequence = opened
        self._named[record.producer_id] = _Named(last_sequence, last_sequence)
        return opened

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 for none."""
        return self._named[producer_id].last

    def reach(self, producer_id: int, sequence: int) -> None:
        """Draw no sequence of a producer up to this one."""
        named = self._named[producer_id]
        named.reached = max(named.reached, sequence)

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        self._take_welcome()  # which came before it
        # What has not changed stays the object it was, and with it all that was worked out from it.
        known = {info.id: info for info in self.catalog.collections()}
        self.catalog = Catalog(
            known[info.id] if known.get(info.id) == info else info for info in collections
        )


class RemoteReading:
    """A reader's way through the log of another process, over as many connections as it takes; see
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
        """What came over the stream; None when its connection was lost, or when it is closed."""
        self._stream = 0
        self._taken_bytes = 0
        self._is_closed = False
        self._is_open = False
        """Whether frames come, as far as those that were taken say."""
        self._opened_on = 0
        """The connection that the stream is on."""

    async def open(self) -> int:
        """Find the place to start, at the node."""
        # also for who cancels this: the next call opens another stream
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
                # By a lost connection of this one, which the node may not have noticed; or by
                # somebody else.
                if not (
                    isinstance(error, ReaderBusy) and was_asked and self._loop.time() < give_up_at
                ):
                    raise error
                await asyncio.sleep(BUSY_PAUSE_S)
                frame = None
        opened: Opened = frame.value(Opened)
        self._is_open = True
        self._opened_on = self._link.connections
        # a reader of what is to come goes on from here, whatever comes first
        if self._request.resume is None:
            self._request = msgspec.structs.replace(
                self._request, resume=StartingPoint(opened.position, opened.tick)
            )
        return opened.acknowledged_position

    async def next_batch(self) -> ScanBatch:
        """Return what comes next, over the next connection where this one is lost."""
        frame = None
        while frame is None:
            if not self._is_open:
                await self.open()
            frame = await self._next_frame()
            self._is_open = frame is not None and frame.kind != FrameKind.ERROR
        if not self._is_open:
            self._link.end(self._stream)  # another call opens another one
            raise frame.value(WireError).error()
        batch = decode_batch(memoryview(frame.payload), self._link.welcome.wal_name)
        self._taken_bytes += len(frame.payload)
        if self._taken_bytes >= CREDIT_STEP_BYTES:
            self._link.send(FrameKind.CREDIT, self._stream, self._taken_bytes)
            self._taken_bytes = 0
        # Where it goes on, whatever is acknowledged: nothing is missed, and nothing comes twice.
        resume = StartingPoint(batch.resume_position, batch.confirmed_tick)
        self._request = msgspec.structs.replace(self._request, resume=resume)
        return batch

    async def ack(self, position: int, tick: int) -> None:
        """Move a named reader's place."""
        while True:
            try:
                await self._link.call_of(calls.ACK.name, self._stream, position, tick)
                return
            except InvalidArgument:  # its stream was of a connection that is lost
                if (
                    self._opened_on == self._link.connections
                    and self._link.state is LinkState.READY
                ):
                    raise
                await self.open()  # acknowledging twice is the same as once

    async def close(self) -> None:
        """End it; idempotent."""
        self._is_closed = True
        self._link.end(self._stream)
        self._frames.put_nowait(None)

    async def _next_frame(self) -> Frame | None:
        frame = None if self._is_closed else await self._frames.get()
        if self._is_closed:
            raise OnShutdown("the reader is closed — open another with node.read()")
        return frame
