"""Packs of ticks follow from what channels hold, not from when it arrived, and start again from any end position."""

from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streamingnode.streams.messages import MessagePlace, MsgPack, MsgPosition, TsMsg, place_of, tick
from streamingnode.streams.ticks import Arrived, TickMerge
from tests.streamingnode.streams.stream_cases import VECTOR, VECTOR_PACKS, message, summary

Channels = dict[str, list[TsMsg]]


def arrived(channel: str, messages: list[TsMsg], first: int = 0) -> list[Arrived]:
    return [
        Arrived(each, MsgPosition(channel, MessagePlace(at, 0, 1).message_id, each.begin_ts), at)
        for at, each in enumerate(messages[first:], first)
    ]


def packs_of(merge: TickMerge) -> Iterator[MsgPack]:
    while taken := merge.take():
        yield taken.pack


def test_one_channel_gives_the_packs_of_the_reference() -> None:
    merge = TickMerge()
    merge.add("a")
    merge.push("a", arrived("a", VECTOR))
    packs = list(packs_of(merge))
    assert [summary(pack) for pack in packs] == VECTOR_PACKS
    for pack in packs:
        assert [each.timestamp for each in pack.start_positions] == [pack.begin_ts]
        assert [each.timestamp for each in pack.end_positions] == [pack.end_ts]


def test_a_pack_appears_only_when_both_channels_stand_at_one_tick() -> None:
    merge = TickMerge()
    merge.add("a")
    merge.add("b")
    merge.push("a", arrived("a", [message(1), tick(5), message(6), tick(10)]))
    assert merge.take() is None
    assert (merge.wants("a"), merge.wants("b")) == (False, True)
    merge.push("b", arrived("b", [message(2), tick(7)]))
    assert merge.take() is None
    assert (merge.wants("a"), merge.wants("b")) == (False, True)
    merge.push("b", arrived("b", [message(2), tick(7), tick(10)], 2))
    assert [summary(pack) for pack in packs_of(merge)] == [(0, 10, [1, 6, 2])]


def test_what_waits_for_a_later_tick_is_looked_at_once_for_each_pack_at_most() -> None:
    """A thousand messages for the far future must not be walked by each of a thousand packs."""
    looked: list[int] = []

    class Counted(TsMsg, frozen=True):
        def __getattribute__(self, name: str) -> object:
            if name == "end_ts":
                looked.append(1)
            return super().__getattribute__(name)

    far = [Counted(id=at, begin_ts=5000, end_ts=5000, type=message(1).type) for at in range(1000)]
    merge = TickMerge()
    merge.add("a")
    merge.push("a", arrived("a", far + [tick(at) for at in range(1, 1001)]))
    assert len(list(packs_of(merge))) == 1000
    assert len(looked) < 5 * len(far)


def test_a_message_costs_the_same_with_many_channels() -> None:
    """Those that are not pushed to are not looked at."""
    merge = TickMerge()
    for at in range(100):
        merge.add(f"c{at}")
    touched: list[str] = []
    advance = merge._advance

    def counted(channel: object) -> None:
        touched.append(channel.name)  # type: ignore[attr-defined]
        advance(channel)  # type: ignore[arg-type]

    merge._advance = counted  # type: ignore[method-assign]
    for at in range(50):
        merge.push("c0", arrived("c0", [message(at + 1)]))
    assert touched == ["c0"] * 50


@st.composite
def streams(draw: st.DrawFn) -> tuple[Channels, list[int]]:
    """Return channels that keep their promise (nothing at or below a tick follows it), and the ticks all of them have."""
    shared = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=6)))
    channels: Channels = {}
    numbers = iter(range(10_000))
    for name in draw(st.sampled_from(["a", "ab", "abc"])):
        extra = draw(st.sets(st.integers(1, 60), max_size=3))
        ticks = sorted({*shared, *(each for each in extra if each < shared[-1])})
        messages: list[TsMsg] = []
        floor = 0
        for ts in ticks:
            ends = draw(st.lists(st.integers(floor + 1, 70), max_size=4))
            messages += [message(end, number=next(numbers)) for end in ends]
            messages.append(tick(ts))
            floor = ts
        channels[name] = messages
    return channels, shared


@given(streams(), st.data())
def test_packs_are_a_plain_sort_by_tick_however_messages_arrive(
    stream: tuple[Channels, list[int]], data: st.DataObject
) -> None:
    channels, _ = stream
    packs = run(channels, data)
    everything = sorted(
        (each.end_ts, each.id) for messages in channels.values() for each in messages if each.type != tick(0).type
    )
    last = packs[-1].end_ts
    assert [key for pack in packs for key in sorted((each.end_ts, each.id) for each in pack.msgs)] == [
        key for key in everything if key[0] <= last
    ]
    for pack, after in zip(packs, [*packs[1:], None], strict=True):
        assert all(pack.begin_ts < each.end_ts <= pack.end_ts for each in pack.msgs)
        if after is not None:
            assert (after.begin_ts, after.start_positions) == (pack.end_ts, pack.end_positions)


@given(streams(), st.data())
def test_any_start_or_end_position_gives_the_remaining_packs_again(
    stream: tuple[Channels, list[int]], data: st.DataObject
) -> None:
    channels, shared = stream
    packs = run(channels, data)
    assert packs[-1].end_ts == shared[-1]
    at = data.draw(st.integers(0, len(packs) - 1))
    ends = data.draw(st.booleans())
    positions = packs[at].end_positions if ends else packs[at].start_positions
    assert run(channels, data, positions) == packs[at + ends :]


def run(channels: Channels, data: st.DataObject, positions: list[MsgPosition] | None = None) -> list[MsgPack]:
    """Push channels in an order that is drawn, some only when the merge wants them, and return all packs."""
    merge = TickMerge()
    left: dict[str, list[Arrived]] = {}
    if positions is None:
        for name, messages in channels.items():
            merge.add(name)
            left[name] = arrived(name, messages)
    else:
        merge.seek(positions)
        for position in positions:
            first = place_of(position).queue_id
            left[position.channel] = arrived(position.channel, channels[position.channel], first)
    packs: list[MsgPack] = []
    while any(left.values()):
        name = data.draw(st.sampled_from(sorted(name for name, rest in left.items() if rest)))
        count = data.draw(st.integers(1, len(left[name])))
        merge.push(name, left[name][:count])
        del left[name][:count]
        if data.draw(st.booleans()):
            packs += packs_of(merge)
    packs += packs_of(merge)
    return [msgspec.structs.replace(pack) for pack in packs]
