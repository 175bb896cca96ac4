"""Frames come out as they went in, however the bytes were cut; what is no frame is refused and
never acted on.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wal.errors import ProtocolError
from wal.frames import (
    FRAME_BYTES_MAX,
    FRAME_HEADER_BYTES,
    GREETING_BYTES_MAX,
    PREFACE,
    RECEIVED_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
)

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

Spoken = tuple[int, int, object, bytes]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
frames = st.tuples(
    st.integers(0, 2**16 - 1), st.integers(0, 2**64 - 1), values, st.binary(max_size=300)
)


def on_the_wire(spoken: Sequence[Spoken]) -> bytes:
    return PREFACE + b"".join(bytes(part) for each in spoken for part in encode_frame(*each))


def heard(frame: Frame) -> Spoken:
    return frame.kind, frame.number, frame.value() if frame.meta else None, bytes(frame.payload)


def read(data: bytes, reader: FrameReader | None = None) -> list[Frame]:
    return list((reader or FrameReader()).feed(data))


@given(spoken=st.lists(frames, max_size=5), data=st.data())
def test_frames_are_read_as_they_were_sent_however_the_bytes_are_cut(
    spoken: list[Spoken], data: st.DataObject
) -> None:
    sent = on_the_wire(spoken)
    reader = FrameReader()
    found = list[Frame]()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        found += reader.feed(sent[start:end])
    assert [heard(frame) for frame in found] == spoken
    assert reader.held_bytes == 0


@given(spoken=st.lists(frames, min_size=1, max_size=3), data=st.data())
def test_of_frames_with_a_wrong_byte_none_is_read_that_was_not_sent(
    spoken: list[Spoken], data: st.DataObject
) -> None:
    sent = bytearray(on_the_wire(spoken))
    at = data.draw(st.integers(0, len(sent) - 1))
    sent[at] ^= data.draw(st.integers(1, 255))
    found: list[Frame] = []
    with suppress(ProtocolError):
        found.extend(FrameReader().feed(bytes(sent)))  # what comes before the error stays
    assert [heard(frame) for frame in found] == spoken[: len(found)]
    assert len(found) < len(spoken)


@given(received=st.lists(st.binary(max_size=200), max_size=5), begins_well=st.booleans())
def test_garbage_is_refused_or_waited_for_and_holds_no_more_than_a_frame(
    received: list[bytes], begins_well: bool
) -> None:
    reader = FrameReader(frame_bytes_max=256)
    with suppress(ProtocolError):
        for number, data in enumerate(received):
            for frame in reader.feed(PREFACE + data if begins_well and not number else data):
                assert FRAME_HEADER_BYTES + len(frame.meta) + len(frame.payload) <= 256
            assert reader.held_bytes <= 256


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"SNWP\n\x1a\n",
        b"SNWP\r\n\x1a\r\n",
        b"\0",
    ],
    ids=["http", "tls", "line ends made short", "line ends made long", "nothing"],
)
def test_another_protocol_is_known_by_its_first_bytes(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="no part of this protocol"):
        read(first)


@pytest.mark.parametrize("length", [GREETING_BYTES_MAX, 2**31, 2**32 - 1])
def test_a_giant_length_is_refused_before_anything_is_kept_for_it(length: int) -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError, match=f"{length} bytes"):
        read(PREFACE + length.to_bytes(4, "little") + bytes(FRAME_HEADER_BYTES - 4), reader)
    assert reader.held_bytes <= FRAME_HEADER_BYTES


def test_a_frame_over_the_bound_is_not_sent_and_the_largest_one_is() -> None:
    largest = FRAME_BYTES_MAX - FRAME_HEADER_BYTES
    with pytest.raises(ProtocolError, match="send less"):
        encode_frame(FrameKind.CALL, 1, None, bytes(largest + 1))
    sent = PREFACE + b"".join(encode_frame(FrameKind.CALL, 1, None, bytes(largest)))
    (frame,) = read(sent, FrameReader(FRAME_BYTES_MAX))
    assert len(frame.payload) == largest


@pytest.mark.parametrize(
    "meta",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"\xc1",
        b"\xa1\xff",
        b"",
    ],
    ids=["array", "map", "bytes", "depth", "no value", "no text", "nothing"],
)
def test_a_meta_that_claims_more_than_there_is_does_not_decode(meta: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        Frame(FrameKind.CALL, 1, meta, b"").value()


def test_a_meta_of_another_type_than_expected_does_not_decode() -> None:
    with pytest.raises(ProtocolError, match="does not decode"):
        Frame(FrameKind.CALL, 1, msgspec.msgpack.encode([1, "tea"]), b"").value(tuple[str, int])


def test_the_documented_frames_are_byte_for_byte_what_is_sent() -> None:
    (block,) = re.findall(r"test_frames.py -->\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line.split("  ") for line in block.splitlines()]
    documented = b"".join(bytes.fromhex(found) for _, found, *_ in lines)
    sent = encode_frame(FrameKind.CALL, 7, [1, "tea"], b"abc") + encode_frame(FrameKind.PING, 0)
    assert documented == b"".join(sent)
    at = 0
    for offset, found, *_ in lines:
        assert int(offset) == at
        at += len(bytes.fromhex(found))


@pytest.mark.parametrize("payload", [b"short", bytes(3 * RECEIVED_BYTES)])
def test_a_connection_that_is_quiet_holds_no_buffer(payload: bytes) -> None:
    reader = FrameReader(FRAME_BYTES_MAX)
    frames = list(reader.feed(PREFACE + b"".join(encode_frame(FrameKind.CALL, 1, None, payload))))
    assert [bytes(frame.payload) for frame in frames] == [payload]
    assert not reader.held_bytes
    assert not reader._buffer
