"""The server's side of connections: clients of a node, their rights, calls, streams and end."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, NoReturn

import anyio
import msgspec
import pyarrow as pa

from interceptors.shard.catalog import Catalog
from scanner.deliver_policy import DeliverPolicy
from streamingnode.backend import ReadRequest
from streamingnode.collections import Definition, check_name
from streamingnode.embedded import EmbeddedBackend, EmbeddedReading
from streamingnode.errors import AccessDenied, Unauthenticated
from streamingnode.remote import calls
from streamingnode.remote.answers import EVERYTHING, WRITE_BYTES_MAX, ClientWrites, Rights, Shared
from streamingnode.remote.audit import Audit
from streamingnode.remote.changes import Changes, ClientChanges, Reply
from streamingnode.remote.connection import Connection
from streamingnode.remote.room import CLIENTS_BYTES_MAX, Room, sent_bytes_each
from streamingnode.remote.streams import encode_batch
from streamingnode.remote.topics import ClientTopics
from streamingnode.remote.writes import WireTarget, checked_rows
from wal.errors import InvalidArgument, OnShutdown, Overloaded, ProtocolError, StreamingNodeError
from wal.frames import Frame, FrameKind
from wal.headers import MessageType
from wal.position import CLIENT_PRODUCER_IDS
from wal.queue import Signal
from wal.runtime import Supervisor, event_log, in_thread
from wal.sockets import accept_one_a_turn, stop_accepting
from wal.wire_types import VERSIONS, Hello, Welcome, WireError, decode, encode

_log = event_log(__name__)

ADDRESS_SHARE = 4
"""One address may have at most this fraction (1/4) of all connections."""

CALLS_MAX = 1_024
"""The calls and streams that one connection may have open; further ones are refused."""
CALLS_BYTES_MAX = 32 << 20
"""Limit for the arguments of all open calls of one connection."""
CATALOG_NUMBERS = 1 << 63
PARTS_BYTES_MAX = 16 << 20
"""Limit for the incomplete long requests of one connection."""

Authenticate = Callable[[Hello, Connection], Rights]
"""Returns the rights of a client that connects. Raises `Unauthenticated`."""
HELLO_S_MAX = 10.0
"""How long a connection may take to send its hello."""
ROOM_S_MAX = 5.0
"""How long a connection waits for memory before the server ends the connection that holds most."""
SETTLE_S_MAX = 5.0
"""How long a new connection waits for the calls of the client's previous one; then it is
refused.
"""
LOOK_PAUSE_S = 0.02
"""Interval between checks of the catalog for changes, and, while draining, of the clients for open
requests.
"""
SILENT_S_MAX = 60.0
SILENCE_LOOK_S = 5.0
"""A client sends something every few seconds. The server checks every `SILENCE_LOOK_S` and ends
connections that were silent for `SILENT_S_MAX`.
"""


class Stream(msgspec.Struct, eq=False):
    """One reader of a client; `credit_bytes` may still be sent to it."""

    reading: EmbeddedReading
    credit_bytes: int
    granted: Signal = msgspec.field(default_factory=Signal)

    async def wait(self) -> None:
        """Wait until any credit is left; the last batch may exceed it."""
        while self.credit_bytes <= 0:
            await self.granted.wait()


class Session:
    """One client's connection with its calls, streams and writes. `server` counts it among the
    others.
    """

    def __init__(self, server: "Server", authenticate: Authenticate) -> None:
        self._server = server
        self._shared = server.shared
        self._backend = server.shared.backend
        self._authenticate = authenticate
        self._loop = asyncio.get_running_loop()
        self.connection = Connection(
            self._on_frame,
            self.lost,
            parts_bytes_max=PARTS_BYTES_MAX,
            on_made=self._made,
            is_node=True,
            room=server.room,
        )
        self._is_one_too_many = False
        self.host = ""
        self.began_at = self._loop.time()
        self.rights: Rights | None = None
        """None before the hello; `_writes`, `_changes` and `_hello` do not exist until then."""
        self._writes: ClientWrites
        self._changes: ClientChanges
        self._hello: Hello
        self.ended: asyncio.Task[None] | None = None
        """Set once the connection is lost; done when its calls, except changes, have all ended."""
        self._before: asyncio.Task[None] | None = None
        """The `ended` task of the connection that this one replaces."""
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Stream] = {}
        self._topics = ClientTopics(self._backend.mq)
        self._sent_catalog: tuple[Catalog, int] | None = None
        """The catalog and its version that were last sent to the client."""
        self._telling = asyncio.Lock()
        self._catalog_numbers = count(CATALOG_NUMBERS)

    # --- frames -----------------------------------------------------------------------------------

    def _made(self) -> None:
        sessions = self._server.sessions
        connections_max = self._server.connections_max
        sessions.add(self)  # only now: a failed TLS handshake makes no connection
        self._server.share_out(self)
        peer = self.connection.peer("peername")
        self.host = str(peer[0]) if isinstance(peer, tuple) else ""  # a Unix socket has none
        of_host = sum(session.host == self.host for session in sessions) if self.host else 0
        self._is_one_too_many = (
            len(sessions) > connections_max or of_host * ADDRESS_SHARE > connections_max
        )

    def _on_frame(self, frame: Frame) -> None:
        if not self.connection.has_agreed:
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
                    stream.credit_bytes += frame.value(int)
                    stream.granted.wake()
            case FrameKind.SETTLED:
                self._changes.settle(frame.number)
            case FrameKind.PING:
                self.connection.send(FrameKind.PONG, frame.number)
            case FrameKind.HELLO:
                raise ProtocolError("a second hello")
            case _:
                pass  # a kind of a later version; its length is checked, so the frame is skipped

    def _on_hello(self, frame: Frame) -> None:
        if self.rights is not None:
            raise ProtocolError(f"a frame of kind {frame.kind} before the welcome")
        if frame.kind != FrameKind.HELLO:
            raise ProtocolError(f"a frame of kind {frame.kind} before the hello")
        hello: Hello = frame.value(Hello)
        versions = set(VERSIONS).intersection(hello.versions)
        try:
            # Refuse only now: a connection that closes with an unread hello would lose the reply.
            if self._is_one_too_many:
                raise Overloaded(
                    "the node is at its limit of connections — close some, or try again later"
                )
            if not versions:
                raise ProtocolError(
                    f"the client speaks versions {hello.versions[:10]}, the node {VERSIONS} "
                    "— update the older one"
                )
            if not CLIENT_PRODUCER_IDS <= hello.client_id < 1 << 63:
                raise ProtocolError(f"client id {hello.client_id} is out of range")
            rights = self._authenticate(hello, self.connection)
            before = self._server.clients.get(hello.client_id)
            if before is not None:
                before.check_next(hello, rights)
        except StreamingNodeError as error:
            self._server.audit.refused(error.code, hello.name, self.host)
            self._refuse(0, error)
            self.connection.close()
            return
        self._server.audit.connected(rights.name, self.host)
        self.rights = rights
        self._hello = hello
        self._writes = ClientWrites(self._shared, self.connection, hello.client_id, rights)
        self._server.clients[hello.client_id] = self
        self._changes = self._server.changes.of(hello.client_id, rights)
        if before is None:
            self._welcome(max(versions))
            return
        self._writes.take_over(before._writes)  # noqa: SLF001 - another session
        before.connection.abort(OnShutdown("its client has connected again"))
        before.lost(None)
        self._before = before.ended
        self._shared.work(self._welcome_later(max(versions)))

    def check_next(self, hello: Hello, rights: Rights) -> None:
        """Raise unless this is a later hello of this session's client."""
        if rights != self.rights:
            raise AccessDenied(
                "another client with a different token uses this client id — connect with an id of "
                "your own"
            )
        if 0 < hello.connection <= self._hello.connection:
            raise ProtocolError(
                f"the hello of connection {hello.connection} arrived after that of connection "
                f"{self._hello.connection} — send it over a new connection"
            )

    def _welcome(self, version: int) -> None:
        node = self._backend
        settings = {each.key: each.value for each in node.config.origins()}
        # Only now: the client would take a reply before the welcome for the answer to its hello. A
        # reply that is ready earlier is sent when the client asks for its number again.
        assert self.rights is not None, "the hello was accepted"
        self._changes = self._server.changes.of(self._hello.client_id, self.rights)
        self._changes.attach(self._reply)
        of_node = node.node_id, node.path, node.wal_name
        memory = self._changes.memory
        welcome = Welcome(version, *of_node, WRITE_BYTES_MAX, settings, memory)
        self.connection.agreed()
        self.connection.send(FrameKind.WELCOME, 0, welcome)
        self._shared.work(self.send_catalog())

    async def _welcome_later(self, version: int) -> None:
        """Welcome the client once the calls of its previous connection have ended, except changes.

        The client repeats its unanswered calls and then makes new ones. An old call that ran later
        would undo the effect of newer ones. Changes continue under their numbers; the client first
        cancels those that it no longer waits for.
        """
        assert self._before is not None, "called only for a reconnecting client"
        await asyncio.wait([self._before], timeout=SETTLE_S_MAX)
        if not self.connection.is_open:
            return
        if self._before.done():
            self._welcome(version)
            return
        why = "calls of this client's previous connection have not ended yet — connect again"
        self._refuse(0, Overloaded(why))
        self.connection.close()

    def check_alive(self) -> None:
        """Raise `ProtocolError` for a silent client, `Unauthenticated` for an expired token."""
        limit_s = HELLO_S_MAX if self.rights is None else SILENT_S_MAX
        since = self.began_at if self.rights is None else self.connection.received_at
        if self.connection.share.is_waiting:
            self.connection.send(FrameKind.PONG)  # a sign of life, as no ping is read meanwhile
        elif self._loop.time() - since > limit_s:
            raise ProtocolError(f"received nothing for {limit_s:g} s")
        if self.rights is not None:
            self.rights.check_time()

    async def send_catalog(self) -> None:
        """Send the client the current collections, unless it has them."""
        async with self._telling:  # so that an older catalog cannot overtake a newer one
            catalog = self._backend.catalog
            if self._sent_catalog == (catalog, catalog.version):
                return
            self._sent_catalog = catalog, catalog.version
            # identifies the parts of a long catalog; clients use lower numbers
            number = next(self._catalog_numbers)
            await self.connection.send_long(
                FrameKind.CATALOG, number, encode(catalog.collections())
            )

    @property
    def name(self) -> str:
        """The client's name; empty before its hello."""
        return "" if self.rights is None else self.rights.name

    @property
    def is_busy(self) -> bool:
        """Whether the client waits for calls or writes. Streams do not count, nor do calls that
        wait for messages of a topic: they have no end.
        """
        endless = self._streams.keys() | self._topics.waiting
        if self._calls.keys() - endless:
            return True
        return self.rights is not None and (self._writes.is_busy or self._changes.under_way > 0)

    def lost(self, error: Exception | None) -> None:
        """End the calls and streams of a lost connection; its changes and writes go on. Idempotent;
        see `ended`.
        """
        if self.ended is not None:
            return
        if isinstance(error, (ProtocolError, Unauthenticated)):
            self._server.audit.broken(self.host, error)
        self._server.sessions.discard(self)
        self._server.share_out()
        for task in list(self._calls.values()):
            task.cancel()
        if self.rights is not None:
            self._writes.lost()
            self._changes.detach(self._reply, self._loop.time())
        self.ended = self._shared.work(self._end())

    async def _end(self) -> None:
        """Return when the calls of this connection and of the ones before it have ended, except
        changes.
        """
        await self._topics.close()
        before = () if self._before is None else (self._before,)
        if pending := [*self._calls.values(), *before]:
            await asyncio.wait(pending)
        if self.rights is not None and self._server.clients.get(self._hello.client_id) is self:
            del self._server.clients[self._hello.client_id]

    # --- calls ------------------------------------------------------------------------------------

    def _on_call(self, frame: Frame) -> None:
        number = frame.number
        name = frame.value(str)
        if number in self._calls or not number:
            raise ProtocolError(f"a second call {number}")
        call = calls.CALLS.get(name)
        changes = call is not None and call.changes
        if changes and self._changes.answer_again(number):
            return
        size_bytes = len(frame.payload)
        share = self.connection.share
        under_way = len(self._calls) + self._changes.under_way
        if under_way >= CALLS_MAX or share.calls_bytes + size_bytes > CALLS_BYTES_MAX:
            self._refuse(
                number,
                Overloaded(
                    "too many calls of one connection are under way — wait for some of them"
                ),
            )
            return
        make = partial(self._run, number, name, frame.payload)
        if changes:
            task = self._changes.begin(number, make)
        else:
            task = self._loop.create_task(self._answer_once(number, make))
            self._calls[number] = task
            task.add_done_callback(lambda _: self._calls.pop(number, None))
        share.hold_call(size_bytes)
        task.add_done_callback(lambda _: share.hold_call(-size_bytes))

    async def _answer_once(self, number: int, make: Callable[[], Awaitable[Reply]]) -> None:
        """Make a call and send its reply; a lost connection drops it."""
        reply = await make()
        with suppress(StreamingNodeError):
            await self._reply(number, reply)

    async def _reply(self, number: int, reply: Reply) -> None:
        """Send a reply, preceded by the current collections: a client that has changed them, or
        asks for a tick after a change, then has the change in its catalog.
        """
        if reply.error is not None:
            self.connection.send(FrameKind.ERROR, number, reply.error)
            return
        await self.send_catalog()
        await self.connection.send_long(FrameKind.REPLY, number, reply.payload)

    async def _run(self, number: int, name: str, payload: bytes | memoryview) -> Reply:
        """Make a call and return its reply."""
        try:
            if (call := calls.CALLS.get(name)) is None:
                raise InvalidArgument(
                    f"the node has no call {name[:80]!r} — update the older of node and client"
                )
            request = decode(payload, call.request)
            payload = b""  # otherwise a stream would keep it in memory while it is open
            reply = await self._call(number, call, request)
            encoded = await in_thread(encode, reply) if call.reply is pa.Table else encode(reply)
            return Reply(encoded)
        except Exception as error:  # noqa: BLE001 - a task's border: the error goes to the caller
            if not isinstance(error, StreamingNodeError):
                _log.exception("call_failed", call=name[:80])
            return Reply(error=WireError.of(error))

    async def _call(self, number: int, call: calls.Call, request: Any) -> object:
        named = getattr(request, call.of_collection, None)
        collection = named.name if isinstance(named, Definition) else named
        is_audited = call.access is calls.Access.ADMIN
        rights = self._writes.rights
        outcome = "done"
        try:
            # a tick needs no right: a write of no rows returns one, too
            if call.name != "consistent_tick":
                rights.check(
                    call.access, EVERYTHING if is_audited and not collection else collection
                )
            # A reader may read several collections: moving or deleting it needs the right to each
            # of them.
            for reader in (
                await self._backend.named_readers()
                if call.name in {"seek_reader", "delete_reader"}
                else ()
            ):
                if reader.name == request.name and collection in reader.collections:
                    for each in reader.collections:
                        rights.check(call.access, each)
            return await self._answer(number, call, request)
        except BaseException as error:
            outcome = error.code if isinstance(error, StreamingNodeError) else type(error).__name__
            raise
        finally:
            if is_audited:
                self._server.audit.admin_call(
                    rights.name, call.name, collection or EVERYTHING, outcome
                )

    async def _answer(self, number: int, call: calls.Call, request: Any) -> object:
        if isinstance(request, calls.ReadCall):
            await self._read(number, request)
        if isinstance(request, calls.AckCall):
            await self._ack(request)
            return None
        if isinstance(request, calls.TransactionCall):
            return await self._writes.transaction(request)
        arguments = msgspec.structs.asdict(request)
        names = arguments.get("collections", arguments.get("names", ()))
        for each in (EVERYTHING,) if names is None else set(names):
            self._writes.rights.check(call.access, each)
        if call.name.startswith(calls.TOPICS):
            name = call.name.removeprefix(calls.TOPICS)
            return self._writes.rights.visible(await self._topics.call(number, name, arguments))
        if isinstance(definition := arguments.get("definition"), Definition):
            arguments["definition"] = await in_thread(definition.checked)
        if call.name == "snapshot" and arguments["keys"] is not None:
            info = self._backend.catalog.collection_by_name(arguments["collection"])
            keys = WireTarget(
                MessageType.DELETE, info.id, 0, info.schema_version, len(arguments["keys"])
            )
            checked_rows(arguments["keys"], self._shared.targets.find(keys))
        if arguments.get("stamp") is not None:
            arguments["stamp"] = self._writes.stamp(arguments["stamp"])
        of: object = (
            self._backend.channels if call.name.startswith(calls.CHANNELS) else self._backend
        )
        reply = await getattr(of, call.name.removeprefix(calls.CHANNELS))(**arguments)
        return self._writes.rights.visible(reply)

    def refuse(self, error: StreamingNodeError) -> None:
        """Send the client an error and end the connection."""
        self._refuse(0, error)
        self.connection.abort(error)

    def _refuse(self, number: int, error: Exception) -> None:
        self.connection.send(FrameKind.ERROR, number, WireError.of(error))

    def _on_cancel(self, number: int) -> None:
        self._topics.cancelled(number, self._shared.work)
        if (call := self._calls.get(number)) is not None:
            call.cancel()
        elif not self._changes.cancel(number):
            self._writes.cancel(number)

    # --- streams ----------------------------------------------------------------------------------

    async def _read(self, number: int, call: calls.ReadCall) -> NoReturn:
        """Send a reader its batches, within its credit, until the client closes the stream or the
        connection ends.
        """
        ids = call.collections if isinstance(call.collections, tuple) else (call.collections,)
        infos = tuple(self._backend.catalog.collection(each) for each in dict.fromkeys(ids))
        for info in infos:
            self._writes.rights.check(calls.Access.CONSUME, info.name)
        if call.reader is not None:
            check_name("reader", call.reader)
        policy = DeliverPolicy.of_plain(call.start, call.start_at)
        types = frozenset(call.types)
        reading = self._backend.read(
            ReadRequest(infos, policy, call.until, call.reader, types, call.resume)
        )
        stream = self._streams[number] = Stream(reading, call.credit_bytes)
        try:
            await reading.open()
            self.connection.send(
                FrameKind.OPENED, number, calls.Opened(*reading.start, *reading.place)
            )
            while True:
                await stream.wait()  # holds no part of the log while it waits
                batch = await reading.next_batch()
                payload = encode_batch(batch, reading.vchannels)
                stream.credit_bytes -= sum(map(len, payload))
                await self.connection.send_long(FrameKind.MESSAGES, number, *payload)
        finally:
            self._streams.pop(number, None)
            self._shared.work(reading.close())

    async def _ack(self, call: calls.AckCall) -> None:
        stream = self._streams.get(call.stream)
        if stream is None or not stream.reading.place.position:
            raise InvalidArgument("this stream has no open named reader — open it again")
        await stream.reading.ack(call.position, call.tick)


