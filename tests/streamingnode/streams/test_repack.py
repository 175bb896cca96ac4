"""Which channel a message goes to, and what cannot go anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams.messages import MsgPack, MsgType, TsMsg
from streamingnode.streams.repack import repack
from wal.errors import InvalidArgument
from wal.headers import MessageType


def made(kind: MsgType | MessageType, keys: tuple[int, ...], rows: int = 0, number: int = 1) -> TsMsg:
    contents = tuple(b"%d" % at for at in range(rows))
    return TsMsg(id=number, begin_ts=1, end_ts=2, type=kind, hash_keys=keys, rows=contents, payload=b"p")


@pytest.mark.parametrize("kind", [MsgType.INSERT, MessageType.INSERT])
def test_each_row_of_an_insert_goes_to_the_bucket_of_its_key(kind: MsgType | MessageType) -> None:
    found = repack([made(kind, (1, 2, 3, 5), 4)], 2)
    assert {bucket: [(each.rows, each.hash_keys, each.part) for each in parts] for bucket, parts in found.items()} == {
        1: [((b"0",), (1,), 0), ((b"2",), (3,), 2), ((b"3",), (5,), 3)],
        0: [((b"1",), (2,), 1)],
    }
    assert all((each.id, each.begin_ts, each.end_ts) == (1, 1, 2) for parts in found.values() for each in parts)


@pytest.mark.parametrize("kind", [MsgType.DELETE, MessageType.DELETE, MsgType.SEARCH, MessageType.CREATE_COLLECTION])
def test_all_else_goes_whole_to_the_bucket_of_its_first_key(kind: MsgType | MessageType) -> None:
    message = made(kind, (5, 4), 2)
    assert repack([message], 3) == {2: [message]}


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5), max_size=8), st.integers(1, 7))
def test_no_row_is_lost_or_made_and_order_is_kept_in_each_bucket(keys: list[list[int]], buckets: int) -> None:
    messages = [made(MsgType.INSERT, tuple(each), len(each), number) for number, each in enumerate(keys)]
    found = repack(messages, buckets)
    rows = [(number, at) for number, each in enumerate(keys) for at in range(len(each))]
    assert sorted((each.id, each.part) for parts in found.values() for each in parts) == rows
    for bucket, parts in found.items():
        assert all(each.hash_keys[0] % buckets == bucket for each in parts)
        assert [(each.id, each.part) for each in parts] == sorted((each.id, each.part) for each in parts)


@pytest.mark.parametrize(
    "messages, said",
    [
        ([made(MsgType.INSERT, (1, 2), 3)], "3 rows and 2 hash keys"),
        ([made(MsgType.INSERT, (), 0)], "0 rows"),
        ([made(MsgType.DELETE, ())], "no hash key"),
        ([made(MsgType.SEARCH, ())], "no hash key"),
        ([made(MsgType.INSERT, (1,), 1), made(MsgType.DELETE, (1,))], "DELETE among messages of type INSERT"),
        ([made(MsgType.DELETE, (1,)), made(MsgType.SEARCH, (1,))], "SEARCH among messages of type DELETE"),
        ([made(MsgType.DELETE, ("x",))], "no integer"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_bucket_is_refused(messages: list[TsMsg], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        repack(messages, 2)


def test_a_rule_of_the_users_gets_the_keys_and_names_buckets_that_there_are() -> None:
    seen: list[object] = []

    def rule(messages: object, keys: object) -> dict[int, MsgPack]:
        seen.append(keys)
        return {0: MsgPack(msgs=[]), 2: MsgPack(msgs=[made(MsgType.SEARCH, ())])}

    assert repack([made(MsgType.SEARCH, (7, 8))], 3, rule) == {2: [made(MsgType.SEARCH, ())]}
    assert seen == [[(7, 8)]]
    with pytest.raises(InvalidArgument, match="bucket 2"):
        repack([made(MsgType.SEARCH, (7,))], 2, rule)
