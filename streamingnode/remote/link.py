"""The client's side of a connection: it reconnects after a loss and keeps the requests that wait
for replies.

Unanswered requests are sent again over the next connection. The node keeps the reply to each change
under the number of its call, so a repeated change gets its first reply. A restart of the node loses
these replies; then the outcome of an unanswered change is unknown. Writes, commits and changes of
collections carry stamps that are in the log, so they are safe to send again after a restart, too.
"""

import asyncio
import secrets
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import astuple

from interceptors.shard.catalog import CollectionInfo
from streamingnode.errors import Overloaded, Unauthenticated, Unreachable
from streamingnode.remote import calls
from streamingnode.remote.calls import Access, Call, WireResults
from streamingnode.remote.connection import Connection
from streamingnode.remote.writes import FrameOfWrites, Unit
from wal.address import (
    CONNECT_S_MAX,
    PING_S,
    SILENT_S_MAX,
    Address,
    LinkOptions,
    unreachable,
)
from wal.append import in_doubt
from wal.errors import (
    Indeterminate,
    InvalidArgument,
    OnShutdown,
    ProtocolError,
    StreamingNodeError,
    TooLarge,
)
from wal.frames import Frame, FrameKind, encode_frame
from wal.position import CLIENT_PRODUCER_IDS
from wal.queue import Signal
from wal.runtime import elapsed_ms, event_log, in_thread
from wal.wire_types import VERSIONS, Hello, Welcome, WireError, decode, encode

_log = event_log(__name__)

GIVE_UP_S_MAX = 300.0
"""The longest time that calls wait for a lost connection; a node remembers a client's writes for
twice as long.
"""
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 1.0
"""The pause between attempts to reconnect: it doubles from the first value to the second."""
UNWANTED_MAX = 1_024
"""The number of calls of one client that a node allows at a time."""
PARTS_BYTES_MAX = 4 << 30
"""Limit for incomplete long replies. It is high because this side has requested them."""


class LinkState(Enum):
    """The state of the connection."""

    CONNECTING = auto()
    """Connecting for the first time, or again after a loss: calls wait."""
    READY = auto()
    LOST = auto()
    """Reconnecting took too long: calls are refused until it succeeds."""
    CLOSED = auto()


TRANSITIONS = {
    LinkState.CONNECTING: {LinkState.READY, LinkState.LOST, LinkState.CLOSED},
    LinkState.READY: {LinkState.CONNECTING, LinkState.CLOSED},
    LinkState.LOST: {LinkState.READY, LinkState.CLOSED},
    LinkState.CLOSED: set[LinkState](),
}