class Server:
    """Accepts connections for one open node. Lives on the event loop; close it before the node."""

    def __init__(self, backend: EmbeddedBackend, *, connections_max: int) -> None:
        self.shared = Shared(backend)
        self.connections_max = connections_max
        self.audit = Audit()
        self.sessions: set[Session] = set()
        self.room = Room(CLIENTS_BYTES_MAX)
        """Memory for everything that clients send."""
        self._sent_bytes_each = 0
        self.clients: dict[int, Session] = {}
        """The last session of each client, by client id, until its calls have ended."""
        self.changes = Changes(self.shared.work)
        self._listeners: list[asyncio.AbstractServer] = []
        self._watching = Supervisor(
            lambda failure: _log.error("server_task_failed", error=repr(failure))
        )
        self._watching.spawn(self._announce_catalog())
        self._watching.spawn(self._drop_silent())

    async def listen_tcp(
        self, host: str, port: int, authenticate: Authenticate, tls: ssl.SSLContext | None
    ) -> int:
        """Accept connections at an address; return the port. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        connected = partial(self.connected, authenticate)
        patience_s = None if tls is None else HELLO_S_MAX
        listener = await loop.create_server(
            connected, host, port, ssl=tls, ssl_handshake_timeout=patience_s, backlog=1
        )
        self._listeners.append(listener)
        await accept_one_a_turn(listener)
        return int(listener.sockets[0].getsockname()[1])

    def end_unless(self, is_valid: Callable[[Rights], bool]) -> int:
        """End the connections of clients whose rights are no longer valid; return how many."""
        ended = 0
        for session in list(self.sessions):
            if session.rights is not None and not is_valid(session.rights):
                session.connection.abort(
                    Unauthenticated(f"the rights of {session.rights.name!r} have changed")
                )
                ended += 1
        return ended

    async def drain(self, grace_s: float) -> None:
        """Accept no more connections, ask clients to leave, and wait up to `grace_s` for their
        calls and writes.
        """
        for listener in self._listeners:
            stop_accepting(listener)
        for session in self.sessions:
            session.connection.send(FrameKind.LEAVING)
        with anyio.move_on_after(grace_s if self.sessions else 0):
            # requests that clients sent before they read this are still on their way
            await asyncio.sleep(LOOK_PAUSE_S)
            # many things make a session busy, and there is no single event for them
            while any(session.is_busy for session in self.sessions):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_PAUSE_S)

    async def close(self) -> None:
        """End every connection; idempotent."""
        for listener in self._listeners:
            stop_accepting(listener)
        await self._watching.stop()
        sessions = list(self.sessions)
        for session in sessions:
            session.connection.close()
            session.lost(None)
        self.changes.end()
        await asyncio.gather(*[session.connection.end() for session in sessions])
        while self.shared.tasks:
            await asyncio.wait(self.shared.tasks)
        self.audit.tell_left_out()

    def connected(
        self, authenticate: Authenticate = lambda hello, _: Rights(hello.name[:128] or "local")
    ) -> Connection:
        """Return a new connection; by default with all rights, for local clients of the
        directory.
        """
        return Session(self, authenticate).connection

    def share_out(self, new: Session | None = None) -> None:
        """Divide the memory for unsent data among the connections. A `new` one has no bound yet."""
        each_bytes = sent_bytes_each(len(self.sessions))
        if each_bytes != self._sent_bytes_each:
            self._sent_bytes_each = each_bytes
            for session in self.sessions:
                session.connection.bound_sent(each_bytes)
        elif new is not None:
            new.connection.bound_sent(each_bytes)

    async def _announce_catalog(self) -> None:
        """Send clients each change of the collections. Polls the catalog: a reader would slow down
        every append.
        """
        sent: object = None
        while True:
            if sent != (now := (self.shared.backend.catalog, self.shared.backend.catalog.version)):
                sent = now
                for session in [each for each in self.sessions if each.connection.has_agreed]:
                    self.shared.work(session.send_catalog())
            await asyncio.sleep(LOOK_PAUSE_S)

    async def _drop_silent(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_LOOK_S)
            self.look()

    def look(self) -> None:
        """End silent connections and those with an expired token; free memory after a long wait."""
        for session in list(self.sessions):
            try:
                session.check_alive()
            except (ProtocolError, Unauthenticated) as error:
                session.connection.abort(error)
        self.audit.tell_left_out()
        self.changes.forget_left(asyncio.get_running_loop().time())
        if self.room.longest_wait_s > ROOM_S_MAX:
            self._make_room()

    def _make_room(self) -> None:
        """End the connection that holds most; not if most is writes, which end by themselves."""
        refusable = {each: each.connection.share.refusable_bytes for each in self.sessions}
        if 2 * sum(refusable.values()) < self.room.bytes_max:
            return
        why = (
            f"clients share {self.room.bytes_max} bytes, this one holds the most, and others wait "
            "— send less at a time"
        )
        most = max(refusable, key=refusable.__getitem__)
        self.audit.refused(Overloaded.code, most.name, most.host)
        most.refuse(Overloaded(why))
