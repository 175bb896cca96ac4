"""A blocking client of a node, for programs without an event loop: one connection, one call at a
time.

It loads neither the log store nor anyio nor asyncio, so a Spark driver or executor may use it. It
supports the handshake, calls and replies only; use `streamingnode.connect` for streams and writes.
"""

import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self

from wal.address import (
    CONNECT_S_MAX,
    PING_S,
    SILENT_S_MAX,
    Address,
    LinkOptions,
    unreachable,
)
from wal.errors import DeadlineExceeded, Indeterminate, OnShutdown, ProtocolError
from wal.frames import (
    FRAME_BYTES_MAX,
    PREFACE,
    Frame,
    FrameKind,
    FrameReader,
    LongFrames,
    encode_frame,
)
from wal.position import CLIENT_PRODUCER_IDS
from wal.wire_types import VERSIONS, Hello, Welcome, WireError, decode, encode

REPLY_BYTES_MAX = 1 << 30
"""The largest reply, all parts together."""


class WireClient:
    """A connection to a node, open until `close`; for one thread at a time.

    It does not reconnect: after a loss, each call raises. A node ends a connection that is silent
    for 20 s, so open one for the work at hand.
    """

    welcome: Welcome
    """Identity, settings and limits of the node."""

    def __init__(self, address: Address, options: LinkOptions | None = None) -> None:
        """Connect to the node and complete the handshake.

        Raises `Unreachable`, `Unauthenticated`, `Overloaded` at the node's limit of connections,
        and `ProtocolError` when something else or a node of another version answers.
        """
        options = options or LinkOptions()
        self.address = address
        self._reader = FrameReader()
        self._long_frames = LongFrames()
        self._frames = deque[Frame]()
        self._numbers = count(1)
        self._is_open = True
        self._heard_at = time.monotonic()
        until = self._heard_at + CONNECT_S_MAX
        token = options.read_token()
        try:
            self._socket = _connect(address, options.tls)
        except OSError as error:
            raise unreachable(address, error) from error
        try:
            self._greet(options.name, token, until)
        except OSError as error:
            self.close()
            raise unreachable(address, error) from error
        except BaseException:
            self.close()
            raise

    def call(
        self, name: str, arguments: Sequence[object] = (), reply: Any = Any, *, timeout: float
    ) -> Any:
        """Return the node's reply to a call, as a value of the type `reply`.

        docs/protocol.md lists the calls. Raises the error that the node replies with,
        `DeadlineExceeded` after `timeout` seconds, and `Indeterminate` when the connection is lost,
        or ended by the node, before the reply: then the call may have taken effect.
        """
        if not self._is_open:
            raise OnShutdown(f"the connection to {self.address} is closed — connect again")
        number = next(self._numbers)
        self._heard_at = time.monotonic()
        until = self._heard_at + timeout
        try:
            self._send(FrameKind.CALL, number, name, encode(arguments))
            frame = self._receive(until)
            while frame is not None and not _answers(frame, number):
                frame = self._receive(until)
            if frame is None:
                self._send(FrameKind.CANCEL, number)
        except OSError as error:
            self.close()
            raise Indeterminate(
                f"the connection to {self.address} was lost before the answer to {name}: {error} — "
                "connect again, and check whether the call took effect"
            ) from error
        except ProtocolError:
            self.close()
            raise
        if frame is None:
            raise DeadlineExceeded(
                f"{name} had no answer from {self.address} within {timeout:g} s — "
                "check whether it took effect, or allow more time"
            )
        if frame.kind == FrameKind.ERROR:
            refusal = frame.value(WireError).error()
            if not frame.number:  # of the connection: it says nothing of the call
                self.close()
                raise Indeterminate(
                    f"{self.address} ended the connection before the answer to {name}: "
                    f"{refusal.happened} — connect again, and look whether the call took effect"
                ) from refusal
            raise refusal
        return decode(frame.payload, reply)

    def close(self) -> None:
        """Close the connection; the node cancels a running call. Idempotent."""
        self._is_open = False
        self._reader.drop()
        self._long_frames.drop()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _greet(self, name: str, token: str, until: float) -> None:
        client_id = CLIENT_PRODUCER_IDS | secrets.randbits(62)
        hello = encode_frame(FrameKind.HELLO, 0, Hello(VERSIONS, client_id, name, token))
        self._socket.sendall(b"".join([PREFACE, *hello]))
        frame = self._receive(until)
        if frame is None:
            raise TimeoutError
        if frame.kind == FrameKind.ERROR:
            raise frame.value(WireError).error()
        if frame.kind != FrameKind.WELCOME:
            raise ProtocolError(f"a frame of kind {frame.kind} in place of a welcome")
        self.welcome = frame.value(Welcome)

    def _send(
        self, kind: FrameKind, number: int = 0, meta: object = None, *payload: bytes | memoryview
    ) -> None:
        self._socket.settimeout(SILENT_S_MAX)
        self._socket.sendall(b"".join(encode_frame(kind, number, meta, *payload)))

    def _receive(self, until: float) -> Frame | None:
        """Return the next complete frame; None at `until`, by the monotonic clock.

        Raises `OSError` for a lost connection or a silent node, and `ProtocolError`.
        """
        while not self._frames:
            now = time.monotonic()
            if now >= until:
                return None
            if now - self._heard_at > SILENT_S_MAX:
                raise ConnectionError(f"the node was silent for {SILENT_S_MAX:g} s")
            self._socket.settimeout(min(until - now, PING_S))
            try:
                size_bytes = self._socket.recv_into(self._reader.room())
            except TimeoutError:
                if time.monotonic() < until:
                    self._send(FrameKind.PING)
                continue
            if not size_bytes:
                raise ConnectionError("the node closed the connection")
            self._heard_at = time.monotonic()
            self._take(size_bytes)
        return self._frames.popleft()

    def _take(self, size_bytes: int) -> None:
        for frame in self._reader.received(size_bytes):
            whole = self._long_frames.whole(frame)
            if whole is not None:
                self._frames.append(whole)
            if frame.kind == FrameKind.WELCOME:  # frames of full size and long frames may follow
                self._reader.frame_bytes_max = FRAME_BYTES_MAX
                self._long_frames.bytes_max = REPLY_BYTES_MAX


def _connect(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    if not address.path:
        connected = socket.create_connection((address.host, address.port), CONNECT_S_MAX)
        if not address.tls:
            return connected
        with connected:  # closes the socket unless it is wrapped; the wrapping socket takes it over
            context = tls or ssl.create_default_context()
            return context.wrap_socket(connected, server_hostname=address.host)
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(CONNECT_S_MAX)
        connected.connect(address.path)
    except BaseException:
        connected.close()
        raise
    return connected


def _answers(frame: Frame, number: int) -> bool:
    """Return whether a frame ends the call: its reply, its error, or an error of the connection."""
    if frame.kind == FrameKind.ERROR:
        return frame.number in {0, number}
    return frame.kind == FrameKind.REPLY and frame.number == number