class _Sent(msgspec.Struct, eq=False):
    """An unanswered call, or a frame of writes with `units` that have no result yet. `ended`
    completes with the reply, or once every unit has a result.
    """

    parts: list[bytes | memoryview]
    ended: asyncio.Future[Frame | None]
    call: Call = calls.WRITE
    units: dict[int, Unit] = {}
    is_stamped: bool = True
    """Whether the log recognizes it when it is sent again, even after a restart of the node."""
    first_sent_s: float | None = None
    """When it was first sent, by a clock that also advances while the machine sleeps."""
    memory: int = 0
    """The `Welcome.memory` of the node that it was last sent to: it identifies that node's memory
    of the client's changes.
    """
    is_in_doubt: bool = False
    """Whether its outcome stays unknown after a refusal: it was sent before, and the node has no
    reply of that attempt and answers from the log.
    """

    @property
    def has_number(self) -> bool:
        """Whether the node keeps the reply under its number."""
        return self.call.changes and self.call is not calls.WRITE

    def is_known_to(self, welcome: Welcome) -> bool:
        """Whether the node still has the reply that it gave to this number."""
        return self.has_number and 0 != self.memory == welcome.memory

    def end(self, frame: Frame | None) -> None:
        """Complete it with a reply; later calls have no effect."""
        if not self.ended.done():
            self.ended.set_result(frame)

    def fail(self, error: StreamingNodeError) -> None:
        """Fail the caller and all units that have no result."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved: the caller may be gone
        for unit in self.units.values():
            unit.settle(error)
        self.units.clear()


class Link:
    """A client's connection to a node; it reconnects after a loss. Call `open` first; the owner
    runs `run` as a task.
    """

    def __init__(
        self,
        address: Address,
        options: LinkOptions,
        on_catalog: Callable[[tuple[CollectionInfo, ...]], None],
    ) -> None:
        self.address = address
        self.options = options
        self.client_id = CLIENT_PRODUCER_IDS | secrets.randbits(62)
        self.state = LinkState.CONNECTING
        self.welcome: Welcome
        self.connections = 0
        """The number of connections made so far. Streams end with the connection they were opened
        on.
        """
        self._attempts = 0
        """The number of hellos sent, answered or not."""
        self.on_state: Callable[[LinkState], None] = lambda _: None
        """Called on each change of state, before anything is sent in that state, and when the node
        announces that it is leaving.
        """
        self._on_catalog = on_catalog
        self._loop = asyncio.get_running_loop()
        self._node_id = ""
        """The id of the node that this link is for; empty until it is known."""
        self._connection: Connection | None = None
        self._numbers = 0
        self._sent: dict[int, _Sent] = {}
        """Unanswered calls and frames of writes, by number."""
        self._writes_bytes = 0
        self._streams: dict[int, Callable[[Frame | None], None]] = {}
        self._changes: dict[int, None] = {}
        """Numbers of unanswered changes, ascending."""
        self._unwanted = deque[int](maxlen=UNWANTED_MAX)
        """Numbers of changes whose caller has left. They are cancelled again over the next
        connection, because the node may not have read the first cancel.
        """
        self._lost_at: float | None = None
        """When the connection was lost; None once a later connection has delivered a reply or has
        lasted for `PING_S`.
        """
        self._welcomed: asyncio.Future[None]
        """Completes when the welcome and the catalog of the node have arrived."""
        self._lost: asyncio.Future[None]
        self._moved = Signal()
        """Woken when the state changes and when a frame of writes is answered."""
        self.is_leaving = False
        self._reason: Exception | None = None

    # --- connecting -------------------------------------------------------------------------------

    async def open(self, known: Welcome | None = None) -> None:
        """Connect. With the welcome of a `known` node, an unreachable or full node is no error:
        `run` connects later. Raises `Unreachable`, `Unauthenticated`, `ProtocolError`.
        """
        try:
            if known is not None:
                self.welcome = known
                self._node_id = known.node_id
            await self._connect()
            self._become(LinkState.READY)
        # `Overloaded`: the node is at its limit of connections
        except (Unreachable, Overloaded) as error:
            if known is None:
                raise
            self._reason = error
            self._become(LinkState.LOST)

    async def run(self) -> None:
        """Reconnect whenever the connection is lost, until cancelled."""
        while True:
            if self.state is LinkState.READY:
                await self._stay_connected()
                self._become(LinkState.CONNECTING)
                _log.warning(
                    "connection_lost",
                    address=str(self.address),
                    error=str(self._reason or "closed by the node"),
                )
                self._lost_at = self._lost_at or self._loop.time()
                self._end_streams()
            # A node that closes each connection at once must not cause a busy loop.
            await asyncio.sleep(PAUSE_FIRST_S)
            await self._connect_again()
            self._fail_what_is_not_repeated()
            self._become(LinkState.READY)
            for number in self._unwanted:
                self.send(FrameKind.CANCEL, number)
            self._unwanted.clear()
            for sent in self._sent.values():
                self._transmit(sent)

    async def _stay_connected(self) -> None:
        """Return when the connection is lost. Pings the node and aborts a silent connection."""
        while not self._lost.done() and (connection := self._connection) is not None:
            asked_at = self._loop.time()
            if not (await asyncio.wait((self._lost,), timeout=PING_S))[0]:
                self._lost_at = None
            quiet_s = self._loop.time() - connection.received_at
            # This process stood still, and received data may still be unread.
            stood_still = self._loop.time() - asked_at > 2 * PING_S
            if quiet_s > SILENT_S_MAX and not stood_still:
                connection.abort(
                    Unreachable(f"the node at {self.address} was silent for {SILENT_S_MAX:g} s")
                )
            else:
                # Also while frames arrive: the node drops a client that only reads otherwise.
                connection.send(FrameKind.PING)

    async def _connect_again(self) -> None:
        give_up_at = self._loop.time() + min(self.options.give_up_s, GIVE_UP_S_MAX)
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return await self._connect()
            except StreamingNodeError as error:
                self._reason = error
                is_final = isinstance(error, (Unauthenticated, InvalidArgument))
                if self.state is LinkState.CONNECTING and (
                    is_final or self._loop.time() >= give_up_at
                ):
                    self._become(LinkState.LOST)
                    self._fail_all(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _connect(self) -> None:
        address = self.address
        options = self.options
        token = options.token
        if isinstance(token, Path):
            token = await in_thread(options.read_token)
        self._welcomed = self._loop.create_future()
        self._lost = self._loop.create_future()
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
                    await self._loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=tls
                    )
                self._attempts += 1
                hello = Hello(VERSIONS, self.client_id, options.name, token, self._attempts)
                connection.send(FrameKind.HELLO, 0, hello)
                await self._welcomed
        except BaseException as error:
            await self._close_connection()
            if isinstance(error, OSError):  # includes errors of TLS and the timeout
                raise unreachable(address, error) from error
            raise
        self.connections += 1

    async def _close_connection(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            await connection.end()

    def _become(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"{state} after {self.state}"
        self.state = state
        self.is_leaving = False
        self._moved.wake()
        self.on_state(state)

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        if connection is not self._connection:  # the loss of an earlier connection
            return
        self._reason = error
        self._lost.set_result(None)
        if not isinstance(error, StreamingNodeError):
            error = Unreachable(f"the node at {self.address} closed the connection at once")
        self._refused(error)

    def _refused(self, error: StreamingNodeError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
            self._welcomed.exception()  # marks it as retrieved: the caller may be gone

    async def close(self) -> None:
        """Fail everything that is unanswered, and close the connection; idempotent."""
        if self.state is not LinkState.CLOSED:
            self._become(LinkState.CLOSED)
            self._fail_all(self._refusal())
            self._end_streams()
            await self._close_connection()

    async def drain(self, *accesses: Access) -> None:
        """Return when no request that needs one of these rights is unanswered, including requests
        sent while this waits.
        """
        while pending := [
            each.ended for each in self._sent.values() if each.call.access in accesses
        ]:
            await asyncio.wait(pending)
            await asyncio.sleep(0)  # callers that waited for these send their requests now

    # --- what is sent -----------------------------------------------------------------------------

    def number(self) -> int:
        """Return a new number, for a call, stream or frame of writes; numbers ascend."""
        self._numbers += 1
        return self._numbers

    async def wait_ready(self) -> None:
        """Wait until the connection is ready. Raises `Unreachable` or `Unauthenticated` when
        reconnecting has failed, `OnShutdown` after `close`.
        """
        while self.state is not LinkState.READY or self.is_leaving:
            if self.state in {LinkState.LOST, LinkState.CLOSED}:
                raise self._refusal() from self._reason
            await self._moved.wait()

    def _refusal(self) -> StreamingNodeError:
        if self.state is LinkState.CLOSED:
            return OnShutdown("the client is closed — connect again")
        if isinstance(reason := self._reason, Unreachable | Unauthenticated):
            # a new object: each raise adds frames to its traceback
            return type(reason)(str(reason))
        return Unreachable(f"no node answers at {self.address}: {self._reason}")

    async def call(self, call: Call, request: msgspec.Struct, *, is_stamped: bool = False) -> Any:
        """Return the reply to a call, reconnecting as needed. Cancelling this cancels the call at
        the node. The log recognizes a repeated call that `is_stamped`, even after a restart of the
        node.

        Raises `InvalidArgument` for arguments that the call does not take, `TooLarge` for arguments
        that exceed a frame, and `Indeterminate` when a change may or may not have happened.
        """
        try:
            msgspec.convert(astuple(request), call.request)
            arguments = encode(request)
        except (ValueError, OverflowError, NotImplementedError) as error:
            raise InvalidArgument(f"{call.name}: {error} — pass what the method takes") from error
        await self.wait_ready()
        # no await between here and sending, so that the numbers of changes ascend
        number = self.number()
        try:
            parts = encode_frame(FrameKind.CALL, number, call.name, arguments)
        except ProtocolError as error:
            raise TooLarge(str(error)) from error
        sent = _Sent(parts, self._loop.create_future(), call, is_stamped=is_stamped)
        frame = await self._answer(number, sent)
        assert frame is not None, "a call has a reply"
        return decode(frame.payload, call.reply)

    def call_of(self, name: str, *arguments: object, **options: object) -> Awaitable[Any]:
        """Make the call of the table that has this name."""
        call = calls.CALLS[name]
        return self.call(call, call.request(*arguments, **options), is_stamped="stamp" in options)

    async def send_writes(self, number: int, frame: FrameOfWrites) -> None:
        """Send a frame of writes and return when each of its units has its outcome. Cancelling this
        cancels the writes that have not begun.

        Raises `Unreachable` and `OnShutdown` only while it waits for room; then the frame was not
        sent.
        """
        await self.wait_ready()
        while (
            self._writes_bytes
            and self._writes_bytes + frame.size_bytes > self.welcome.write_bytes_max
        ):
            await self._moved.wait()
            await self.wait_ready()
        self._writes_bytes += frame.size_bytes
        try:
            sent = _Sent(
                frame.parts, self._loop.create_future(), units=dict(enumerate(frame.units))
            )
            await self._answer(number, sent)
        finally:
            self._writes_bytes -= frame.size_bytes
            self._moved.wake()

    async def _answer(self, number: int, sent: _Sent) -> Frame | None:
        self._sent[number] = sent
        if sent.has_number:
            self._changes[number] = None
            self.send(FrameKind.SETTLED, next(iter(self._changes)))
        self._transmit(sent)
        try:
            return await sent.ended
        except asyncio.CancelledError:
            if sent.has_number:
                self._unwanted.append(number)
            self.send(FrameKind.CANCEL, number)
            raise
        finally:
            del self._sent[number]
            self._changes.pop(number, None)

    def _transmit(self, sent: _Sent) -> None:
        # Its caller has an outcome and has only not resumed yet. The node may already have
        # forgotten it, so do not send it again.
        if sent.ended.done():
            return
        if (
            self.state is LinkState.READY
            and self._connection is not None
            and self._connection.is_open
        ):
            if sent.first_sent_s is None:
                sent.first_sent_s = elapsed_ms() / 1000
            elif sent.is_stamped and not sent.is_known_to(self.welcome):
                sent.is_in_doubt = True
            sent.memory = self.welcome.memory
            self._connection.send_encoded(sent.parts)

    def send(self, kind: FrameKind, number: int, meta: object = None, payload: bytes = b"") -> None:
        """Send a frame of a call or stream; does nothing while there is no connection."""
        if self.state is LinkState.READY and self._connection is not None:
            self._connection.send(kind, number, meta, payload)

    def open_stream(
        self, request: object, name: str, on_frame: Callable[[Frame | None], None]
    ) -> int:
        """Open a stream and return its number; `on_frame` gets each of its frames, and None when
        the connection is lost.
        """
        number = self.number()
        self._streams[number] = on_frame
        self.send(FrameKind.CALL, number, name, encode(request))
        return number

    def end(self, number: int) -> None:
        """End a stream; idempotent."""
        if self._streams.pop(number, None) is not None:
            self.send(FrameKind.END, number)

    # --- what comes back --------------------------------------------------------------------------

    def _on_frame(self, connection: Connection, frame: Frame) -> None:
        if connection is not self._connection:
            return
        if not connection.has_agreed:
            self._shake_hands(connection, frame)
            return
        match frame.kind:
            case FrameKind.CATALOG:
                self._on_catalog(decode(frame.payload, tuple[CollectionInfo, ...]))
                if not self._welcomed.done():
                    self._welcomed.set_result(None)
            case FrameKind.RESULTS:
                self._on_results(frame)
            case FrameKind.MESSAGES | FrameKind.OPENED | FrameKind.ERROR if (
                frame.number in self._streams
            ):
                self._streams[frame.number](frame)
            # number 0: the error concerns the connection, which ends
            case FrameKind.ERROR if not frame.number:
                connection.abort(frame.value(WireError).error())
            case FrameKind.REPLY | FrameKind.ERROR:
                self._on_reply(frame)
            case FrameKind.LEAVING:
                # The node answers the requests that it has; nothing new is sent over this
                # connection.
                self.is_leaving = True
                self.on_state(self.state)
            case _:
                pass  # a kind of a later version

    def _shake_hands(self, connection: Connection, frame: Frame) -> None:
        if frame.kind == FrameKind.ERROR:
            self._refused(frame.value(WireError).error())
        elif frame.kind == FrameKind.WELCOME:
            welcome: Welcome = frame.value(Welcome)
            if self._node_id in {"", welcome.node_id}:
                self.welcome = welcome
                self._node_id = welcome.node_id
                connection.agreed()
            else:
                now = f"at {self.address} is node {welcome.node_id} now, it was {self._node_id}"
                self._refused(InvalidArgument(f"{now} — open another connection for that one"))

    def _on_results(self, frame: Frame) -> None:
        self._lost_at = None
        results, failures = decode(frame.payload, WireResults)
        for number, index, result in results:
            self._settle(number, index, result)
        for number, index, failure in failures:
            self._settle(number, index, failure.error())

    def _settle(self, number: int, index: int, outcome: Any) -> None:
        sent = self._sent.get(number)
        # its callers are gone or have their outcome
        if sent is None or (unit := sent.units.pop(index, None)) is None:
            return
        # Complete the frame first: its sender records the outcome before a caller of one of its
        # writes resumes.
        if not sent.units:
            sent.end(None)
        unit.settle(
            self._doubted(sent, outcome) if isinstance(outcome, StreamingNodeError) else outcome
        )

    def _on_reply(self, frame: Frame) -> None:
        sent = self._sent.get(frame.number)
        if sent is None or sent.call is calls.WRITE:
            return  # its caller is gone
        self._lost_at = None
        if frame.kind == FrameKind.REPLY:
            sent.end(frame)
        else:
            sent.fail(self._doubted(sent, frame.value(WireError).error()))

    def _doubted(self, sent: _Sent, error: StreamingNodeError) -> StreamingNodeError:
        """Return the error to raise for a refused attempt: `Indeterminate` when an earlier attempt
        may be in the log without this refusal taking it into account.
        """
        if not sent.is_in_doubt or (sent.has_number and error.decides):
            return error
        return in_doubt(
            Indeterminate(f"{sent.call.name} was sent again and is refused: {error.happened}"),
            error,
        )

    # --- a lost connection ------------------------------------------------------------------------

    def _fail_what_is_not_repeated(self) -> None:
        """Fail requests that must not be sent again, and those for which reconnecting brings no
        reply: no connection lasts long enough.
        """
        now_s = elapsed_ms() / 1000
        lost_at = self._loop.time() if self._lost_at is None else self._lost_at
        is_futile = self._loop.time() - lost_at > self.options.give_up_s
        for number, sent in list(self._sent.items()):
            if sent.first_sent_s is None:
                continue
            repeats = not sent.call.changes or sent.is_stamped
            # the log may soon forget its stamp
            is_late = sent.is_stamped and now_s - sent.first_sent_s > GIVE_UP_S_MAX
            if is_futile or is_late or not (repeats or sent.is_known_to(self.welcome)):
                self._fail_sent(number, sent)

    def _fail_all(self, error: StreamingNodeError) -> None:
        """Fail all requests: the link has stopped waiting for a connection."""
        for number, sent in list(self._sent.items()):
            if sent.call.changes and sent.first_sent_s is not None:
                self._fail_sent(number, sent, f": {error.happened}")
            else:
                sent.fail(error)

    def _fail_sent(self, number: int, sent: _Sent, why: str = "") -> None:
        """Fail a request that was sent and not answered."""
        lost = f"the connection to {self.address} was lost before {sent.call.name} was answered"
        if sent.call.changes:
            sent.fail(Indeterminate(lost + why))
            self._unwanted.append(number)
        else:
            sent.fail(Unreachable(f"{lost}{why} — see the log of the node for why"))

    def _end_streams(self) -> None:
        """End all streams; their readers open new ones."""
        streams = self._streams
        self._streams = {}
        for on_frame in streams.values():
            on_frame(None)
