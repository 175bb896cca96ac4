"""The blocking client: what a node answers reaches a program without an event loop, and so does its
end.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    Indeterminate,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    ProtocolError,
    Unreachable,
)
from wal import address as address_module
from wal import wire
from wal.address import Address, LinkOptions, parse_address
from wal.frames import FRAME_BYTES_MAX, PREFACE, Frame, FrameKind, FrameReader, encode_frame
from wal.wire import WireClient
from wal.wire_types import Welcome, WireError, encode

SCHEMA = pa.schema([pa.field("id", pa.int64())]).append(pa.field("text", pa.string()))


def test_neither_the_log_store_nor_an_event_loop_is_loaded_with_it() -> None:
    program = """
import sys
import wal.wire
heavy = {"anyio", "asyncio", "rocksdict", "streamingnode", "interceptors"}
print(sorted(heavy.intersection(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- a node ---------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Iterator[sn.sync.SyncNode]:
    with sn.sync.open_node(tmp_path / "data", cut_interval_s=None) as opened:
        opened.create_collection("c", SCHEMA, primary_key="id")
        yield opened


@pytest.fixture
def client(node: sn.sync.SyncNode) -> Iterator[WireClient]:
    with WireClient(parse_address(f"unix:{node.path}/node.sock"), LinkOptions(name="test")) as made:
        yield made


class Cut(msgspec.Struct):
    number: int
    tick: int


def test_calls_are_answered_in_turn_with_values_of_the_type_that_is_asked_for(
    node: sn.sync.SyncNode, client: WireClient
) -> None:
    assert client.welcome.path == node.path
    first = client.call("consistent_tick", reply=int, timeout=10)
    node.insert("c", [{"id": 1, "text": "tea"}])
    cut = client.call("flush", reply=Cut, timeout=10)
    assert cut.number == 1
    assert cut.tick > first
    assert client.call("flush", reply=Cut, timeout=10).number == 1
    assert client.call("statistics", timeout=10)["flusher"]["cut_number"] == 1


def test_a_reply_of_many_parts_comes_whole(node: sn.sync.SyncNode, client: WireClient) -> None:
    rows = [{"id": each, "text": "x" * 10_000} for each in range(900)]
    node.insert("c", rows)
    found = client.call("snapshot", ["c", None], pa.Table, timeout=60)
    assert found.nbytes > FRAME_BYTES_MAX
    assert found.sort_by("id").to_pylist() == rows


def test_a_refusal_has_its_class_and_the_next_call_is_answered(client: WireClient) -> None:
    with pytest.raises(InvalidArgument, match="no call 'brew'"):
        client.call("brew", timeout=10)
    with pytest.raises(CollectionNotFound, match="nowhere"):
        client.call("snapshot", ["nowhere", None], timeout=10)
    assert client.call("consistent_tick", timeout=10)


def test_a_node_that_closes_ends_calls_and_nobody_answers_afterwards(
    node: sn.sync.SyncNode, client: WireClient
) -> None:
    place = client.address
    node.close()
    with pytest.raises((Indeterminate, OnShutdown)):
        client.call("flush", timeout=10)
    with pytest.raises(OnShutdown, match="connect again"):
        client.call("flush", timeout=10)
    with pytest.raises(Unreachable, match=r"no node answers at unix:.*"):
        WireClient(place)


def test_a_closed_client_refuses_calls(client: WireClient) -> None:
    client.close()
    client.close()
    with pytest.raises(OnShutdown, match="connect again"):
        client.call("flush", timeout=10)


# --- what is no node, or one that does not answer -------------------------------------------------


class Peer:
    """The node's end of one connection: frames that a test sends, and those that came."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = FrameReader(FRAME_BYTES_MAX)
        self._came = list[Frame]()

    def next(self) -> Frame:
        """Return the next frame of the client."""
        while not self._came:
            data = self.connection.recv(1 << 16)
            assert data, "the client is there"
            self._came += self._reader.feed(data)
        return self._came.pop(0)

    def say(self, kind: int, number: int = 0, meta: object = None, payload: bytes = b"") -> None:
        """Send a frame."""
        self.connection.sendall(b"".join(encode_frame(kind, number, meta, payload)))

    def welcome(self) -> None:
        """Answer the hello."""
        self.connection.sendall(PREFACE)
        assert self.next().kind == FrameKind.HELLO
        self.say(FrameKind.WELCOME, 0, Welcome(1, "node", None, "rocks", 1, {}))


@contextmanager
def peer(script: Callable[[Peer], None]) -> Iterator[Address]:
    """Run a script as the node's end of one connection, in a thread; what it raises is raised."""
    failures = list[BaseException]()

    def run() -> None:
        connection, _ = listening.accept()
        with connection, suppress(ConnectionError):
            try:
                script(Peer(connection))
            except AssertionError as error:
                failures.append(error)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=run)
        thread.start()
        yield Address(host="127.0.0.1", port=listening.getsockname()[1])
        thread.join()
    assert not failures, failures


def test_another_protocol_at_the_address_is_told_from_a_node() -> None:
    def answer(it: Peer) -> None:
        it.next()
        it.connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with peer(answer) as place, pytest.raises(ProtocolError, match="no part of this protocol"):
        WireClient(place)


def test_a_node_that_refuses_the_hello_says_why() -> None:
    def refuse(it: Peer) -> None:
        it.connection.sendall(PREFACE)
        it.next()
        it.say(FrameKind.ERROR, 0, WireError.of(Overloaded("too many — try again later")))

    with peer(refuse) as place, pytest.raises(Overloaded, match="too many"):
        WireClient(place)


def test_a_connection_that_is_closed_at_once_is_no_node() -> None:
    def leave(it: Peer) -> None:
        it.next()

    with peer(leave) as place, pytest.raises(Unreachable, match="closed"):
        WireClient(place)


def test_a_connection_that_is_lost_leaves_the_outcome_of_its_call_open() -> None:
    def leave(it: Peer) -> None:
        it.welcome()
        assert it.next().kind == FrameKind.CALL

    with peer(leave) as place, WireClient(place) as client:
        with pytest.raises(Indeterminate, match="lost before the answer to flush") as caught:
            client.call("flush", timeout=10)
        assert not isinstance(caught.value, DeadlineExceeded)
        with pytest.raises(OnShutdown):
            client.call("flush", timeout=10)


def test_a_node_that_ends_the_connection_leaves_the_outcome_of_its_call_open() -> None:
    def end(it: Peer) -> None:
        it.welcome()
        it.next()
        it.say(FrameKind.ERROR, 0, WireError.of(Overloaded("others wait — send less at a time")))

    with peer(end) as place, WireClient(place) as client:
        with pytest.raises(Indeterminate, match="others wait — connect again") as caught:
            client.call("flush", timeout=10)
        assert isinstance(caught.value.__cause__, Overloaded)
        with pytest.raises(OnShutdown):
            client.call("flush", timeout=10)


def test_a_damaged_frame_ends_the_connection() -> None:
    def damage(it: Peer) -> None:
        it.welcome()
        it.next()
        frame = bytearray(b"".join(encode_frame(FrameKind.REPLY, 1, None, b"\x01")))
        frame[-1] ^= 1
        it.connection.sendall(frame)

    with peer(damage) as place, WireClient(place) as client:
        with pytest.raises(ProtocolError, match="checksum"):
            client.call("flush", timeout=10)
        with pytest.raises(OnShutdown):
            client.call("flush", timeout=10)


def test_a_part_before_the_welcome_is_refused() -> None:
    def hasten(it: Peer) -> None:
        it.next()
        it.connection.sendall(PREFACE)
        it.say(FrameKind.PART, 1, None, b"x")

    with peer(hasten) as place, pytest.raises(ProtocolError, match="long frames"):
        WireClient(place)


def test_a_call_that_takes_too_long_is_cancelled_and_its_late_reply_is_no_other_ones() -> None:
    def dawdle(it: Peer) -> None:
        it.welcome()
        late = it.next().number
        cancelled = it.next()
        assert (cancelled.kind, cancelled.number) == (FrameKind.CANCEL, late)
        call = it.next()
        it.say(FrameKind.REPLY, late, None, encode("late"))
        it.say(FrameKind.CATALOG, 1 << 63, None, encode([]))
        it.say(FrameKind.REPLY, call.number, None, encode("in time"))

    with peer(dawdle) as place, WireClient(place) as client:
        with pytest.raises(DeadlineExceeded, match=r"within 0\.001 s"):
            client.call("flush", timeout=0.001)
        assert client.call("flush", timeout=10) == "in time"


def test_a_quiet_connection_is_pinged_and_a_silent_node_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "PING_S", 0.01)
    monkeypatch.setattr(wire, "SILENT_S_MAX", 0.3)

    def fall_silent(it: Peer) -> None:
        it.welcome()
        it.next()
        for _ in range(3):
            assert it.next().kind == FrameKind.PING
        with suppress(AssertionError):
            while True:
                it.next()

    with peer(fall_silent) as place, WireClient(place) as client:
        began = time.monotonic()
        with pytest.raises(Indeterminate, match=r"silent for 0\.3 s"):
            client.call("flush", timeout=60)
        assert time.monotonic() - began >= 0.3


def test_a_node_that_does_not_welcome_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CONNECT_S_MAX", 0.05)
    monkeypatch.setattr(address_module, "CONNECT_S_MAX", 0.05)

    def say_nothing(it: Peer) -> None:
        with suppress(AssertionError):
            while True:
                it.next()

    with peer(say_nothing) as place, pytest.raises(Unreachable, match=r"within 0\.05 s"):
        WireClient(place)
