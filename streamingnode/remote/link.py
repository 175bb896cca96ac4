"""The client's side of a connection: one that is made again when it is lost, and what waits for answers over it.

What was sent and not answered is sent again over the next connection where that is exact: writes carry the client's own
stamps, and calls say whether they repeat. Everything else is told that its outcome is open.
"""

import asyncio
import secrets
import ssl
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import msgspec

from interceptors.shard.catalog import CollectionInfo
from streamingnode.errors import Unauthenticated, Unreachable
from streamingnode.remote.address import Address, LinkOptions
from streamingnode.remote.calls import CALLS, VERSIONS, Hello, Welcome, WireError, decode, encode, error_from_wire
from streamingnode.remote.connection import Connection
from streamingnode.remote.writes import FrameOfWrites, WireResult
from wal.append import in_doubt
from wal.errors import Indeterminate, InvalidArgument, OnShutdown, ProtocolError, StreamingNodeError, TooLarge
from wal.frames import FRAME_BYTES_MAX, Frame, FrameKind
from wal.position import CLIENT_PRODUCER_IDS, Place, message_id_kind
from wal.runtime import event_log

_log = event_log(__name__)
_decode_results = msgspec.msgpack.Decoder(tuple[list[WireResult], list[tuple[int, int, WireError]]]).decode

