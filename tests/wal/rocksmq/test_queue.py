"""Topics and groups on a real store: what is produced is delivered, acknowledged, and found
again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.wal.rocksmq.queues import OPTIONS, Clock, open_queue, opened, opened_in_memory
from wal.codec import MESSAGES_PER_ENTRY_MAX
from wal.entry_log import Batch
from wal.errors import (
    AlreadyExists,
    Corrupt,
    GroupNotFound,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    StorageFull,
    TooLarge,
    TopicNotFound,
    Truncated,
)
from wal.position import POSITION_MAX
from wal.rocks.layout import entry_key
from wal.rocksmq.contract import CONSUME_BYTES_MAX
from wal.rocksmq.group import GAPS_MAX
from wal.rocksmq.messages import EntryCache, ProducerMessage
from wal.rocksmq.queue import RocksMQ
from wal.rocksmq.reading import READ_BYTES

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["disk", "memory"])
async def mq(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[RocksMQ]:
    in_memory = request.param == "memory"
    queue = opened_in_memory(clock) if in_memory else opened(tmp_path / "node", clock)
    async with queue as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        yield mq


async def test_a_message_that_was_produced_is_consumed_with_its_properties(mq: RocksMQ) -> None:
    [produced] = await mq.produce("t", [ProducerMessage(b"hello", {"kind": "greeting"})])
    [message] = await mq.consume("t", "g", 10)
    assert (message.message_id, message.payload, message.properties) == (
        produced,
        b"hello",
        {"kind": "greeting"},
    )
    assert await mq.consume("t", "g", 10) == []


async def test_ids_of_a_topic_follow_each_other_whoever_produces(mq: RocksMQ) -> None:
    ids = await asyncio.gather(
        *(mq.produce("t", [b"%d" % number] * (1 + number % 3)) for number in range(50))
    )
    flat = [each for one in ids for each in one]
    assert flat == list(range(flat[0], flat[0] + len(flat)))
    found = await mq.consume("t", "g", 1000)
    assert [message.message_id for message in found] == flat
    assert [message.payload for message in found] == [
        b"%d" % n for n in range(50) for _ in range(1 + n % 3)
    ]


async def test_what_was_acknowledged_stays_so_and_the_rest_comes_again_after_reopening(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        ids = await mq.produce("t", [b"0", b"1", b"2", b"3", b"4"])
        await mq.consume("t", "g", 4)
        await mq.ack("t", "g", [ids[0], ids[2]])
        before = await mq.info()
    async with opened(tmp_path / "node") as mq:
        assert [message.payload for message in await mq.consume("t", "g", 9)] == [b"1", b"3", b"4"]
        [after] = (await mq.info()).values()
        assert (after.begin_id, after.end_id, after.bytes) == (before["t"].begin_id, ids[-1], 5)
        assert (after.groups["g"].current_id, after.groups["g"].lag, after.groups["g"].held) == (
            ids[1],
            3,
            3,
        )
        assert list(await mq.produce("t", [b"5"])) == [ids[-1] + 1]


async def test_an_acknowledged_message_above_a_gap_never_comes_again(
    mq: RocksMQ, clock: Clock
) -> None:
    ids = await mq.produce("t", [b"0", b"1", b"2", b"3"])
    await mq.consume("t", "g", 4)
    await mq.ack("t", "g", [ids[1], ids[3]])
    clock.ms += 30_000
    assert [message.message_id for message in await mq.consume("t", "g", 9)] == [ids[0], ids[2]]
    await mq.ack("t", "g", [ids[0], ids[0], ids[1]])
    assert (await mq.info())["t"].groups["g"].current_id == ids[2]


async def test_consumers_of_one_group_compete_and_those_of_another_do_not(mq: RocksMQ) -> None:
    await mq.create_consumer_group("t", "other")
    ids = await mq.produce("t", [b"%d" % number for number in range(6)])
    async with (
        await mq.register_consumer("t", "g") as one,
        await mq.register_consumer("t", "g") as two,
    ):
        shares = [
            [message.message_id for message in await each.consume(2)]
            for each in (one, two, one, two)
        ]
    assert shares == [list(ids[:2]), list(ids[2:4]), list(ids[4:]), []]
    assert [message.message_id for message in await mq.consume("t", "other", 9)] == list(ids)


async def test_without_a_time_limit_what_a_consumer_holds_is_its_own(
    mq: RocksMQ, clock: Clock
) -> None:
    await mq.produce("t", [b"0"])
    consumer = await mq.register_consumer("t", "g", ack_timeout_s=None)
    await consumer.consume(1)
    clock.ms += 10**9
    assert await mq.consume("t", "g", 1) == []


async def test_a_cancelled_consume_loses_nothing(mq: RocksMQ) -> None:
    await mq.produce("t", [b"0"])
    mq._reader._cache = EntryCache()  # so that it suspends, to read
    consuming = asyncio.ensure_future(mq.consume("t", "g", 1))
    await asyncio.sleep(0)
    assert mq._writer.topics["t"].groups["g"].held
    consuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consuming
    assert [message.payload for message in await mq.consume("t", "g", 1)] == [b"0"]


async def test_who_asks_after_a_cancelled_consume_gets_its_messages_first_even_while_it_reads(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await mq.produce("t", [b"0", b"1", b"2", b"3"])
    mq._reader._cache = EntryCache()
    reading = asyncio.Event()
    gate = asyncio.Event()
    log = mq._writer.topics["t"].log
    read = log.read

    async def read_late(position: int, *, bytes_max: int) -> Any:
        reading.set()
        await gate.wait()
        return await read(position, bytes_max=bytes_max)

    monkeypatch.setattr(log, "read", read_late)
    consuming = asyncio.ensure_future(mq.consume("t", "g", 2))
    async with asyncio.timeout(20):
        await reading.wait()
    consuming.cancel()
    following = asyncio.ensure_future(mq.consume("t", "g", 2))
    await asyncio.sleep(0)
    gate.set()
    assert [message.message_id for message in await following] == [ids[0], ids[1]]
    assert consuming.cancelled()


async def test_what_follows_is_read_before_it_is_asked_for(mq: RocksMQ) -> None:
    for _ in range(3 * READ_BYTES >> 17):
        await mq.produce("t", [bytes(1 << 17)])
    mq._reader._cache = EntryCache()
    await mq.consume("t", "g", 1)
    assert mq._reader._ahead is None
    topic = mq._writer.topics["t"]
    half = topic.newest_half
    await mq.consume("t", "g", len(half))
    assert mq._reader._ahead is not None
    await mq._reader._ahead
    assert half.stop < topic.newest_half.start
    assert mq._reader._cache.find(topic.log_id, half.stop)
    assert mq._reader._cache.find(topic.log_id, topic.newest_half[-1])


async def test_what_many_produce_in_one_turn_is_cut_into_writes_and_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wal.rocksmq.writes.PRODUCE_BYTES_MAX", 1 << 20)
    store, mq = await open_queue(
        tmp_path / "other", rocks=msgspec.structs.replace(OPTIONS, queue_bytes_max=1 << 20)
    )
    await mq.create_topic("t")
    write = store.state.write
    written = list[int]()
    queued = list[int]()

    def watched(batch: Batch) -> Any:
        outcome = write(batch)
        written.append(sum(len(data) for _, _, data in batch.entries))
        queued.append(store.queued_bytes)
        return outcome

    monkeypatch.setattr(store.state, "write", watched)
    ids = await asyncio.gather(*(mq.produce("t", [bytes(300 << 10)]) for _ in range(40)))
    assert [each for one in ids for each in one] == list(range(ids[0][0], ids[0][0] + 40))
    assert max(written) < 2 << 20
    assert max(queued) < 4 << 20
    await mq.close()
    await store.close()


@pytest.mark.parametrize("ids", [7, None, ["7"], [7.0], [True], [[7]], [7, "7"], iter([7])])
async def test_what_are_no_ids_is_refused(mq: RocksMQ, ids: Any) -> None:
    with pytest.raises(InvalidArgument):
        await mq.ack("t", "g", ids)
    with pytest.raises(InvalidArgument):
        await mq.force_seek("t", "g", [ids])  # type: ignore[arg-type]


async def test_so_many_ids_that_their_acknowledgement_would_hold_the_event_loop_are_refused(
    mq: RocksMQ,
) -> None:
    ids = await mq.produce("t", [b""] * MESSAGES_PER_ENTRY_MAX)
    with pytest.raises(TooLarge, match="seek"):
        await mq.ack("t", "g", range(ids[0] - 1, ids[-1] + 1))
    await mq.ack("t", "g", ids)
    assert (await mq.info())["t"].groups["g"].lag == 0


async def test_a_group_begins_where_it_is_told_with_the_write_that_makes_it(tmp_path: Path) -> None:
    store, mq = await open_queue(tmp_path / "other")
    await mq.create_topic("t")
    ids = await mq.produce("t", [b"0", b"1", b"2"])
    version = store.state._version
    await mq.create_consumer_group("t", "late", at=POSITION_MAX)
    await mq.create_consumer_group("t", "middle", at=ids[1])
    assert store.state._version == version + 2
    await mq.close()
    await store.close()
    async with opened(tmp_path / "other") as mq:
        groups = (await mq.info())["t"].groups
        assert (groups["late"].current_id, groups["middle"].current_id) == (ids[-1] + 1, ids[1])


async def test_seeking_goes_in_both_directions_and_includes_the_message(mq: RocksMQ) -> None:
    ids = await mq.produce("t", [b"%d" % number for number in range(5)])
    await mq.ack("t", "g", ids)
    await mq.seek("t", "g", ids[1])
    assert [message.message_id for message in await mq.consume("t", "g", 2)] == [ids[1], ids[2]]
    await mq.seek("t", "g", ids[3])
    assert [message.message_id for message in await mq.consume("t", "g", 9)] == [ids[3], ids[4]]
    await mq.seek_to_latest("t", "g")
    assert await mq.consume("t", "g", 9) == []
    [last] = await mq.produce("t", [b"5"])
    assert [message.message_id for message in await mq.consume("t", "g", 9)] == [last]


async def test_seeking_outside_of_the_topic_names_where_it_begins_and_ends(mq: RocksMQ) -> None:
    ids = await mq.produce("t", [b"0", b"1"])
    with pytest.raises(Truncated) as refused:
        await mq.seek("t", "g", ids[0] - 1)
    assert refused.value.earliest == ids[0]
    with pytest.raises(InvalidArgument, match=str(ids[1] + 1)):
        await mq.seek("t", "g", ids[1] + 2)
    await mq.force_seek("t", "g", 0)
    assert (await mq.info())["t"].groups["g"].current_id == ids[0]


async def test_the_latest_message_and_an_empty_topic_are_told_apart(mq: RocksMQ) -> None:
    assert await mq.get_latest_msg("t") == -1
    await mq.check_topic_valid("t")
    ids = await mq.produce("t", [b"0", b"1"])
    assert await mq.get_latest_msg("t") == ids[-1]
    with pytest.raises(AlreadyExists):
        await mq.check_topic_valid("t")
    with pytest.raises(TopicNotFound):
        await mq.check_topic_valid("other")


async def test_a_topic_made_anew_begins_above_the_ids_of_the_old_one(
    mq: RocksMQ, clock: Clock
) -> None:
    old = await mq.produce("t", [b"old"] * 10)
    await mq.destroy_topic("t")
    clock.ms -= 10**9  # the clock was set back meanwhile
    await mq.create_topic("t")
    await mq.create_consumer_group("t", "g")
    new = await mq.produce("t", [b"new"])
    assert new[0] > old[-1]
    assert [message.payload for message in await mq.consume("t", "g", 20)] == [b"new"]


async def test_ids_are_not_used_again_when_the_node_opens_with_a_clock_set_back(
    tmp_path: Path,
) -> None:
    late = Clock()
    early = Clock()
    early.ms -= 10**9
    async with opened(tmp_path / "node", late) as mq:
        await mq.create_topic("t")
        old = await mq.produce("t", [b"old"] * 10)
        await mq.destroy_topic("t")
    async with opened(tmp_path / "node", early) as mq:
        await mq.create_topic("t")
        assert (await mq.produce("t", [b"new"]))[0] > old[-1]


async def test_destroying_a_topic_leaves_its_siblings_alone(mq: RocksMQ) -> None:
    for name in ("t2", "tt", "t-2"):
        await mq.create_topic(name)
        await mq.create_consumer_group(name, "g")
        await mq.produce(name, [name.encode()])
    await mq.destroy_topic("t")
    for name in ("t2", "tt", "t-2"):
        assert [message.payload for message in await mq.consume(name, "g", 9)] == [name.encode()]


async def test_a_damaged_topic_is_refused_and_may_be_destroyed_and_made_anew(
    tmp_path: Path,
) -> None:
    store, mq = await open_queue(tmp_path / "other")
    await mq.create_topic("t")
    [last] = await mq.produce("t", [b"0"])
    store._engine.entries.delete(entry_key(mq._writer.topics["t"].log_id, last))
    await mq.close()
    in_term = mq._writer._in_term
    mq = RocksMQ(store, mq._options, now_ms=mq._now_ms, elapsed_ms=mq._elapsed_ms, in_term=in_term)
    with pytest.raises(Corrupt, match="'t'"):
        await mq.produce("t", [b"1"])
    await mq.destroy_topic("t")
    await mq.create_topic("t")
    assert (await mq.produce("t", [b"1"]))[0] > last
    await mq.close()
    await store.close()


async def test_a_topic_whose_space_cannot_be_given_back_now_is_destroyed_all_the_same(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reclaim(_batch: Batch) -> None:
        raise StorageFull("here", 0, 1)

    monkeypatch.setattr(mq._state, "reclaim", reclaim)
    await mq.destroy_topic("t")
    assert await mq.info() == {}


async def test_a_consumer_of_a_destroyed_topic_or_group_hears_of_it(mq: RocksMQ) -> None:
    await mq.create_consumer_group("t", "g2")
    waiting = [asyncio.ensure_future(mq.consume("t", group, 1, wait_s=60)) for group in ("g2", "g")]
    await asyncio.sleep(0)
    await mq.destroy_consumer_group("t", "g2")
    with pytest.raises(GroupNotFound):
        await waiting[0]
    await mq.destroy_topic("t")
    with pytest.raises(TopicNotFound):
        await waiting[1]


@pytest.mark.parametrize("name", ["", "a/b", "_own", "x" * 256, "a\nb", 7])
async def test_a_name_that_cannot_be_is_refused(mq: RocksMQ, name: str) -> None:
    with pytest.raises(InvalidArgument):
        await mq.create_topic(name)
    with pytest.raises(InvalidArgument):
        await mq.create_consumer_group("t", name)


async def test_every_call_on_what_is_not_there_says_so(mq: RocksMQ) -> None:
    calls: list[Callable[[str, str], Awaitable[object]]] = [
        mq.destroy_consumer_group,
        mq.register_consumer,
        lambda topic, group: mq.consume(topic, group, 1),
        lambda topic, group: mq.ack(topic, group, [1]),
        lambda topic, group: mq.seek(topic, group, 1),
        lambda topic, group: mq.force_seek(topic, group, 1),
        mq.seek_to_latest,
        mq.notify,
    ]
    for call in calls:
        with pytest.raises(TopicNotFound):
            await call("none", "g")
        with pytest.raises(GroupNotFound):
            await call("t", "none")
    for lookup in (mq.destroy_topic("none"), mq.get_latest_msg("none"), mq.produce("none", [b"x"])):
        with pytest.raises(TopicNotFound):
            await lookup
    assert not await mq.exist_consumer_group("t", "none")
    assert await mq.exist_consumer_group("t", "g")
    with pytest.raises(AlreadyExists):
        await mq.create_consumer_group("t", "g")
    await mq.create_topic("t")


async def test_every_call_after_closing_is_refused(mq: RocksMQ) -> None:
    await mq.close()
    await mq.close()
    calls = (
        mq.create_topic("x"),
        mq.produce("t", [b"x"]),
        mq.consume("t", "g", 1),
        mq.ack("t", "g", [1]),
        mq.info(),
    )
    for call in calls:
        with pytest.raises(OnShutdown):
            await call


NO_PROPERTIES: list[Any] = [{"a": 1}, {1: "a"}, 5, "ab", [1], {"a": "\ud800"}]


@pytest.mark.parametrize(
    "messages", [[], b"bytes", ["text"], *([ProducerMessage(b"x", each)] for each in NO_PROPERTIES)]
)
async def test_what_is_no_message_is_refused_and_leaves_nothing(
    mq: RocksMQ, messages: list[bytes]
) -> None:
    with pytest.raises(InvalidArgument):
        await mq.produce("t", messages)
    with pytest.raises(TooLarge):
        await mq.produce("t", [bytes(9 << 20)] * 2)
    assert await mq.get_latest_msg("t") == -1


async def test_acknowledging_what_was_never_produced_is_refused(mq: RocksMQ) -> None:
    ids = await mq.produce("t", [b"0"])
    for never in (ids[-1] + 1, -1):
        with pytest.raises(InvalidArgument, match=str(ids[-1])):
            await mq.ack("t", "g", [never])


async def test_gaps_between_acknowledged_messages_are_bounded(mq: RocksMQ) -> None:
    ids = await mq.produce("t", [b""] * (2 * GAPS_MAX + 3))
    await mq.ack("t", "g", ids[1 : 2 * GAPS_MAX : 2])
    with pytest.raises(Overloaded):
        await mq.ack("t", "g", [ids[-1]])
    await mq.ack("t", "g", [ids[0]])
    await mq.ack("t", "g", [ids[-1]])


async def test_large_messages_are_delivered_some_at_a_time_and_all_in_the_end(mq: RocksMQ) -> None:
    for number in range(5):
        await mq.produce("t", [bytes([number]) * (5 << 20)])
    first = await mq.consume("t", "g", 9)
    rest = await mq.consume("t", "g", 9)
    assert [message.payload[0] for message in first + rest] == [0, 1, 2, 3, 4]
    assert 1 <= len(first) < 5


async def test_properties_count_as_bytes_of_a_delivery(mq: RocksMQ) -> None:
    for _ in range(3):
        await mq.produce("t", [ProducerMessage(b"", {"long": "x" * (CONSUME_BYTES_MAX // 2)})])
    assert [len(await mq.consume("t", "g", 9)) for _ in range(2)] == [2, 1]


async def test_of_scattered_messages_that_do_not_fit_together_the_rest_comes_later(
    mq: RocksMQ, clock: Clock
) -> None:
    ids = [(await mq.produce("t", [bytes(9 << 20)]))[0] for _ in range(6)]
    await mq.ack("t", "g", [ids[1], ids[3]])
    found = [[message.message_id for message in await mq.consume("t", "g", 9)] for _ in range(3)]
    assert found == [[ids[0], ids[2]], [ids[4], ids[5]], []]


async def test_acknowledging_nothing_writes_nothing_and_still_looks_for_the_group(
    mq: RocksMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mq._state, "write", None)  # what there is to write would meet it
    await mq.ack("t", "g", [])
    await mq.ack("t", "g", range(0))
    monkeypatch.undo()
    with pytest.raises(GroupNotFound):
        await mq.ack("t", "none", [])
