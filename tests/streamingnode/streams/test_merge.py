"""Batches of many channels in, packs out: vectors, and properties over any interleaving and any
restart.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams.merge import Merge, PlainMerge, TickMerge
from streamingnode.streams.messages import MsgPack, MsgPosition, TsMsg
from tests.streamingnode.streams.messages_of import (
    SEEK_LOG,
    batch_of,
    creation,
    ends,
    insert,
    inserts,
    tick_of,
    told,
)
from wal.headers import MessageType

Log = list[list[TsMsg]]
"""Batches of a channel; the id of each is its place, from 100 on."""
FIRST_ID = 100


def push_all(merge: Merge, channel: str, log: Log, *, start: int = FIRST_ID) -> Iterator[MsgPack]:
    """Push what a channel holds from an id on, and yield packs as they come."""
    for message_id, messages in enumerate(log, FIRST_ID):
        if message_id >= start:
            merge.push(channel, message_id, batch_of(messages))
            while pack := merge.pop():
                yield pack


def tick_merge(*channels: str) -> TickMerge:
    merge = TickMerge()
    for channel in channels:
        merge.add(channel)
    return merge


def test_packs_of_one_channel_hold_what_is_up_to_each_tick() -> None:
    packs = list(push_all(tick_merge("a"), "a", SEEK_LOG))
    assert [ends(pack.messages) for pack in packs] == [[1, 3], [9], [14, 12, 13], [19]]
    assert [(pack.begin_ts, pack.end_ts) for pack in packs] == [(0, 5), (5, 11), (11, 15), (15, 20)]
    assert [pack.start_positions[0].timestamp for pack in packs] == [0, 5, 11, 15]
    assert [pack.end_positions[0].timestamp for pack in packs] == [5, 11, 15, 20]


def test_every_position_of_a_pack_reproduces_the_packs_that_follow() -> None:
    packs = list(push_all(tick_merge("a"), "a", SEEK_LOG))
    for number, pack in enumerate(packs):
        for [position], follow in (
            (pack.start_positions, packs[number:]),
            (pack.end_positions, packs[number + 1 :]),
        ):
            merge = tick_merge("a")
            merge.seek(position)
            again = list(push_all(merge, "a", SEEK_LOG, start=position.message_id))
            assert [told(each) for each in again] == [told(each) for each in follow]
            assert [each.end_positions for each in again] == [each.end_positions for each in follow]


def test_inserts_of_one_id_are_one_in_a_pack_and_what_creates_collections_is_not() -> None:
    log = [
        [insert(2, id_=7)],
        [insert(2, id_=7)],
        [insert(2, id_=7)],
        [creation(3, id_=8), creation(3, id_=8)],
    ]
    log += [[tick_of(15)]]
    [pack] = push_all(tick_merge("a"), "a", log)
    assert len(pack.messages) == 3
    assert (pack.begin_ts, pack.end_ts) == (0, 15)
    merge = tick_merge("a")
    for position in pack.start_positions:
        merge.seek(position)
    [again] = push_all(merge, "a", log)
    assert [each.type is MessageType.CREATE_COLLECTION for each in again.messages] == [
        False,
        True,
        True,
    ]


def test_messages_without_an_id_are_never_taken_for_each_other() -> None:
    [pack] = push_all(
        tick_merge("a"),
        "a",
        [[insert(2), insert(2), insert(2, id_=1), insert(2, id_=1)], [tick_of(3)]],
    )
    assert len(pack.messages) == 3


def test_rows_of_one_insert_are_told_apart_by_their_part() -> None:
    first = insert(2, id_=7)
    second = insert(2, id_=7)
    second.part = 1
    [pack] = push_all(tick_merge("a"), "a", [[first, second, first], [tick_of(3)]])
    assert [each.part for each in pack.messages] == [0, 1]


def test_two_channels_give_a_pack_only_where_their_ticks_meet() -> None:
    merge = tick_merge("a", "b")
    assert not list(push_all(merge, "a", [inserts(1), [tick_of(5)], inserts(6), [tick_of(10)]]))
    assert merge.behind() == ["b"]
    assert not list(push_all(merge, "b", [inserts(2), [tick_of(7)]]))
    assert merge.behind() == ["b"]
    merge.push("b", 200, batch_of([tick_of(10)]))
    pack = merge.pop()
    assert pack is not None
    assert (ends(pack.messages), pack.begin_ts, pack.end_ts) == ([1, 6, 2], 0, 10)
    assert merge.pop() is None
    assert merge.behind() == ["a", "b"]


def test_a_pack_of_ticks_alone_is_empty_and_comes() -> None:
    [pack] = push_all(tick_merge("a"), "a", [[tick_of(4)], [tick_of(4)], [tick_of(3)]])
    assert (pack.messages, pack.end_ts) == ([], 4)


def test_ticks_of_the_log_of_a_node_are_ticks_too() -> None:
    [pack] = push_all(tick_merge("a"), "a", [inserts(1), [tick_of(4, MessageType.TIME_TICK)]])
    assert ends(pack.messages) == [1]


def test_a_message_across_a_tick_belongs_to_where_it_ends_also_after_a_restart() -> None:
    log = [[insert(3, end_ts=8)], [tick_of(5)], [tick_of(9)]]
    first, second = push_all(tick_merge("a"), "a", log)
    assert (ends(first.messages), ends(second.messages)) == ([], [8])
    merge = tick_merge("a")
    for position in first.end_positions:
        merge.seek(position)
    [again] = push_all(merge, "a", log, start=first.end_positions[0].message_id)
    assert told(again) == told(second)


def test_a_message_behind_its_tick_is_in_the_next_pack_and_counted() -> None:
    merge = tick_merge("a")
    first, second = push_all(merge, "a", [inserts(1), [tick_of(5)], inserts(4, 7), [tick_of(9)]])
    assert (ends(first.messages), ends(second.messages)) == ([1], [4, 7])


def test_what_is_held_is_what_is_in_no_pack_yet() -> None:
    merge = tick_merge("a")
    merge.push("a", 1, batch_of(inserts(1, 9))._replace(size_bytes=70))
    merge.push("a", 2, batch_of([tick_of(5)])._replace(size_bytes=30))
    assert merge.held_bytes == 100
    assert merge.pop()
    assert merge.held_bytes == 70
    merge.push("a", 3, batch_of([tick_of(9)])._replace(size_bytes=5))
    assert merge.pop()
    assert merge.held_bytes == 0


def test_a_plain_merge_hands_on_each_batch_with_its_own_position() -> None:
    merge = PlainMerge()
    merge.add("a")
    assert list(merge.behind()) == ["a"]
    first, second = push_all(merge, "a", [inserts(3, 1), [tick_of(4)]])
    assert (told(first)[1:], first.start_positions) == ((1, 3), [MsgPosition("a", FIRST_ID, 3)])
    assert second.end_positions == [MsgPosition("a", FIRST_ID + 1, 4)]


def test_a_plain_merge_forgets_only_the_channels_that_are_sought() -> None:
    merge = PlainMerge()
    for channel in "ab":
        merge.add(channel)
        merge.push(channel, 1, batch_of(inserts(1)))
    merge.seek(MsgPosition("a", 1))
    pack = merge.pop()
    assert (pack is not None and pack.end_positions[0].channel, merge.pop()) == ("b", None)


def test_work_grows_with_batches_and_ticks_and_not_with_channels_times_either() -> None:
    assert _calls_per_batch(64) < 1.5 * _calls_per_batch(4)


def _calls_per_batch(channels: int) -> float:
    """Return how many functions are called for each batch, of which as many come, by however many
    channels.
    """
    names = [f"c{number}" for number in range(channels)]
    merge = tick_merge(*names)
    calls = 0
    packs = 0
    rounds = 1280 // channels
    batches = [batch_of(inserts(*[tick * 10 + 1] * 5)) for tick in range(rounds)]
    ends_of = [batch_of([tick_of(tick * 10 + 9)]) for tick in range(rounds)]

    def count(_frame: object, event: str, _value: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for number in range(rounds):
            for batch in (batches[number], ends_of[number]):
                for name in merge.behind():
                    merge.push(name, number, batch)
                packs += merge.pop() is not None
    finally:
        sys.setprofile(before)
    assert packs == rounds
    return calls / (2 * 1280)


# --- properties -----------------------------------------------------------------------------------


@dataclass
class Channels:
    """Logs of channels that have the same ticks, and each some of its own."""

    logs: dict[str, Log]
    common: list[int]


@st.composite
def channels(draw: st.DrawFn, *, late: bool) -> Channels:
    """Draw logs in which messages come in any order, many ticks ahead, in batches cut anywhere."""
    common = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=6)))
    logs: dict[str, Log] = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        own = draw(st.sets(st.integers(1, 60), max_size=3))
        flat: list[TsMsg] = []
        below = 0
        for tick in sorted({*common, *own}):
            lowest = 1 if late else below + 1
            spans = draw(
                st.lists(st.tuples(st.integers(lowest, 80), st.integers(0, 9)), max_size=4)
            )
            flat += [insert(begin, end_ts=begin + length) for begin, length in spans]
            flat.append(tick_of(tick))
            below = tick
        cuts = sorted(draw(st.sets(st.integers(1, len(flat)))) | {0, len(flat)})
        logs[name] = [flat[start:stop] for start, stop in pairwise(cuts)]
        for number, each in enumerate(flat):
            each.id = number * 10 + ord(name)
    ids = [
        set(ends(each for batch in log for each in batch if each.type == 1200))
        for log in logs.values()
    ]
    return Channels(logs, sorted(set.intersection(*ids)))


def run(
    merge: TickMerge, logs: dict[str, Log], order: st.DataObject, starts: dict[str, int]
) -> list[MsgPack]:
    """Push what the channels hold in any order, popping now and then."""
    packs: list[MsgPack] = []
    at = dict(starts)
    while waiting := [name for name, log in logs.items() if at[name] - FIRST_ID < len(log)]:
        name = order.draw(st.sampled_from(waiting))
        merge.push(name, at[name], batch_of(logs[name][at[name] - FIRST_ID]))
        at[name] += 1
        if order.draw(st.booleans()):
            packs += _popped(merge)
    return packs + _popped(merge)


def _popped(merge: TickMerge) -> list[MsgPack]:
    return list(iter(merge.pop, None))


@given(drawn=channels(late=False), order=st.data())
def test_packs_equal_a_plain_sort_of_everything_by_tick(
    drawn: Channels, order: st.DataObject
) -> None:
    merge = tick_merge(*drawn.logs)
    packs = run(merge, drawn.logs, order, dict.fromkeys(drawn.logs, FIRST_ID))
    everything = [
        each for log in drawn.logs.values() for batch in log for each in batch if each.type != 1200
    ]
    assert [pack.end_ts for pack in packs] == drawn.common
    assert [pack.begin_ts for pack in packs] == [0, *drawn.common[:-1]]
    for pack in packs:
        expected = [each.id for each in everything if pack.begin_ts < each.end_ts <= pack.end_ts]
        assert sorted(each.id for each in pack.messages) == sorted(expected)


@given(late=st.booleans(), order=st.data())
def test_any_end_position_reproduces_the_remaining_packs_exactly(
    late: bool, order: st.DataObject
) -> None:
    drawn = order.draw(channels(late=late))
    packs = run(tick_merge(*drawn.logs), drawn.logs, order, dict.fromkeys(drawn.logs, FIRST_ID))
    number = order.draw(st.integers(0, len(packs) - 1))
    follow = packs[number + 1 :]
    merge = tick_merge(*drawn.logs)
    for position in packs[number].end_positions:
        merge.seek(position)
    starts = {position.channel: position.message_id for position in packs[number].end_positions}
    again = run(merge, drawn.logs, order, starts)
    assert [told(each) for each in again] == [told(each) for each in follow]
    assert [each.end_positions for each in again] == [each.end_positions for each in follow]
    assert [each.start_positions for each in again] == [each.start_positions for each in follow]
