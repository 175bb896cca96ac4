"""The registry of types, dispatchers, and batches as bytes."""

import re
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams import streams_pb2 as pb
from streamingnode.streams.messages import (
    BATCH_BYTES_TARGET,
    CONTENT_TYPE,
    MESSAGE_BYTES_MAX,
    TYPES,
    MsgPosition,
    MsgType,
    StreamType,
    Template,
    TsMsg,
    UnmarshalDispatcher,
    new_memory_dispatcher,
    new_proto_dispatcher,
)
from tests.streamingnode.streams.messages_of import creation, ends, insert, inserts, tick_of
from wal.errors import Corrupt, InvalidArgument, TooLarge, UnsupportedFormat
from wal.headers import MessageType

PROTO = new_proto_dispatcher()
MEMORY = new_memory_dispatcher()


def test_registry_has_the_numbers_of_both_families_and_none_twice() -> None:
    numbers = {"INSERT": 400, "DELETE": 401, "SEARCH": 500, "SEARCH_RESULT": 1000}
    numbers |= {"SEGMENT_STATISTICS": 1100, "TIME_TICK": 1200, "TIME_SYNC": 1201}
    assert {each.name: each.value for each in MsgType} == numbers
    assert [TYPES[number] for number in (2, 400, 1, 1200)] == [
        MessageType.INSERT,
        MsgType.INSERT,
        MessageType.TIME_TICK,
        MsgType.TIME_TICK,
    ]
    assert len(TYPES) == len(MsgType) + len(MessageType)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(TYPES.values())),
            st.integers(0, 1 << 62),
            st.integers(0, 100),
            st.binary(max_size=20),
            st.integers(-5, 5),
            st.integers(0, 3),
        ),
        min_size=1,
    )
)
def test_a_batch_comes_back_as_it_went(
    columns: list[tuple[MsgType | MessageType, int, int, bytes, int, int]],
) -> None:
    given_ = [
        TsMsg(type_, ts, ts + more, body, (), id_, part)
        for type_, ts, more, body, id_, part in columns
    ]
    [data] = MEMORY.encode(given_)
    batch = MEMORY.decode(data, CONTENT_TYPE)
    for one, other in zip(given_, batch.messages, strict=True):
        for name in ("type", "begin_ts", "end_ts", "body", "id", "part"):
            assert getattr(one, name) == getattr(other, name)
    assert batch.end_ts == max(ends(given_))
    assert list(batch.ticks) == [at for at, each in enumerate(given_) if each.type in {1, 1200}]


@pytest.mark.parametrize(
    "type_, body",
    [
        (MsgType.INSERT, pb.InsertRequest(collection="c", rows=[b"x"], row_ids=[1])),
        (MsgType.DELETE, pb.DeleteRequest(primary_keys=[1])),
        (MsgType.SEARCH, pb.SearchRequest(request_id=1, reply_channel="r")),
        (MsgType.SEARCH_RESULT, pb.SearchResult(request_id=1, hits=[b"h"])),
        (MsgType.SEGMENT_STATISTICS, pb.SegmentStatistics(segment_id=1, rows=2)),
        (MsgType.TIME_TICK, pb.TimeTick(source="s")),
        (MsgType.TIME_SYNC, pb.TimeSync(sources=["s"])),
        (MessageType.FLUSH, pb.StreamingMessage(header=b"h", payload=b"p")),
    ],
    ids=str,
)
def test_a_protobuf_body_is_unmarshalled_by_its_type(
    type_: MsgType | MessageType, body: object
) -> None:
    message = PROTO.unmarshal(PROTO.marshal(TsMsg(type_, 5, 5, body)), type_)
    assert message.body == body
    message.set_ts(3)
    assert (message.begin_ts, message.end_ts) == (3, 3)
    message.set_ts(3, 9)
    assert (message.begin_ts, message.end_ts) == (3, 9)


def test_a_changed_body_of_a_consumed_message_is_what_goes_on() -> None:
    message = PROTO.unmarshal(PROTO.marshal(insert(1)), MsgType.INSERT)
    untouched = PROTO.marshal(message)
    message.body.collection = "other"
    assert PROTO.unmarshal(untouched, MsgType.INSERT).body.collection == "c"
    assert PROTO.unmarshal(PROTO.marshal(message), MsgType.INSERT).body.collection == "other"


def test_a_template_of_ones_own_takes_the_place_of_the_default() -> None:
    dispatcher = new_memory_dispatcher()
    dispatcher.add_template(MsgType.SEARCH, Template(msgspec.json.encode, msgspec.json.decode))
    data = dispatcher.marshal(TsMsg(MsgType.SEARCH, 1, 1, {"top": 3}))
    assert dispatcher.unmarshal(data, MsgType.SEARCH).body == {"top": 3}
    assert MEMORY.unmarshal(data, MsgType.SEARCH).body == b'{"top":3}'


