"""Which bucket each message goes to."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams import streams_pb2 as pb
from streamingnode.streams.messages import MsgPack, MsgType, TsMsg
from streamingnode.streams.repack import repack
from tests.streamingnode.streams.messages_of import creation, delete, insert
from wal.errors import InvalidArgument
from wal.headers import MessageType


def test_each_row_of_an_insert_goes_to_the_bucket_of_its_key() -> None:
    body = pb.InsertRequest(collection="c", partition="p", row_ids=[1, 2, 3], timestamps=[5, 6, 7])
    body.rows.extend([b"a", b"b", b"c"])
    found = repack([TsMsg(MsgType.INSERT, 5, 7, body, [0, 1, 4], id=9)], 2)
    rows = {
        bucket: [(m.body.rows[0], m.body.row_ids[0], m.end_ts) for m in each]
        for bucket, each in found.items()
    }
    assert rows == {0: [(b"a", 1, 5), (b"c", 3, 7)], 1: [(b"b", 2, 6)]}
    assert {(m.id, m.part) for each in found.values() for m in each} == {(9, 0), (9, 1), (9, 2)}
    assert {(m.body.collection, m.body.partition) for each in found.values() for m in each} == {
        ("c", "p")
    }


def test_rows_without_timestamps_have_the_tick_of_their_message() -> None:
    [row] = repack([insert(8)], 1)[0]
    assert (row.begin_ts, row.end_ts, list(row.body.timestamps)) == (8, 8, [8])


def test_a_delete_goes_whole_to_the_bucket_of_its_first_key() -> None:
    message = delete(5, keys=[5, 2])
    assert repack([message], 4) == {1: [message]}


def test_everything_else_goes_to_the_bucket_of_its_first_key() -> None:
    one = creation(1)
    other = creation(2)
    one.hash_keys = (-1, 7)
    other.hash_keys = (3,)
    assert repack([one, other], 3) == {2: [one], 0: [other]}


@given(
    st.lists(st.lists(st.integers(-(1 << 31), 1 << 31), min_size=1, max_size=5)), st.integers(1, 5)
)
def test_no_row_is_lost_and_each_bucket_keeps_their_order(
    keys: list[list[int]], buckets: int
) -> None:
    messages = [insert(number + 1, keys=each, id_=number + 1) for number, each in enumerate(keys)]
    if not messages:
        return
    found = repack(messages, buckets)
    for bucket, rows in found.items():
        expected = [
            (number + 1, part)
            for number, each in enumerate(keys)
            for part, key in enumerate(each)
            if key % buckets == bucket
        ]
        assert [(row.id, row.part) for row in rows] == expected
    assert sum(map(len, found.values())) == sum(map(len, keys))


def test_a_repack_func_is_given_the_keys_and_says_where_messages_go() -> None:
    seen: list[Sequence[Sequence[int]]] = []

    def by_count(
        messages: Sequence[TsMsg], hash_keys: Sequence[Sequence[int]]
    ) -> Mapping[int, MsgPack]:
        seen.append(hash_keys)
        return {5: MsgPack(list(messages)), 0: MsgPack([])}

    message = insert(1, keys=(9, 8))
    assert repack([message], 2, by_count) == {1: [message]}
    assert seen == [[(9, 8)]]


def test_a_repack_func_that_returns_no_number_is_told() -> None:
    with pytest.raises(InvalidArgument, match="RepackFunc"):
        repack([insert(1)], 2, lambda messages, _: {"a": MsgPack(list(messages))})  # type: ignore[dict-item]


def _misaligned_insert(**fields: Sequence[int]) -> TsMsg:
    return TsMsg(MsgType.INSERT, 1, 1, pb.InsertRequest(rows=[b"a", b"b"], **fields), [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "messages, said",
    [
        ([_misaligned_insert(row_ids=[1])], "1 row_ids"),
        ([_misaligned_insert(row_ids=[1, 2], timestamps=[1])], "1 timestamps"),
        (
            [TsMsg(MsgType.INSERT, 1, 1, pb.InsertRequest(rows=[b""], row_ids=[1]), [1, 2])],
            "2 hash_keys",
        ),
        ([insert(1, keys=[])], "0 hash_keys"),
        (
            [TsMsg(MsgType.DELETE, 1, 1, pb.DeleteRequest(primary_keys=[1, 2]), [1])],
            "2 primary_keys",
        ),
        (
            [
                TsMsg(
                    MsgType.DELETE, 1, 1, pb.DeleteRequest(primary_keys=[1], timestamps=[1, 2]), [1]
                )
            ],
            "2 timestamps",
        ),
        ([insert(1), delete(1)], "DELETE is in a pack that begins with INSERT"),
        ([delete(1), insert(1)], "INSERT is in a pack that begins with DELETE"),
        ([TsMsg(MsgType.INSERT, 1, 1, b"bytes", [1])], "set_repack_func"),
        ([TsMsg(MessageType.INSERT, 1, 1, pb.StreamingMessage())], "no hash_keys"),
        ([TsMsg(MsgType.SEARCH, 1, 1, b"", ["a"])], "whole numbers"),  # type: ignore[list-item]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages_that_do_not_fit_their_rule_are_an_invalid_argument(
    messages: list[TsMsg], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        repack(messages, 2)
