"""A node of another process, with the interface of one of this: `async with connect("unix:data/node.sock") as node`."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from anyio import to_thread

from interceptors.errors import TransactionExpired
from interceptors.idempotency import ProducerRecord
from interceptors.shard.catalog import Catalog, CollectionInfo
from scanner.deliver_policy import ReaderBusy, StartingPoint
from scanner.scanner import ScanBatch
from streamingnode.backend import ReadRequest
from streamingnode.care.findings import Report
from streamingnode.care.inspect import BackupRecord
from streamingnode.config import NodeConfig, load_config
from streamingnode.node import Node
from streamingnode.remote.address import Address, LinkOptions
from streamingnode.remote.calls import AckCall, Opened, ReadCall, TransactionCall, WireError, error_from_wire
from streamingnode.remote.link import Link
from streamingnode.remote.queue import RemoteChannels, RemoteQueue
from streamingnode.remote.streams import decode_batch
from streamingnode.remote.writes import WireResult, frame_of
from streamingnode.statistics import SpoolStatistics
from streamingnode.streams.channels import Channels
from streamingnode.writing.write import within
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, StreamingNodeError
from wal.frames import FRAME_BYTES_MAX, Frame, FrameKind
from wal.headers import BeginTxnHeader, MessageType, RollbackTxnHeader
from wal.packer import Packer
from wal.position import SEQUENCE_MAX, Place, ProducerStamp, message_id_kind
from wal.queue import PendingBytes
from wal.rocksmq.contract import MessageQueue
from wal.runtime import Supervisor

GRACE_S = 3.0
"""How long closing waits for writes that were sent."""
FRAMES_IN_FLIGHT_MAX = 2
"""With as many unanswered, writes wait and go together: what a frame costs once, both sides, is paid less often."""
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
    token_file: Path | None,
    supervisor: Supervisor,
    closing: AsyncExitStack,
    make: "Callable[[Address, LinkOptions], RemoteBackend] | None" = None,
) -> Node:
    """Connect to the node at an address; `closing` closes what is open, also when this raises."""
    if token_file is not None:
        try:
            token = (await to_thread.run_sync(token_file.read_text, "utf-8")).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"token file {token_file} cannot be read: {error} — name another") from error
        options = replace(options, token=token)
    backend = (make or RemoteBackend)(address, options)
    closing.push_async_callback(backend.close)
    await backend.open()
    closing.push_async_callback(supervisor.stop)
    for work in backend.work():
        supervisor.spawn(work)
    return Node(backend, supervisor, closing)


class _Named:
    """A named producer: the highest sequence that is in the log, the highest that was used, and how many writes are sent."""

    __slots__ = ("last", "outstanding", "reached")

    def __init__(self, last: int = 0) -> None:
        self.last = self.reached = last
        self.outstanding = 0


def _asked(name: str, *, changes: str = "") -> Any:
    """Return the method that makes a call of the table; one that `changes` the catalog does so once, under a stamp."""

    async def ask(self: "RemoteBackend", *arguments: object, **options: object) -> Any:
        return await self.link.call_of(name, *arguments, *options.values())

    async def change(self: "RemoteBackend", *arguments: object, timeout: float | None, **options: bool) -> Any:
        own = self._stamp(None)
        self._outstanding.append(own.sequence)
        try:
            make = partial(self.link.call_of, name, *arguments, *options.values(), own)
            return await within(timeout, make, changes)
        finally:
            self._settled(range(own.sequence, own.sequence + 1))

    return change if changes else ask


class RemoteBackend:
    """A node of another process; see `Backend`."""

    def __init__(self, address: Address, options: LinkOptions) -> None:
        self.link = Link(address, options, self._take_catalog)
        self.mq: MessageQueue | None = RemoteQueue(self.link.call_of, self.link.number)
        self.channels: Channels = RemoteChannels(self.link.call_of, self.link.number)
        self.catalog = Catalog()
        self.path: str | None
        self.node_id: str
        self.wal_name: str
        self.config: NodeConfig
        self.pending: PendingBytes
        self._packer: Packer
        self._sequence = 0
        self._outstanding: deque[int] = deque()
        """The client's own sequences that were not answered, ascending."""
        self._answered: set[int] = set()
        self._named: dict[int, _Named] = {}
        """The named producers that were opened here, by id."""

    async def open(self) -> None:
        """Connect, and take over the node's settings; comes first. Raises as `Link.open`."""
        await self.link.open()
        self._settle_in()

    def _settle_in(self) -> None:
        welcome = self.link.welcome
        self.path, self.node_id, self.wal_name = welcome.path, welcome.node_id, welcome.wal_name
        config = load_config(arguments=welcome.settings)
        group_bytes_max = min(config.wal.group_bytes_max, FRAME_BYTES_MAX // 2)  # a group goes in one frame
        self.config = replace(config, wal=replace(config.wal, group_bytes_max=group_bytes_max))
        self.pending = PendingBytes(self.config.writes.pending_bytes_max)
        self._packer = Packer(
            self._send, self.pending.rows, repeats=False, in_flight_max=FRAMES_IN_FLIGHT_MAX, company=COMPANY_MIN
        )

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
        """Wait for writes that were sent; what was not is refused when the link closes."""
        await self.link.drain(GRACE_S)

    # --- writes ---------------------------------------------------------------------------------------------------------

    def append(self, group: AppendGroup) -> Awaitable[AppendResult]:
        """Append a group at the node: rows with others that wait, a step of a transaction by itself."""
        stamp = group.producer
        if stamp is not None and not stamp.sequence and self._named[stamp.producer_id].reached >= SEQUENCE_MAX:
            raise InvalidArgument(f"the producer has used sequence {SEQUENCE_MAX} — use another producer")
        return self._packer.append(group) if group.pieces else self._transaction(group)

    async def _send(self, pack: Pack) -> None:
        await self.link.wait_ready()
        number, first = self.link.number(), self._sequence + 1
        frame = frame_of(
            number,
            pack.groups,
            self._stamp,
            settled=lambda: self._outstanding[0] if self._outstanding else first,
            unit_bytes_max=self.config.wal.group_bytes_max // 2,
        )
        own = range(first, self._sequence + 1)
        self._outstanding.extend(own)
        try:
            await self.link.send_writes(number, frame, on_sent=partial(setattr, pack, "sent", True))
        finally:
            self._settled(own)
            self._told(pack.groups)

    def _stamp(self, group: AppendGroup | None) -> ProducerStamp:
        """Return the stamp of a write: a named producer's, or the client's next one."""
        if group is None:
            self._sequence += 1
            return ProducerStamp(self.link.client_id, 1, self._sequence)
        stamp = group.producer
        assert stamp is not None, "only those of named producers are asked for"
        named = self._named.setdefault(stamp.producer_id, _Named())
        if not stamp.sequence:
            stamp = group.producer = ProducerStamp(stamp.producer_id, stamp.epoch, named.reached + 1)
        named.reached = max(named.reached, stamp.sequence)
        named.outstanding += 1
        return stamp

    def _told(self, groups: Iterable[AppendGroup]) -> None:
        """Note what named producers' writes have come to."""
        for group in groups:
            stamp = group.producer
            if stamp is not None and stamp.sequence:
                named = self._named[stamp.producer_id]
                named.outstanding -= 1
                if isinstance(group.outcome, AppendResult):
                    named.last = max(named.last, stamp.sequence)
                refused = isinstance(group.outcome, StreamingNodeError) and not isinstance(group.outcome, Indeterminate)
                if refused and not named.outstanding and named.reached == stamp.sequence > named.last:
                    named.reached -= 1  # a write that surely is not in the log leaves its sequence free

    def _settled(self, sequences: range) -> None:
        self._answered.update(sequences)
        while self._outstanding and self._outstanding[0] in self._answered:
            self._answered.discard(self._outstanding.popleft())

    async def _transaction(self, group: AppendGroup) -> AppendResult:
        first, sequence = group.messages[0], 0
        match first.type:
            case MessageType.BEGIN_TXN:
                assert isinstance(first.header, BeginTxnHeader), "by its type"
                call = TransactionCall("begin", keepalive_ms=first.header.keepalive_ms)
            case MessageType.COMMIT_TXN:
                stamp = self._stamp(group if group.producer is not None else None)
                sequence = stamp.sequence if group.producer is None else 0
                if sequence:
                    self._outstanding.append(sequence)
                producer_id = 0 if sequence else stamp.producer_id
                call = TransactionCall(
                    "commit", first.txn_id, sequence=stamp.sequence, producer_id=producer_id, epoch=stamp.epoch
                )
            case MessageType.ROLLBACK_TXN:
                assert isinstance(first.header, RollbackTxnHeader), "by its type"
                call = TransactionCall("rollback", first.txn_id, reason=first.header.reason)
            case _:
                encode, messages = msgspec.msgpack.encode, group.messages
                bodies = [
                    (int(each.type), each.vchannel, encode(each.header), bytes(each.payload)) for each in messages
                ]
                call = TransactionCall("bodies", first.txn_id, bodies=tuple(bodies))
        repeats, pack = call.step == "commit", Pack([group])  # a commit has a stamp
        try:
            await self.link.wait_ready()
            pack.sent = True
            wired: WireResult = await self.link.call(
                TransactionCall.name, call, WireResult, repeats=repeats, changes=True
            )
            group.outcome = wired.result(message_id_kind(self.wal_name))
            return group.outcome
        except StreamingNodeError as error:
            group.outcome, pack.sent = error, isinstance(error, Indeterminate)  # else the node has nothing of it
            if repeats or not isinstance(error, Indeterminate):
                raise
            raise TransactionExpired(
                f"transaction {first.txn_id} ended with its connection — repeat all of it"
            ) from error
        finally:
            if sequence:
                self._settled(range(sequence, sequence + 1))
            self._told((group,))

    # --- calls ----------------------------------------------------------------------------------------------------------

    async def consistent_tick(self, collections: tuple[str, ...] = ()) -> int:
        """As `Node.consistent_tick`."""
        tick: int = await self.link.call_of("consistent_tick", collections)
        return tick

    create_collection = _asked("create_collection", changes="the collection")
    drop_collection = _asked("drop_collection", changes="the drop")
    create_partition = _asked("create_partition", changes="the partition")
    drop_partition = _asked("drop_partition", changes="the drop")
    put_note = _asked("put_note")
    delete_producer = _asked("delete_producer")
    delete_reader = _asked("delete_reader")
    named_readers = _asked("named_readers")
    seek_reader = _asked("seek_reader")
    open_transactions = _asked("open_transactions")
    abort_transaction = _asked("abort_transaction")
    snapshot = _asked("snapshot")
    flush = _asked("flush")
    statistics = _asked("statistics")
    hand_over = _asked("hand_over")

    async def open_producer(self, name: str) -> tuple[ProducerRecord, int]:
        """Open a producer, made if it is new, and fence whoever had it open."""
        opened: tuple[ProducerRecord, int] = await self.link.call_of("open_producer", name)
        record, last_sequence = opened
        self._named[record.producer_id] = _Named(last_sequence)
        return opened

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, 0 for none."""
        return self._named[producer_id].last

    def place(self, producer_id: int, epoch: int, sequence: int, *, waits: bool) -> Place:
        """Return the place of a producer's write; the node keeps it from when it is sent, or has to wait."""
        place = Place(ProducerStamp(producer_id, epoch, sequence))
        if waits:
            self.link.hold(place)
        return place

    async def back_up(self, path: Path) -> BackupRecord:
        """As `Node.backup`; a relative path is this process's."""
        record: BackupRecord = await self.link.call_of("back_up", await to_thread.run_sync(path.absolute))
        return record

    async def verify(self) -> Report:
        """As `Node.verify`."""
        return Report(*await self.link.call_of("verify"))

    def _take_catalog(self, collections: tuple[CollectionInfo, ...]) -> None:
        # What has not changed stays the object it was, and with it all that was worked out from it.
        known = {info.id: info for info in self.catalog.collections()}
        self.catalog = Catalog(known[info.id] if known.get(info.id) == info else info for info in collections)


class RemoteReading:
    """A reader's way through the log of another process, over as many connections as it takes; see `Reading`."""

    def __init__(self, link: Link, request: ReadRequest) -> None:
        self._link = link
        kinds = tuple(sorted(map(int, request.types)))
        ids = tuple(info.id for info in request.infos)
        of, start = ids[0] if len(ids) == 1 else ids, request.policy.plain
        self._request = ReadCall(of, *start, request.until, request.name, kinds, None, STREAM_CREDIT_BYTES)
        self._frames: deque[Frame | None] = deque()
        self._came = asyncio.Event()
        self._stream = 0
        self._taken_bytes = 0
        self._is_closed = False
        self._opened_on = 0
        """The connection that the stream is on."""

    async def open(self) -> int:
        """Find the place to start, at the node."""
        while True:
            await self._link.wait_ready()
            self._frames.clear()
            self._stream = self._link.open_stream(self._request, ReadCall.name, self._take)
            frame = await self._next_frame()
            if frame is not None:
                break
        if frame.kind != FrameKind.OPENED:
            self._link.close_stream(self._stream)
            raise error_from_wire(frame.value(WireError))
        opened: Opened = frame.value(Opened)
        self._opened_on = self._link.connections
        if self._request.resume is None:  # a reader of what is to come goes on from here, whatever comes first
            self._request = msgspec.structs.replace(self._request, resume=StartingPoint(opened.position, opened.tick))
        return opened.acknowledged_position

    async def next_batch(self) -> ScanBatch:
        """Return what comes next, over the next connection where this one is lost."""
        while True:
            frame = await self._next_frame()
            if frame is None:
                await self._open_again()
            elif frame.kind == FrameKind.ERROR:
                raise error_from_wire(frame.value(WireError))
            else:
                batch = decode_batch(memoryview(frame.payload), self._link.welcome.wal_name)
                self._grant(len(frame.payload))
                # Where it goes on, whatever is acknowledged: nothing is missed, and nothing comes twice.
                resume = StartingPoint(batch.resume_position, batch.confirmed_tick)
                self._request = msgspec.structs.replace(self._request, resume=resume)
                return batch

    async def ack(self, position: int, tick: int) -> None:
        """Move a named reader's place."""
        while True:
            try:
                call = AckCall(self._stream, position, tick)
                await self._link.call(AckCall.name, call, Any, repeats=False, changes=False)
                return
            except (Indeterminate, InvalidArgument):
                if self._opened_on == self._link.connections:
                    raise
                await self._open_again()  # acknowledging twice is the same as once

    async def close(self) -> None:
        """End it; idempotent."""
        self._is_closed = True
        self._link.close_stream(self._stream)
        self._came.set()

    async def _open_again(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._link.options.give_up_s
        while True:
            try:
                await self.open()
                return
            except ReaderBusy:  # by the lost connection, which the node may not have noticed; or by somebody else
                if loop.time() >= give_up_at:
                    raise
                await asyncio.sleep(BUSY_PAUSE_S)

    async def _next_frame(self) -> Frame | None:
        while not self._frames:
            if self._is_closed:
                raise OnShutdown("the reader is closed — open another with node.read()")
            self._came.clear()
            await self._came.wait()
        return self._frames.popleft()

    def _take(self, frame: Frame | None) -> None:
        self._frames.append(frame)
        self._came.set()

    def _grant(self, size_bytes: int) -> None:
        self._taken_bytes += size_bytes
        if self._taken_bytes >= CREDIT_STEP_BYTES:
            self._link.grant(self._stream, self._taken_bytes)
            self._taken_bytes = 0
