"""One client of a node, as the server sees it: what it may do, and what it has under way."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from anyio import to_thread

from interceptors.errors import InvalidTransactionState, ProducerFenced
from interceptors.shard.catalog import Catalog
from scanner.deliver_policy import DeliverPolicy
from streamingnode.backend import ReadRequest
from streamingnode.collections import Definition, check_name
from streamingnode.embedded import EmbeddedBackend, EmbeddedReading
from streamingnode.errors import AccessDenied, Unauthenticated
from streamingnode.remote.answers import WRITE_BYTES_MAX, ClientWrites, Rights
from streamingnode.remote.calls import (
    CALLS,
    CHANNELS,
    TOPICS,
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
from streamingnode.remote.topics import ClientTopics
from streamingnode.remote.writes import FIRST_EPOCH, Targets, WireResult, WireTarget, checked_rows, result_to_wire
from streamingnode.writing.transaction import begin_group, commit_group, rollback_group
from wal.append import AppendGroup, AppendResult
from wal.errors import InvalidArgument, Overloaded, ProtocolError, StreamingNodeError, shown
from wal.frames import Frame, FrameKind
from wal.headers import HEADERS, MESSAGE_VERSION, DeleteHeader, InsertHeader, MessageType
from wal.message import MutableMessage
from wal.position import CLIENT_PRODUCER_IDS, Place
from wal.runtime import event_log

T = TypeVar("T")

_log = event_log(__name__)
_audit = event_log("streamingnode.audit")
"""Who connects, who is refused, and what admins do. What clients say of themselves is quoted, so that it forges no field."""

ADDRESS_SHARE = 4
"""One address may have so small a part of the connections there may be."""

CALLS_MAX = 1_024
"""Calls and streams that one connection may have under way; further ones are refused."""
CALLS_BYTES_MAX = 32 << 20
"""What the arguments of the calls of one connection may hold."""
HELD_MAX = 4_096
"""Places that one connection may hold."""
CATALOG_NUMBERS = 1 << 63
EVERYTHING = "*"
"""The right to what is not of one collection."""
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

    def is_full_for(self, host: str) -> bool:
        """Whether no more connections are taken, or none of this address; those at the node's own socket have none."""
        of_host = sum(session.host == host for session in self.sessions) if host else 0
        return len(self.sessions) > self._connections_max or of_host * ADDRESS_SHARE > self._connections_max