REQUEST_BYTES_MAX = FRAME_BYTES_MAX - (1 << 10)
"""Of one call: it goes in one frame."""
GIVE_UP_S_MAX = 300.0
"""Longest time that calls wait for a lost connection; a node remembers a client's writes for twice as long."""
PING_S, SILENT_S_MAX = 5.0, 20.0
"""How often a quiet connection is asked for a sign of life, and how long one may be without."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.02, 1.0
"""Between attempts to connect again."""
CONNECT_S_MAX = 10.0
PARTS_BYTES_MAX = 4 << 30
"""Of long replies, which are what this side asked for."""


class LinkState(Enum):
    """Where the connection stands."""

    CONNECTING = auto()
    """The first time, or again after a loss: calls wait."""
    READY = auto()
    LOST = auto()
    """It did not come back in time: calls are refused until it does."""
    CLOSED = auto()


TRANSITIONS = {
    LinkState.CONNECTING: {LinkState.READY, LinkState.LOST, LinkState.CLOSED},
    LinkState.READY: {LinkState.CONNECTING, LinkState.CLOSED},
    LinkState.LOST: {LinkState.READY, LinkState.CLOSED},
    LinkState.CLOSED: set[LinkState](),
}


class _Pending:
    """A call without its answer."""

    __slots__ = ("changes", "name", "payload", "repeats", "reply", "sent")

    def __init__(self, name: str, payload: bytes, *, repeats: bool, changes: bool) -> None:
        self.name, self.payload, self.repeats, self.changes = name, payload, repeats, changes
        self.sent = 0
        """How often."""
        self.reply: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()


class _PendingWrites:
    """A frame of writes without some of its results; `ended` is done with the last of them."""

    __slots__ = ("ended", "frame", "left", "sent")

    def __init__(self, frame: FrameOfWrites) -> None:
        self.frame, self.left = frame, set(range(len(frame.units)))
        self.sent = 0
        """How often."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Link:
    """A client's connection to a node, made again when it is lost. `open` comes first, `run` is for its owner."""

    def __init__(
        self, address: Address, options: LinkOptions, on_catalog: Callable[[tuple[CollectionInfo, ...]], None]
    ) -> None:
        self.address, self.options = address, options
        self.client_id = CLIENT_PRODUCER_IDS | secrets.randbits(62)
        self.state = LinkState.CONNECTING
        self.welcome: Welcome
        self.connections = 0
        """How many there have been: what belongs to one has ended with it."""
        self.on_state: Callable[[LinkState], None] = lambda _: None
        """Told of each state, before anything is sent in it."""
        self._on_catalog = on_catalog
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._numbers = 0
        self._calls: dict[int, _Pending] = {}
        self._writes: dict[int, _PendingWrites] = {}
        self._writes_bytes = 0
        self._streams: dict[int, Callable[[Frame | None], None]] = {}
        self._held: dict[int, tuple[int, int, int]] = {}
        """Writes of named producers that were begun and not sent, whose places the node keeps."""
        self._handshake: asyncio.Future[Frame] | None = None
        self._has_catalog = asyncio.Event()
        self._lost = asyncio.Event()
        self._ready = asyncio.Event()
        """Set while there is a connection, or will be none: then calls go on, or are refused."""
        self._answered = asyncio.Event()
        self._is_leaving = False
        self._reason: Exception | None = None

    # --- connecting -----------------------------------------------------------------------------------------------------

    async def open(self, known: Welcome | None = None) -> None:
        """Connect, to a `known` node once it is there. Raises `Unreachable`, `Unauthenticated`, `ProtocolError`."""
        try:
            await self._connect(expect=known.node_id if known else "")
            self._become(LinkState.READY)
        except Unreachable as error:
            if known is None:
                raise
            self.welcome, self._reason = known, error
            self._become(LinkState.LOST)

    async def run(self) -> None:
        """Connect again whenever the connection is lost, until cancelled."""
        while True:
            if self.state is LinkState.READY:
                await self._stay_connected()
                self._ready.clear()
                self._become(LinkState.CONNECTING)
                _log.warning(
                    "connection_lost", address=str(self.address), error=str(self._reason or "closed by the node")
                )
                self._drop_unrepeatable()
            # A node that closes each connection at once must not be asked without end.
            await asyncio.sleep(PAUSE_FIRST_S)
            await self._connect_again()
            self._become(LinkState.READY)
            self._send_again()

    async def _stay_connected(self) -> None:
        """Return when the connection is lost; ask a quiet one for a sign of life."""
        while not self._lost.is_set():
            asked_at = self._loop.time()
            try:
                async with asyncio.timeout(PING_S):
                    await self._lost.wait()
            except TimeoutError:
                connection = self._connection
                if connection is None:
                    return
                quiet_s = self._loop.time() - connection.received_at
                stood_still = (
                    self._loop.time() - asked_at > 2 * PING_S
                )  # this side, and what came is to be looked at yet
                if quiet_s > SILENT_S_MAX and not stood_still:
                    connection.abort(Unreachable(f"the node at {self.address} was silent for {SILENT_S_MAX:g} s"))
                elif quiet_s > PING_S / 2:
                    connection.send(FrameKind.PING)

    async def _connect_again(self) -> None:
        give_up_at, pause_s = self._loop.time() + min(self.options.give_up_s, GIVE_UP_S_MAX), PAUSE_FIRST_S
        node_id = self.welcome.node_id
        while True:
            try:
                await self._connect(expect=node_id)
                return
            except StreamingNodeError as error:
                self._reason = error
                is_final = isinstance(error, (Unauthenticated, InvalidArgument))
                if self.state is LinkState.CONNECTING and (is_final or self._loop.time() >= give_up_at):
                    self._become(LinkState.LOST)
                    self._fail_all(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _connect(self, *, expect: str = "") -> None:
        self._lost.clear()
        self._has_catalog.clear()
        self._handshake = self._loop.create_future()
        address, options = self.address, self.options
        connection = self._connection = Connection(
            lambda frame: self._on_frame(connection, frame),
            lambda error: self._on_lost(connection, error),
            parts_bytes_max=PARTS_BYTES_MAX,
        )
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                if address.path:
                    await self._loop.create_unix_connection(lambda: connection, address.path)
                else:
                    tls = (options.tls or ssl.create_default_context()) if address.tls else None
                    await self._loop.create_connection(lambda: connection, address.host, address.port, ssl=tls)
                hello = Hello(VERSIONS, self.client_id, options.name, options.token)
                connection.send(FrameKind.HELLO, 0, hello)
                frame = await self._handshake
                if frame.kind == FrameKind.ERROR:
                    raise error_from_wire(frame.value(WireError))
                welcome: Welcome = frame.value(Welcome)
                if expect and welcome.node_id != expect:
                    raise InvalidArgument(
                        f"at {address} is node {welcome.node_id} now, it was {expect} — open another connection for that one"
                    )
                self.welcome = welcome
                await self._has_catalog.wait()
                if self._lost.is_set():
                    raise Unreachable(f"the node at {address} closed the connection: {self._reason}")
        except StreamingNodeError:
            self._close_connection()
            raise
        except (OSError, ssl.SSLError, TimeoutError) as error:
            self._close_connection()
            what = str(error) or f"no answer within {CONNECT_S_MAX:g} s"
            raise Unreachable(f"no node answers at {address}: {what}") from error
        except BaseException:
            self._close_connection()
            raise
        self.connections += 1

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _become(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"{state} after {self.state}"
        self.state, self._is_leaving = state, False
        if state is not LinkState.CONNECTING:
            self._ready.set()
        self.on_state(state)

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        if connection is not self._connection:  # one that was given up before
            return
        self._reason = error
        self._lost.set()
        if self._handshake is not None and not self._handshake.done():
            if not isinstance(error, StreamingNodeError):
                error = Unreachable(f"the node at {self.address} closed the connection at once")
            self._handshake.set_exception(error)
            self._handshake.exception()  # heard, if nobody waits any more
        elif self._has_catalog is not None:
            self._has_catalog.set()  # whoever waits for it finds the connection lost

    async def close(self) -> None:
        """Say goodbye, and fail what is still waiting; idempotent."""
        if self.state is not LinkState.CLOSED:
            self._become(LinkState.CLOSED)
            if self._connection is not None:
                self._connection.send(FrameKind.LEAVING)
            self._close_connection()
            self._fail_all(OnShutdown("the client is closed — connect again"))

    async def drain(self, grace_s: float | None = None) -> None:
        """Return when every write that was sent was answered, or after so many seconds."""
        if pending := [each.ended for each in self._writes.values()]:
            await asyncio.wait(pending, timeout=grace_s)

    # --- what is sent ---------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """Return the number of the next call, stream or frame of writes."""
        self._numbers += 1
        return self._numbers

    async def wait_ready(self) -> None:
        """Return while there is a connection. Raises `Unreachable` when it did not come back, `OnShutdown` after the end."""
        while self.state is not LinkState.READY or self._is_leaving:
            if self.state is LinkState.CLOSED:
                raise OnShutdown("the client is closed — connect again")
            if self.state is LinkState.LOST:
                raise Unreachable(f"no node answers at {self.address}: {self._reason}") from self._reason
            await self._ready.wait()

    async def call(self, name: str, request: object, reply: Any, *, repeats: bool, changes: bool) -> Any:
        """Return the answer to a call, over as many connections as it takes. Cancelling it cancels it at the node.

        Raises `TooLarge` for a request over a frame, and `Indeterminate` when it `changes` something, perhaps.
        """
        await self.wait_ready()
        number, pending = self.number(), _Pending(name, encode(request), repeats=repeats, changes=changes)
        if len(pending.payload) > REQUEST_BYTES_MAX:
            raise TooLarge(f"a request of {len(pending.payload)} bytes, {REQUEST_BYTES_MAX} fit — send less at a time")
        self._calls[number] = pending
        try:
            self._send_call(number, pending)
            frame = await pending.reply
        except asyncio.CancelledError:
            self._send(FrameKind.CANCEL, number)
            raise
        finally:
            self._calls.pop(number, None)
        return decode(frame.payload, reply)

    def call_of(self, name: str, *arguments: object) -> Awaitable[Any]:
        """Make a call of the table."""
        call = CALLS[name]
        return self.call(name, call.request(*arguments), call.reply, repeats=call.repeats, changes=call.changes)

    async def send_writes(self, number: int, frame: FrameOfWrites, on_sent: Callable[[], None]) -> None:
        """Send a frame of writes and return when each of its units was told; cancelling it cancels what was not begun."""
        await self.wait_ready()
        while self._writes and self._writes_bytes + frame.size_bytes > self.welcome.write_bytes_max:
            self._answered.clear()
            await self._answered.wait()
            await self.wait_ready()
        pending = self._writes[number] = _PendingWrites(frame)
        self._writes_bytes += frame.size_bytes
        on_sent()
        self._send_writes(pending)
        try:
            await asyncio.shield(pending.ended)
        except asyncio.CancelledError:
            self._send(FrameKind.CANCEL, number)
            raise
        finally:
            del self._writes[number]
            self._writes_bytes -= frame.size_bytes
            self._answered.set()

    def open_stream(self, request: object, name: str, on_frame: Callable[[Frame | None], None]) -> int:
        """Open a stream and return its number; `on_frame` is told of its frames, and of None when the connection is lost."""
        number = self.number()
        self._streams[number] = on_frame
        self._send(FrameKind.CALL, number, name, encode(request))
        return number

    def close_stream(self, number: int) -> None:
        """End a stream; idempotent."""
        if self._streams.pop(number, None) is not None:
            self._send(FrameKind.END, number)

    def hold(self, place: Place) -> None:
        """Have the node keep the place of a write that is not sent yet, for as long as something refers to it here."""
        number, stamp = self.number(), place.stamp
        self._held[number] = (stamp.producer_id, stamp.epoch, stamp.sequence)
        self._send(FrameKind.HOLD, number, self._held[number])
        weakref.finalize(place, self._release_later, number).atexit = False

    def _release_later(self, number: int) -> None:
        with suppress(RuntimeError):  # in whatever thread garbage is collected, also after the event loop
            self._loop.call_soon_threadsafe(self._release, number)

    def _release(self, number: int) -> None:
        if self._held.pop(number, None) is not None:
            self._send(FrameKind.END, number)

    def grant(self, number: int, size_bytes: int) -> None:
        """Let a stream send so much more."""
        self._send(FrameKind.CREDIT, number, size_bytes)

    def _send(self, kind: FrameKind, number: int, meta: object = None, payload: bytes = b"") -> None:
        if self.state is LinkState.READY and self._connection is not None:
            self._connection.send(kind, number, meta, payload)

    def _send_call(self, number: int, pending: _Pending) -> None:
        pending.sent += 1
        self._send(FrameKind.CALL, number, pending.name, pending.payload)

    def _send_writes(self, pending: _PendingWrites) -> None:
        pending.sent += 1
        if self._connection is not None:
            self._connection.send_encoded(pending.frame.parts)

    # --- what comes back ------------------------------------------------------------------------------------------------

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if connection is not self._connection:
            return
        if self._handshake is not None and not self._handshake.done():
            self._shake_hands(self._handshake, frame)
            return
        match frame.kind:
            case FrameKind.RESULTS:
                self._on_results(frame)
            case FrameKind.MESSAGES | FrameKind.OPENED:
                if (on_frame := self._streams.get(frame.number)) is not None:
                    on_frame(frame)
            case FrameKind.REPLY | FrameKind.ERROR:
                self._on_reply(frame)
            case FrameKind.CATALOG:
                self._on_catalog(decode(frame.payload, tuple[CollectionInfo, ...]))
                self._has_catalog.set()
            case FrameKind.LEAVING:
                self._is_leaving = True  # the node answers what it has, and nothing more is begun over this connection
                self._ready.clear()
            case _:
                pass  # of a later version

    def _shake_hands(self, handshake: asyncio.Future[Frame], frame: Frame) -> None:
        if frame.kind == FrameKind.WELCOME and self._connection is not None:
            self._connection.agreed()
            handshake.set_result(frame)
        elif frame.kind == FrameKind.ERROR:
            handshake.set_result(frame)

    def _on_results(self, frame: Frame) -> None:
        try:
            results, failures = _decode_results(frame.payload)
        except msgspec.DecodeError as wrong:
            raise ProtocolError(f"results do not decode: {wrong}") from wrong
        kind = message_id_kind(self.welcome.wal_name)
        for result in results:
            self._settle(result.frame, result.group, result.result(kind))
        for number, index, failure in failures:
            self._settle(number, index, error_from_wire(failure))

    def _settle(self, number: int, index: int, outcome: Any) -> None:
        pending = self._writes.get(number)
        if pending is None or index not in pending.left:  # its callers are gone, or were told
            return
        pending.left.discard(index)
        if pending.sent > 1 and isinstance(outcome, StreamingNodeError):
            # What refuses it now may not know of the first try, which may be in the log.
            outcome = in_doubt(Indeterminate(f"a write that was sent again is refused: {outcome.happened}"), outcome)
        pending.frame.units[index].settle(outcome)
        if not pending.left and not pending.ended.done():
            pending.ended.set_result(None)

    def _on_reply(self, frame: Frame) -> None:
        if (on_frame := self._streams.get(frame.number)) is not None:
            on_frame(frame)
        elif (pending := self._calls.get(frame.number)) is None or pending.reply.done():
            pass  # its caller is gone
        elif frame.kind == FrameKind.ERROR:
            error = error_from_wire(frame.value(WireError))
            if pending.sent > 1 and pending.changes and not error.decides:
                error = in_doubt(
                    Indeterminate(f"{pending.name} was sent again and is refused: {error.happened}"), error
                )
            pending.reply.set_exception(error)
        else:
            pending.reply.set_result(frame)

    # --- a lost connection ----------------------------------------------------------------------------------------------

    def _drop_unrepeatable(self) -> None:
        """Tell what cannot be asked again that the connection is lost, and streams, which are opened again."""
        for pending in list(self._calls.values()):
            if not pending.repeats and not pending.reply.done():
                pending.reply.set_exception(self._lost_call(pending))
        streams, self._streams = self._streams, {}
        for on_frame in streams.values():
            on_frame(None)

    def _lost_call(self, pending: _Pending) -> Indeterminate:
        return Indeterminate(f"the connection to {self.address} was lost before {pending.name} was answered")

    def _send_again(self) -> None:
        for number, held in self._held.items():  # first: what is sent again may be among them
            self._send(FrameKind.HOLD, number, held)
        for number, pending in self._calls.items():
            if not pending.reply.done():
                self._send_call(number, pending)
        for writes in self._writes.values():
            self._send_writes(writes)

    def _fail_all(self, error: StreamingNodeError) -> None:
        """Tell everybody who waits that the connection is gone for good."""
        for pending in list(self._calls.values()):
            if not pending.reply.done():
                pending.reply.set_exception(self._lost_call(pending) if pending.changes else _lost_error(error))
                pending.reply.exception()
        for writes in list(self._writes.values()):
            doubt = Indeterminate(
                f"the connection to {self.address} was lost before a write was answered: {error.happened}"
            )
            for index in list(writes.left):
                writes.frame.units[index].settle(doubt)
            writes.left.clear()
            if not writes.ended.done():
                writes.ended.set_result(None)
        self._answered.set()
        self._ready.set()
        streams, self._streams = self._streams, {}
        for on_frame in streams.values():
            on_frame(None)


def _lost_error(error: StreamingNodeError) -> StreamingNodeError:
    return type(error)(error.args[0]) if isinstance(error, (OnShutdown, Unreachable)) else error
