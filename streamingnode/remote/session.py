"""One client of a node, as the server sees it: what it may do, and what it has under way."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pyarrow as pa

from interceptors.errors import CollectionNotFound, InvalidTransactionState
from scanner.deliver_policy import DeliverPolicy, Start
from streamingnode.columns import conform
from streamingnode.embedded import EmbeddedBackend, EmbeddedReading
from streamingnode.remote.answers import WRITE_BYTES_MAX, ClientWrites, Rights
from streamingnode.remote.calls import (
    CALLS,
    VERSIONS,
    Access,
    AckCall,
    Call,
    Hello,
    Opened,
    ReadCall,
    TransactionCall,
    Welcome,
    decode,
    encode,
    error_to_wire,
)
from streamingnode.remote.connection import Connection
from streamingnode.remote.streams import encode_batch
from streamingnode.remote.writes import Targets, WireResult, WireTarget, result_to_wire
from streamingnode.writing.transaction import begin_group, commit_group, rollback_group
from wal.append import AppendGroup
from wal.errors import InvalidArgument, Overloaded, ProtocolError, StreamingNodeError
from wal.frames import Frame, FrameKind
from wal.headers import HEADERS, MESSAGE_VERSION, DeleteHeader, InsertHeader, MessageType
from wal.message import MutableMessage
from wal.position import CLIENT_PRODUCER_IDS, Place, ProducerStamp, message_id_kind
from wal.runtime import event_log

_log = event_log(__name__)

CALLS_MAX = 1_024
"""Calls and streams that one connection may have under way; further ones are refused."""
PARTS_BYTES_MAX = 16 << 20
"""Long requests of one connection that are not whole yet."""


Authenticate = Callable[[Hello, Connection], Rights]
"""Say what who connects may do. Raises `Unauthenticated`."""


class Shared:
    """What all sessions of one node share."""

    def __init__(self, backend: EmbeddedBackend, *, connections_max: int) -> None:
        self.backend, self._connections_max = backend, connections_max
        self.targets = Targets(lambda: backend.catalog)
        self.transactions: dict[int, Session] = {}
        """The open ones of clients, and whose they are."""
        self.sessions: set[Session] = set()
        self.refused = 0
        """Connections over the limit."""

    @property
    def is_full(self) -> bool:
        """Whether no more connections are taken."""
        return len(self.sessions) > self._connections_max


class Stream:
    """One reader of a client: what it may still be sent."""

    def __init__(self, reading: EmbeddedReading, credit_bytes: int) -> None:
        self.reading, self.credit_bytes = reading, credit_bytes
        self._granted = asyncio.Event()

    def grant(self, size_bytes: int) -> None:
        """Take credit from the client."""
        self.credit_bytes += size_bytes
        self._granted.set()

    async def spend(self, size_bytes: int) -> None:
        """Return once there is any credit left, and take so much of it: the last batch may exceed it."""
        while self.credit_bytes <= 0:
            self._granted.clear()
            await self._granted.wait()
        self.credit_bytes -= size_bytes


class Session:
    """One client's connection, and all that it has under way."""

    def __init__(self, server: Shared, authenticate: Authenticate) -> None:
        self._server, self._backend, self._authenticate = server, server.backend, authenticate
        self._loop = asyncio.get_running_loop()
        self.connection = Connection(self._on_frame, self.lost, parts_bytes_max=PARTS_BYTES_MAX, on_made=self._made)
        self.began_at = self._loop.time()
        self.rights: Rights | None = None
        self.ending: set[asyncio.Task[Any]] = set()
        """What is left to do when the connection is lost."""
        self._client_id = 0
        self._writes: ClientWrites
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, Place] = {}
        """The places of writes that the client has begun and not sent."""
        self._telling = asyncio.Lock()
        self._wal_kind = message_id_kind(server.backend.wal_name)

    # --- frames ---------------------------------------------------------------------------------------------------------

    def _made(self) -> None:
        if self._server.is_full:
            self._server.refused += 1
            self._refuse(
                0, Overloaded(f"the node has {len(self._server.sessions) - 1} connections, the limit — close some")
            )
            self.connection.close()

    def _on_frame(self, frame: Frame) -> None:
        if self.rights is None:
            self._on_hello(frame)
            return
        match frame.kind:
            case FrameKind.WRITES:
                self._writes.take(frame)
            case FrameKind.CALL:
                self._on_call(frame)
            case FrameKind.CANCEL | FrameKind.END:
                self._on_cancel(frame.number)
            case FrameKind.CREDIT:
                if (stream := self._streams.get(frame.number)) is not None:
                    stream.grant(frame.value(int))
            case FrameKind.HOLD:
                self._hold(frame.number, *frame.value(tuple[int, int, int]))
            case FrameKind.PING:
                self.connection.send(FrameKind.PONG, frame.number)
            case FrameKind.HELLO:
                raise ProtocolError("a second hello")
            case _:
                pass  # of a later version; the length was checked, and the frame is skipped

    def _on_hello(self, frame: Frame) -> None:
        if frame.kind != FrameKind.HELLO:
            raise ProtocolError(f"a frame of kind {frame.kind} before the hello")
        hello: Hello = frame.value(Hello)
        versions = set(VERSIONS).intersection(hello.versions)
        try:
            if not versions:
                raise ProtocolError(
                    f"the client speaks versions {hello.versions[:10]}, the node {VERSIONS} — update the older one"
                )
            if not CLIENT_PRODUCER_IDS <= hello.client_id < 1 << 63:
                raise ProtocolError(f"{hello.client_id} is no client id")
            rights = self._authenticate(hello, self.connection)
        except StreamingNodeError as error:
            _log.warning("client_refused", code=error.code, client=hello.name[:80])
            self._refuse(0, error)
            self.connection.close()
            return
        self.rights, self._client_id = rights, hello.client_id
        shared = self._server
        self._writes = ClientWrites(self._backend, shared.targets, self.connection, hello.client_id, rights, self.work)
        backend = self._backend
        welcome = Welcome(
            version=max(versions),
            node_id=backend.node_id,
            path=backend.path,
            wal_name=backend.wal_name,
            write_bytes_max=WRITE_BYTES_MAX,
            settings={setting.key: setting.value for setting in backend.config.origins()},
        )
        self.connection.agreed()
        self.connection.send(FrameKind.WELCOME, 0, welcome)
        self.work(self.send_catalog())

    async def send_catalog(self) -> None:
        """Tell the client which collections there are."""
        async with (
            self._telling
        ):  # parts of two such frames would be taken for one, and an older one must not come last
            payload = encode(self._backend.catalog.collections())
            await self.connection.send_long(FrameKind.CATALOG, 0, payload)

    def say_goodbye(self) -> None:
        """Ask the client to leave: the node is closing."""
        self.connection.send(FrameKind.LEAVING)

    def calls(self) -> list["asyncio.Task[None]"]:
        """Return the calls under way, without the streams, which have no end."""
        return [task for number, task in self._calls.items() if number not in self._streams]

    def lost(self, error: Exception | None) -> None:
        """End what the client has under way: nobody would hear of it. Its writes go on, and it may ask for them again."""
        if isinstance(error, ProtocolError):
            _log.warning("connection_refused", peer=str(self.connection.peer("peername") or ""), error=str(error))
        for task in list(self._calls.values()):
            task.cancel()
        self._held.clear()
        mine = [txn_id for txn_id, session in self._server.transactions.items() if session is self]
        for txn_id in mine:
            del self._server.transactions[txn_id]
            self.work(self._roll_back(txn_id))
        if not self.ending:
            self._server.sessions.discard(self)

    async def _roll_back(self, txn_id: int) -> None:
        with suppress(StreamingNodeError):  # else it expires by itself
            await self._backend.append(rollback_group(txn_id, "its client is gone"))

    def work(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that the connection's end does not cut off."""
        task = self._loop.create_task(work)
        self.ending.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[Any]") -> None:
        self.ending.discard(task)
        if not task.cancelled():
            task.exception()  # a connection that was lost meanwhile
        if not self.connection.is_open and not self.ending:
            self._server.sessions.discard(self)

    # --- calls ----------------------------------------------------------------------------------------------------------

    def _on_call(self, frame: Frame) -> None:
        number, name = frame.number, frame.value(str)
        if number in self._calls or not number:
            raise ProtocolError(f"a second call {number}")
        if len(self._calls) >= CALLS_MAX:
            self._refuse(
                number, Overloaded(f"{CALLS_MAX} calls of one connection are under way — wait for some of them")
            )
            return
        task = self._loop.create_task(self._run(number, name, frame.payload))
        self._calls[number] = task
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _run(self, number: int, name: str, payload: bytes | memoryview) -> None:
        try:
            if name == ReadCall.name:
                await self._read(number, decode(payload, ReadCall))
                return
            if name == TransactionCall.name:
                reply: object = await self._transaction(decode(payload, TransactionCall))
            elif name == AckCall.name:
                await self._ack(decode(payload, AckCall))
                reply = None
            elif (call := CALLS.get(name)) is not None:
                reply = await self._call(call, decode(payload, call.request))
            else:
                raise InvalidArgument(f"the node knows no call {name[:80]!r} — update the older of node and client")
            await self.connection.send_long(FrameKind.REPLY, number, encode(reply))
        except ProtocolError as error:
            self._refuse(number, error)
        except StreamingNodeError as error:
            self._refuse(number, error)
        except Exception as error:  # noqa: BLE001 - a task's border: the error is the caller's
            _log.exception("call_failed", call=name[:80])
            self._refuse(number, error)

    async def _call(self, call: Call, request: msgspec.Struct) -> object:
        arguments: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
        self._check(call.access, arguments.get(call.of_collection) if call.of_collection else None)
        if call.access is Access.ADMIN and self.rights is not None:
            _log.info(
                "admin_call", client=self.rights.name, call=call.name, collection=arguments.get(call.of_collection)
            )
        stamp = arguments.get("stamp")
        if stamp is not None and stamp.producer_id != self._client_id:
            raise ProtocolError("a change under the stamp of another client")
        timeout = {"timeout": None} if call.has_timeout else {}  # the client has its own, and cancels
        reply: object = await getattr(self._backend, call.name)(**arguments, **timeout)
        if call.access is Access.ADMIN:
            await self.send_catalog()  # before the reply: who made a change finds it made
        return reply

    def _check(self, access: Access, collection: str | None) -> None:
        assert self.rights is not None, "the hello comes first"
        self.rights.check(access, collection)

    def _refuse(self, number: int, error: Exception) -> None:
        self.connection.send(FrameKind.ERROR, number, error_to_wire(error))

    def _on_cancel(self, number: int) -> None:
        self._held.pop(number, None)
        if (call := self._calls.get(number)) is not None:
            call.cancel()
        elif self.rights is not None:
            self._writes.cancel(number)

    def _hold(self, number: int, producer_id: int, epoch: int, sequence: int) -> None:
        if len(self._held) >= CALLS_MAX or not 0 < producer_id < CLIENT_PRODUCER_IDS or sequence < 1:
            raise ProtocolError(
                f"over {CALLS_MAX} writes that are held, or sequence {sequence} of producer {producer_id}"
            )
        self._held[number] = self._backend.place(producer_id, epoch, sequence)

    # --- transactions that are sent before their commit -----------------------------------------------------------------

    async def _transaction(self, call: TransactionCall) -> WireResult:
        """Take one step; a transaction belongs to the connection that began it."""
        transactions = self._server.transactions
        owner = transactions.get(call.txn_id)
        self._check(Access.PRODUCE, None)
        if call.step != "begin" and owner is not self and (owner is not None or call.step != "commit"):
            raise InvalidTransactionState(
                f"transaction {call.txn_id} is not of this connection, or has ended — begin another"
            )
        match call.step:
            case "begin":
                result = await self._backend.append(begin_group(call.keepalive_ms))
                transactions[result.txn_id] = self
            case "bodies":
                messages = [self._body(call.txn_id, *body) for body in call.bodies]
                result = await self._backend.append(AppendGroup(messages))
            case "commit":
                group = commit_group(call.txn_id)
                producer_id, epoch = call.producer_id or self._client_id, call.epoch or 1
                group.producer = ProducerStamp(producer_id, epoch, call.sequence)
                group.place = self._backend.place(producer_id, epoch, call.sequence)
                result = await self._backend.append(group)
                if result.txn_id == call.txn_id:  # else an earlier try is in the log, and this one is rolled back
                    transactions.pop(call.txn_id, None)
            case "rollback":
                transactions.pop(call.txn_id, None)
                result = await self._backend.append(rollback_group(call.txn_id, call.reason[:200]))
            case _:
                raise ProtocolError(f"no step {call.step[:80]!r}")
        return result_to_wire(0, 0, result)

    def _body(self, txn_id: int, kind: int, vchannel: str, header: bytes, payload: bytes) -> MutableMessage:
        """Return a body of which nothing is taken for granted: rows that fit, of keys that belong on this vchannel."""
        if kind not in {MessageType.INSERT, MessageType.DELETE}:
            raise ProtocolError(f"a body of type {kind}")
        given: InsertHeader | DeleteHeader = decode(header, HEADERS[MessageType(kind), MESSAGE_VERSION])
        is_insert = isinstance(given, InsertHeader)
        place = (given.partition_id, given.schema_version) if isinstance(given, InsertHeader) else (0, 0)
        version = place[1] if is_insert else self._backend.catalog.live(given.collection_id).schema_version
        target = self._writes.target(WireTarget(kind, given.collection_id, place[0], version, len(payload)))
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(payload), target.shape.schema)
        except (pa.ArrowException, OSError) as error:
            raise ProtocolError(f"rows do not decode: {error}") from error
        conform(batch, target.shape.schema, target.shape.required)
        if vchannel not in target.vchannels or batch.num_rows != given.rows or not given.rows:
            raise ProtocolError("a body that does not say what is in it")
        if (target.shards(batch) != target.vchannels.index(vchannel)).any():
            raise ProtocolError("a body with rows of another shard")
        stamped = (
            InsertHeader(given.collection_id, *place, given.rows, part=given.part)
            if isinstance(given, InsertHeader)
            else DeleteHeader(given.collection_id, given.rows, part=given.part)
        )
        return MutableMessage(MessageType(kind), stamped, vchannel, payload, txn_id)

    # --- streams --------------------------------------------------------------------------------------------------------

    async def _read(self, number: int, call: ReadCall) -> None:
        """Send what a reader gets until it ends, as far as its credit goes; closed by the client, or with the connection."""
        info = next((each for each in self._backend.catalog.collections() if each.id == call.collection_id), None)
        if info is None:
            raise CollectionNotFound("the collection was dropped meanwhile — create it again, or read another")
        self._check(Access.CONSUME, info.name)
        start_at = call.start_at
        at = message_id_kind(start_at[0])(start_at[1]) if isinstance(start_at, tuple) else start_at
        try:
            policy = DeliverPolicy(Start(call.start), at)
            types = frozenset(map(MessageType, call.types))
        except ValueError as error:
            raise ProtocolError(f"no reader starts so: {error}") from error
        reading = EmbeddedReading(
            self._backend.channel,
            self._backend.readers,
            info,
            policy,
            until=call.until,
            name=call.reader,
            types=types,
            resume=call.resume,
        )
        try:
            await reading.open()
            stream = self._streams[number] = Stream(reading, call.credit_bytes)
            place = reading.place
            opened = Opened(0, 0) if place is None else Opened(place.position, place.tick)
            self.connection.send(FrameKind.OPENED, number, opened)
            while True:
                payload = encode_batch(await reading.next_batch())
                await stream.spend(len(payload))
                await self.connection.send_long(FrameKind.MESSAGES, number, payload)
        finally:
            self._streams.pop(number, None)
            self.work(reading.close())

    async def _ack(self, call: AckCall) -> None:
        stream = self._streams.get(call.stream)
        if stream is None or stream.reading.place is None:
            raise InvalidArgument("no named reader is open here — open it again")
        await stream.reading.ack(self._wal_kind(call.position), call.tick)