class Stream:
    """One reader of a client: what it may still be sent."""

    def __init__(self, reading: EmbeddedReading, credit_bytes: int) -> None:
        self.reading, self.credit_bytes = reading, credit_bytes
        self.upto = (0, 0)
        """Position and tick up to which all was sent."""
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
        self.connection = Connection(
            self._on_frame, self.lost, parts_bytes_max=PARTS_BYTES_MAX, on_made=self._made, is_node=True
        )
        self._is_one_too_many, self.host = False, ""
        self.began_at = self._loop.time()
        self.rights: Rights | None = None
        self.ending: set[asyncio.Task[Any]] = set()
        """What is left to do when the connection is lost."""
        self.client_id = 0
        self._writes: ClientWrites
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, Place] = {}
        """The places of writes that the client has begun and not sent."""
        self._topics = ClientTopics(server.backend.mq)
        self._told_catalog: Catalog | None = None
        self._told_version = 0
        self._telling, self._catalogs, self._calls_bytes = asyncio.Lock(), 0, 0

    # --- frames ---------------------------------------------------------------------------------------------------------

    def _made(self) -> None:
        self._server.sessions.add(self)  # now and not before: a handshake of TLS that fails makes no connection
        peer = self.connection.peer("peername")
        self.host = str(peer[0]) if isinstance(peer, tuple) else ""
        self._is_one_too_many = self._server.is_full_for(self.host)

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
            if self._is_one_too_many:  # told now: what is sent to who has not been heard is lost with the connection
                self._server.refused += 1
                raise Overloaded("the node has as many connections as it takes — close some, or try again later")
            if not versions:
                raise ProtocolError(
                    f"the client speaks versions {hello.versions[:10]}, the node {VERSIONS} — update the older one"
                )
            if not CLIENT_PRODUCER_IDS <= hello.client_id < 1 << 63:
                raise ProtocolError(f"{hello.client_id} is no client id")
            rights = self._authenticate(hello, self.connection)
        except StreamingNodeError as error:
            _audit.warning("client_refused", code=error.code, client=shown(hello.name), address=self.host)
            self._refuse(0, error)
            self.connection.close()
            return
        self.rights, self.client_id = rights, hello.client_id
        _audit.info("client_connected", client=shown(rights.name), address=self.host)
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
        async with self._telling:  # an older one must not come last
            catalog = self._backend.catalog
            if catalog is self._told_catalog and catalog.version == self._told_version:
                return
            self._told_catalog, self._told_version = catalog, catalog.version
            payload = encode(catalog.collections())
            self._catalogs += 1  # a number of its own, which no client gives: parts of long frames are told by it
            await self.connection.send_long(FrameKind.CATALOG, CATALOG_NUMBERS + self._catalogs, payload)

    def say_goodbye(self) -> None:
        """Ask the client to leave: the node is closing."""
        self.connection.send(FrameKind.LEAVING)

    @property
    def is_busy(self) -> bool:
        """Whether the client waits for calls or writes; streams have no end, nor has who waits for messages of a topic."""
        endless = self._streams.keys() | self._topics.waiting
        return bool(self._calls.keys() - endless) or (self.rights is not None and self._writes.is_busy)

    def lost(self, error: Exception | None) -> None:
        """End what the client has under way: nobody would hear of it. Its writes go on, and it may ask for them again."""
        if isinstance(error, (ProtocolError, Unauthenticated)):
            _audit.warning("connection_refused", address=self.host, error=shown(str(error)))
        for task in list(self._calls.values()):
            task.cancel()
        self._held.clear()
        self.work(self._topics.close())
        mine = [txn_id for txn_id, session in self._server.transactions.items() if session is self]
        for txn_id in mine:
            del self._server.transactions[txn_id]
            self.work(self._roll_back(txn_id))
        if not self.ending:
            self._server.sessions.discard(self)

    async def _roll_back(self, txn_id: int) -> None:
        with suppress(StreamingNodeError):  # else it expires by itself
            await self._backend.append(rollback_group(txn_id, "its client is gone"))

    def work(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Do something that the connection's end does not cut off."""
        task = self._loop.create_task(work)
        self.ending.add(task)
        task.add_done_callback(self._worked)
        return task

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
        size_bytes = len(frame.payload)
        if len(self._calls) >= CALLS_MAX or self._calls_bytes + size_bytes > CALLS_BYTES_MAX:
            self._refuse(number, Overloaded("too many calls of one connection are under way — wait for some of them"))
            return
        task = self._loop.create_task(self._run(number, name, frame.payload))
        self._calls[number] = task
        self._calls_bytes += size_bytes

        def ended(_: "asyncio.Task[None]") -> None:
            self._calls.pop(number, None)
            self._calls_bytes -= size_bytes

        task.add_done_callback(ended)

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
                reply = await self._call(number, call, decode(payload, call.request))
            else:
                raise InvalidArgument(f"the node knows no call {name[:80]!r} — update the older of node and client")
            await self.connection.send_long(FrameKind.REPLY, number, encode(reply))
        except StreamingNodeError as error:
            self._refuse(number, error)
        except Exception as error:  # noqa: BLE001 - a task's border: the error is the caller's
            _log.exception("call_failed", call=name[:80])
            self._refuse(number, error)

    async def _call(self, number: int, call: Call, request: msgspec.Struct) -> object:
        arguments: dict[str, Any] = {name: getattr(request, name) for name in request.__struct_fields__}
        named = arguments.get(call.of_collection)
        collection = named.name if isinstance(named, Definition) else named
        if call.access is not Access.ADMIN:
            self._check(call.access, collection)
            return await self._answer(number, call, arguments)
        outcome = "done"
        try:
            self._check(call.access, collection or EVERYTHING)
            return await self._answer(number, call, arguments)
        except BaseException as error:
            outcome = error.code if isinstance(error, StreamingNodeError) else type(error).__name__
            raise
        finally:
            who, what = shown(self.rights and self.rights.name), shown(collection or EVERYTHING)
            _audit.info("admin_call", client=who, call=call.name, collection=what, outcome=outcome)

    async def _answer(self, number: int, call: Call, arguments: dict[str, Any]) -> object:
        if call.name.startswith(TOPICS):
            return await self._topics.call(number, call.name.removeprefix(TOPICS), arguments)
        if isinstance(definition := arguments.get("definition"), Definition):
            arguments["definition"] = await to_thread.run_sync(definition.checked)
        if call.name == "snapshot" and arguments["keys"] is not None:
            info = self._backend.catalog.collection_by_name(arguments["collection"])
            keys = WireTarget(MessageType.DELETE, info.id, 0, info.schema_version, len(arguments["keys"]))
            checked_rows(arguments["keys"], self._server.targets.find(keys))
        stamp = arguments.get("stamp")
        if stamp is not None and stamp.producer_id != self.client_id:
            raise ProtocolError("a change under the stamp of another client")
        timeout = {"timeout": None} if call.has_timeout else {}  # the client has its own, and cancels
        of: object = self._backend.channels if call.name.startswith(CHANNELS) else self._backend
        reply: object = await getattr(of, call.name.removeprefix(CHANNELS))(**arguments, **timeout)
        await self.send_catalog()  # before the reply: who made a change, or asks for a tick after one, finds it made
        return reply

    def _check(self, access: Access, collection: str | None) -> None:
        assert self.rights is not None, "the hello comes first"
        self.rights.check(access, collection)

    def _refuse(self, number: int, error: Exception) -> None:
        self.connection.send(FrameKind.ERROR, number, error_to_wire(error))

    def _on_cancel(self, number: int) -> None:
        self._held.pop(number, None)
        self._topics.cancelled(number, self.work)
        if (call := self._calls.get(number)) is not None:
            call.cancel()
        elif self.rights is not None:
            self._writes.cancel(number)

    def _hold(self, number: int, producer_id: int, epoch: int, sequence: int) -> None:
        """Keep the place of a write; beyond `HELD_MAX` of them it is remembered as long as others are."""
        try:
            self._check(Access.PRODUCE, None)
            stamp = self._writes.stamp(producer_id, epoch, sequence)
        except (AccessDenied, ProducerFenced):
            return  # as its write will be told
        if len(self._held) < HELD_MAX:
            self._held[number] = self._backend.place(stamp.producer_id, epoch, sequence)

    # --- transactions that are sent before their commit -----------------------------------------------------------------

    async def _transaction(self, call: TransactionCall) -> WireResult:
        """Take one step; a transaction belongs to the connection that began it."""
        transactions = self._server.transactions
        self._check(Access.PRODUCE, None)
        if call.step == "commit":
            return result_to_wire(0, 0, await self._commit(call))
        if call.step != "begin":
            self._check_own(call.txn_id)
        match call.step:
            case "begin":
                result = await asyncio.shield(self.work(self._begin(call.keepalive_ms)))
            case "bodies":
                messages = [self._body(call.txn_id, *body) for body in call.bodies]
                result = await self._backend.append(AppendGroup(messages))
            case "rollback":
                transactions.pop(call.txn_id, None)
                result = await self._backend.append(rollback_group(call.txn_id, call.reason[:200]))
            case _:
                raise ProtocolError(f"no step {call.step[:80]!r}")
        return result_to_wire(0, 0, result)

    async def _begin(self, keepalive_ms: int) -> AppendResult:
        begun = await self._backend.append(begin_group(keepalive_ms))
        self._server.transactions[begun.txn_id] = self
        if not self.connection.is_open:  # nobody hears of it
            del self._server.transactions[begun.txn_id]
            await self._roll_back(begun.txn_id)
        return begun

    async def _commit(self, call: TransactionCall) -> AppendResult:
        """Commit once: one that comes again is told what became of the first, over whatever connection that came."""
        stamp = self._writes.stamp(call.producer_id, call.epoch or FIRST_EPOCH, call.sequence)
        known = await self._backend.channel.outcome(stamp)
        if known is not None:
            return known
        self._check_own(call.txn_id)
        group = commit_group(call.txn_id)
        group.producer, group.place = stamp, self._backend.place(stamp.producer_id, stamp.epoch, stamp.sequence)
        result = await self._backend.append(group)
        if result.txn_id == call.txn_id:  # else an earlier try is in the log, and this one is rolled back
            self._server.transactions.pop(call.txn_id, None)
        return result

    def _check_own(self, txn_id: int) -> None:
        """Raise `InvalidTransactionState` unless a transaction is this client's, over this connection or a lost one."""
        owner = self._server.transactions.get(txn_id)
        if owner is None or owner.client_id != self.client_id:
            raise InvalidTransactionState(
                f"transaction {txn_id} is not of this connection, or has ended — begin another"
            )

    def _body(self, txn_id: int, kind: int, vchannel: str, header: bytes, payload: bytes) -> MutableMessage:
        """Return a body of which nothing is taken for granted: rows that fit, of keys that belong on this vchannel."""
        if kind not in {MessageType.INSERT, MessageType.DELETE}:
            raise ProtocolError(f"a body of type {kind}")
        given: InsertHeader | DeleteHeader = decode(header, HEADERS[MessageType(kind), MESSAGE_VERSION])
        is_insert = isinstance(given, InsertHeader)
        place = (given.partition_id, given.schema_version) if isinstance(given, InsertHeader) else (0, 0)
        version = place[1] if is_insert else self._backend.catalog.live(given.collection_id).schema_version
        target = self._writes.target(WireTarget(kind, given.collection_id, place[0], version, len(payload)))
        batch = checked_rows(payload, target)
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
        ids = call.collections if isinstance(call.collections, tuple) else (call.collections,)
        infos = tuple(self._backend.catalog.collection(each) for each in dict.fromkeys(ids))
        for info in infos:
            self._check(Access.CONSUME, info.name)
        if call.reader is not None:
            check_name("reader", call.reader)
        policy = DeliverPolicy.of_plain(call.start, call.start_at)
        try:
            types = frozenset(map(MessageType, call.types))
        except ValueError as error:
            raise ProtocolError(f"no reader starts so: {error}") from error
        reading = self._backend.read(ReadRequest(infos, policy, call.until, call.reader, types, call.resume))
        try:
            await reading.open()
            stream = self._streams[number] = Stream(reading, call.credit_bytes)
            place, start = reading.place, reading.start
            acknowledged = (0, 0) if place is None else (place.position, place.tick)
            self.connection.send(FrameKind.OPENED, number, Opened(*start, *acknowledged))
            while True:
                batch = await reading.next_batch()
                payload = encode_batch(batch)
                await stream.spend(sum(map(len, payload)))
                stream.upto = batch.resume_position, batch.confirmed_tick
                await self.connection.send_long(FrameKind.MESSAGES, number, *payload)
        finally:
            self._streams.pop(number, None)
            self.work(reading.close())

    async def _ack(self, call: AckCall) -> None:
        stream = self._streams.get(call.stream)
        if stream is None or stream.reading.place is None:
            raise InvalidArgument("no named reader is open here — open it again")
        if call.position > max(stream.upto[0], stream.reading.place.position) or call.tick > stream.upto[1]:
            raise InvalidArgument("it was not delivered yet — acknowledge what this reader delivered")
        await stream.reading.ack(call.position, call.tick)
