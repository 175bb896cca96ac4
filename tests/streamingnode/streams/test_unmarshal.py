"""Messages as bytes and back, by the template of their type."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams.messages import MsgPosition, MsgType, TsMsg, place_of, tick, type_of
from streamingnode.streams.unmarshal import (
    TOGETHER_MAX,
    DispatcherFactory,
    ProtoTemplate,
    UnmarshalDispatcher,
    in_memory_dispatcher,
    proto_dispatcher,
)
from wal.errors import Corrupt, InvalidArgument, TooLarge
from wal.headers import MessageType

FACTORIES = [proto_dispatcher, in_memory_dispatcher]
numbers = st.integers(0, 2**64 - 1)
messages = st.builds(
    lambda ends, **fields: TsMsg(begin_ts=min(ends), end_ts=max(ends), **fields),
    ends=st.tuples(numbers, numbers),
    id=numbers,
    type=st.sampled_from([*MsgType, *MessageType]),
    hash_keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    payload=st.binary(max_size=20),
    rows=st.lists(st.binary(max_size=9), max_size=3).map(tuple),
    part=st.integers(0, 2**32 - 1),
)


def test_no_number_means_two_types() -> None:
    assert len({each.value for each in [*MsgType, *MessageType]}) == len(MsgType) + len(MessageType)
    assert [type_of(number) for number in (2, 400, 1201)] == [MessageType.INSERT, MsgType.INSERT, MsgType.TIME_SYNC]


@pytest.mark.parametrize("factory", FACTORIES)
@given(found=st.lists(messages, min_size=1, max_size=5))
def test_messages_come_back_as_they_were(factory: DispatcherFactory, found: list[TsMsg]) -> None:
    dispatcher = factory()
    [(payload, count)] = dispatcher.pack(found)
    assert (list(dispatcher.unpack(payload)), count) == (found, len(found))
    assert dispatcher.unmarshal(dispatcher.marshal(found[0]), found[0].type) == found[0]


@pytest.mark.parametrize("factory", FACTORIES)
@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_messages_are_corrupt(factory: DispatcherFactory, data: bytes) -> None:
    dispatcher = factory()
    for read in (dispatcher.unpack, lambda data: [dispatcher.unmarshal(data, MsgType.INSERT)]):
        try:
            assert all(isinstance(each, TsMsg) for each in read(data))
        except Corrupt as error:
            assert "no message" in str(error) or "not INSERT" in str(error) or "no type" in str(error)  # noqa: PT017


def test_many_messages_are_cut_into_several_of_the_queue() -> None:
    packed = proto_dispatcher().pack([tick(1)] * (TOGETHER_MAX + 1))
    assert [count for _, count in packed] == [TOGETHER_MAX, 1]


def test_a_template_of_the_users_replaces_the_default_and_a_type_without_one_is_refused() -> None:
    class Upside(ProtoTemplate):
        def marshal(self, message: TsMsg) -> bytes:
            return super().marshal(message)[::-1]

        def unmarshal(self, data: bytes) -> TsMsg:
            return super().unmarshal(data[::-1])

    dispatcher = UnmarshalDispatcher({})
    with pytest.raises(InvalidArgument, match="add_template"):
        dispatcher.marshal(tick(1))
    dispatcher.add_template(MsgType.TIME_TICK, Upside())
    data = dispatcher.marshal(tick(1))
    assert data == ProtoTemplate().marshal(tick(1))[::-1]
    assert dispatcher.unmarshal(data, MsgType.TIME_TICK) == tick(1)
    with pytest.raises(InvalidArgument, match="no type"):
        dispatcher.add_template(7777, Upside())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        TsMsg(id=-1, begin_ts=1, end_ts=1, type=MsgType.INSERT),
        TsMsg(id=1, begin_ts=2, end_ts=1, type=MsgType.INSERT),
        TsMsg(id=1, begin_ts=1, end_ts=2**64, type=MsgType.INSERT),
        TsMsg(id=1, begin_ts=1, end_ts=1, type=3333),  # type: ignore[arg-type]
        TsMsg(id=1, begin_ts=1, end_ts=1, type=MsgType.INSERT, hash_keys=(2**64,)),
        TsMsg(id=1, begin_ts=1, end_ts=1, type=MsgType.INSERT, payload=3),  # type: ignore[arg-type]
        "text",
    ],
)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_message_that_cannot_be_is_refused(factory: DispatcherFactory, wrong: TsMsg) -> None:
    dispatcher = factory()
    with pytest.raises(InvalidArgument):
        dispatcher.marshal(wrong)


def test_a_message_over_the_bound_is_too_large() -> None:
    with pytest.raises(TooLarge):
        proto_dispatcher().marshal(TsMsg(id=1, begin_ts=1, end_ts=1, type=MsgType.SEARCH, payload=bytes(9 << 20)))


def test_ids_of_messages_sort_as_messages_do_and_others_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        place_of(MsgPosition("a", b"0"))