def test_many_messages_are_few_batches_and_large_ones_are_cut() -> None:
    assert len(PROTO.encode(inserts(*range(1, 5000)))) == 1
    large = [TsMsg(MsgType.SEARCH, 1, 1, bytes(BATCH_BYTES_TARGET // 2)) for _ in range(5)]
    batches = [MEMORY.decode(data, CONTENT_TYPE).messages for data in MEMORY.encode(large)]
    assert [len(each) for each in batches] == [2, 2, 1]


def test_a_body_over_the_limit_is_too_large() -> None:
    assert MEMORY.encode([TsMsg(MsgType.SEARCH, 1, 1, bytes(MESSAGE_BYTES_MAX))])
    with pytest.raises(TooLarge, match="SEARCH"):
        MEMORY.encode([TsMsg(MsgType.SEARCH, 1, 1, bytes(MESSAGE_BYTES_MAX + 1))])


@pytest.mark.parametrize(
    "message",
    [
        TsMsg(MsgType.INSERT, 1, 1, pb.DeleteRequest()),
        TsMsg(MsgType.INSERT, 1, 1, b"bytes"),
        TsMsg(MessageType.TXN, 1, 1, b""),
        TsMsg(77, 1, 1, b""),  # type: ignore[arg-type]
        insert(5, end_ts=4),
        insert(-1),
        insert(1 << 63),
    ],
    ids=[
        "wrong class",
        "no protobuf",
        "never in a log",
        "unknown type",
        "ends before",
        "negative",
        "above all ticks",
    ],
)
def test_a_message_that_cannot_be_is_an_invalid_argument(message: TsMsg) -> None:
    with pytest.raises(InvalidArgument, match="—"):
        PROTO.encode([message])


def test_a_type_without_a_template_is_named_and_read_once_it_has_one() -> None:
    unknown = pb.Batch(types=[77], begin_ts=[1], end_ts=[1], bodies=[b""]).SerializeToString()
    with pytest.raises(UnsupportedFormat, match="77"):
        PROTO.decode(unknown, CONTENT_TYPE)
    with pytest.raises(UnsupportedFormat, match="TXN"):
        PROTO.unmarshal(b"", MessageType.TXN)
    dispatcher = new_proto_dispatcher()
    dispatcher.add_template(MessageType.TXN, Template(bytes, bytes))
    assert dispatcher.unmarshal(b"x", MessageType.TXN).body == b"x"
    with pytest.raises(InvalidArgument, match="77"):
        dispatcher.add_template(77, Template(bytes, bytes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data, properties, error",
    [
        (b"hello", {}, UnsupportedFormat),
        (b"\xff\xff", CONTENT_TYPE, Corrupt),
        (b"", CONTENT_TYPE, Corrupt),
        (
            pb.Batch(types=[400], begin_ts=[1], end_ts=[1]).SerializeToString(),
            CONTENT_TYPE,
            Corrupt,
        ),
        (
            pb.Batch(types=[400, 400], begin_ts=[1, 1], end_ts=[1, 1], bodies=[b"", b""], ids=[1]),
            CONTENT_TYPE,
            Corrupt,
        ),
        (
            pb.Batch(types=[400], begin_ts=[1], end_ts=[1 << 63], bodies=[b""]),
            CONTENT_TYPE,
            Corrupt,
        ),
    ],
    ids=["of somebody else", "no protobuf", "empty", "no bodies", "too few ids", "no tick"],
)
def test_what_is_no_batch_is_a_typed_error(
    data: object, properties: dict[str, str], error: type[Exception]
) -> None:
    data = data.SerializeToString() if isinstance(data, pb.Batch) else data
    assert isinstance(data, bytes)
    with pytest.raises(error, match="batch"):
        PROTO.decode(data, properties)


@pytest.mark.parametrize("dispatcher", [PROTO, MEMORY])
@given(data=st.binary(max_size=60))
def test_any_bytes_are_messages_or_a_typed_error(
    dispatcher: UnmarshalDispatcher, data: bytes
) -> None:
    try:
        batch = dispatcher.decode(data, CONTENT_TYPE)
    except (Corrupt, UnsupportedFormat):
        return
    for message in batch.messages:
        with suppress(Corrupt):
            _ = message.body


def test_a_body_that_does_not_unmarshal_is_corrupt_when_asked_for() -> None:
    message = PROTO.unmarshal(b"\xff", MsgType.INSERT)
    with pytest.raises(Corrupt, match="INSERT"):
        _ = message.body


def test_a_position_survives_being_saved_as_json() -> None:
    position = MsgPosition("a", 1 << 60, 5, inclusive=True)
    assert msgspec.json.decode(msgspec.json.encode(position), type=MsgPosition) == position


def test_a_pack_of_every_kind_goes_through_the_protobuf_dispatcher() -> None:
    [data] = PROTO.encode([insert(1), tick_of(2), creation(3)])
    assert PROTO.decode(data, CONTENT_TYPE).ticks == [1]


def test_the_page_has_every_type_with_its_number_and_body() -> None:
    page = (Path(__file__).parents[3] / "docs" / "streams.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)\.(\w+)` \| `?(\w+)`? \|$", page, re.MULTILINE)
    found = {
        (str(int(each)), type(each).__name__, each.name, _body_of(each)) for each in TYPES.values()
    }
    assert (set(rows), len(rows)) == (found, len(TYPES))


def _body_of(type_: StreamType) -> str:
    try:
        return type(PROTO.unmarshal(b"", type_).body).__name__
    except UnsupportedFormat:
        return "none"
