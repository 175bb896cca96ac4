"""A pack whose outcome is open is repeated in the next term: no write of it is in the log twice, or
when nobody wants it.
"""

import asyncio

import pytest

from interceptors.chain import Redo
from interceptors.errors import SequenceTooOld
from interceptors.shard.catalog import CollectionInfo
from tests.interceptors.live_channel import Fails, group_of, insert, settle_tasks
from tests.interceptors.live_wal import FEED, LiveWal
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import Indeterminate, StorageFull
from wal.headers import MessageType
from wal.position import CLIENT_PRODUCER_IDS, ProducerStamp

pytestmark = pytest.mark.anyio


async def created(live: LiveWal, name: str = "a") -> CollectionInfo:
    return await live.channel.create_collection(name)


def start(live: LiveWal, *groups: AppendGroup) -> list["asyncio.Future[AppendResult]"]:
    live.wal.packer._together = True
    return [asyncio.ensure_future(live.wal.append(group)) for group in groups]


async def rows_in(live: LiveWal) -> list[int]:
    """Return how many rows each insert in the log has, in order."""
    return [
        getattr(message.header, "rows", 0)
        for message in await live.channel.messages()
        if message.type is MessageType.INSERT
    ]


@pytest.mark.parametrize("fails", [Fails.KEPT, Fails.LOST])
async def test_groups_of_a_pack_that_failed_hear_one_result_each_and_are_in_the_log_once(
    fails: Fails,
) -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        groups = [group_of(insert(info, 1)), group_of(insert(info, 2)), group_of(insert(info, 3))]
        groups[1].producer = ProducerStamp(FEED, 1, 5)
        live.fail_once(fails)
        results = [await task for task in start(live, *groups)]
        assert await rows_in(live) == [10, 1, 2, 3]
        assert [result.row_offsets for result in results] == [
            {info.vchannels[0]: (first, count)} for first, count in [(10, 1), (11, 2), (13, 3)]
        ]
        ticks = [
            message.time_tick
            for message in await live.channel.messages()
            if message.type is MessageType.INSERT
        ]
        assert [result.time_tick for result in results] == ticks[1:]
        assert live.wal.status.reopened == 1


@pytest.mark.parametrize(
    "given_up", [False, True], ids=["known when it is repeated", "given up before it is decided"]
)
async def test_results_of_a_pack_in_doubt_are_worked_out_once_and_not_for_each_of_its_groups(
    given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Pack]()
    results_of = Pack.results

    def count(pack: Pack) -> list[AppendResult]:
        made.append(pack)
        return results_of(pack)

    monkeypatch.setattr(Pack, "results", count)
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        groups = [group_of(insert(info, 1)) for _ in range(20)]
        made.clear()
        if given_up:
            for sequence, group in enumerate(groups, 1):
                group.producer = ProducerStamp(FEED, 1, sequence)
            live.log.hold()
            appending = asyncio.ensure_future(live.channel.append_pack(Pack(groups)))
            await settle_tasks()
            appending.cancel()
            await settle_tasks()
            live.log.release()
            await live.channel.idempotency.settled(FEED)
            assert len(live.channel.idempotency.window.producers[FEED].results) == 20
        else:
            live.fail_once(Fails.KEPT)
            await asyncio.gather(*start(live, *groups))
        assert sum(not pack.messages for pack in made) == 1
        assert await rows_in(live) == [10] + [1] * 20


async def test_write_of_which_its_client_was_told_otherwise_is_not_written_again() -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        stamp = ProducerStamp(CLIENT_PRODUCER_IDS + 1, 1, 5)
        await live.wal.append(group_of(insert(info, 10)))
        pack = Pack([group_of(insert(info, 1), producer=stamp)])
        live.fail_once(Fails.LOST)
        with pytest.raises(Indeterminate):
            await live.channel.append_pack(pack)
        # Its connection was lost, so the client sent it over another one, and heard.
        await live.wal.append(group_of(insert(info, 1), producer=stamp))
        live.channel.idempotency.window.settle(stamp.producer_id, 6)
        pack.come_anew()
        (group,) = pack.groups
        await live.channel.append_pack(pack)
        assert isinstance(group.outcome, SequenceTooOld)
        assert await rows_in(live) == [10, 1]


class Script:
    """What becomes of the packs of rows that come to the log: each step is taken once, in order."""

    def __init__(self, live: LiveWal, *steps: Fails | str) -> None:
        self.steps = list(steps)
        self.until = asyncio.get_running_loop().create_future()
        self.tries: list[list[AppendGroup]] = []
        self._live = live
        live.log.refusal = self._refuse
        live.log.fails = self._fail

    def _refuse(self, pack: Pack) -> Exception | None:
        """Send the second group back, as shards do that lack a segment."""
        if pack.messages or not self.steps or isinstance(self.steps[0], Fails):
            return None
        self.steps.pop(0)
        return Redo(self.until, waiting_for="a segment", groups=[pack.groups[1]])

    def _fail(self, pack: Pack) -> Fails:
        if pack.messages or not self.steps:
            return Fails.NOT
        step = self.steps.pop(0)
        assert isinstance(step, Fails)
        self.tries.append(list(pack.groups))
        if step is not Fails.NOT:
            self._live.store.fail()
        return step


@pytest.mark.parametrize("fails", [Fails.KEPT, Fails.LOST])
async def test_group_that_left_a_repeated_pack_is_not_repeated_with_it_once_more(
    fails: Fails,
) -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        script = Script(live, Fails.LOST, "the second leaves", fails)
        first, second, third = start(live, *[group_of(insert(info, rows)) for rows in (1, 2, 4)])
        await asyncio.gather(first, third)
        script.until.set_result(None)
        await second
        assert await rows_in(live) == [10, 1, 4, 2]


async def test_group_whose_caller_gave_up_when_it_had_left_a_repeated_pack_is_not_written() -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        script = Script(live, Fails.LOST, "the second leaves")
        group = group_of(insert(info, 2))
        first, second = start(live, group_of(insert(info, 1)), group)
        await first
        assert not group.begun
        second.cancel()
        script.until.set_result(None)
        await live.wal.drain()
        assert await rows_in(live) == [10, 1]


async def test_group_that_comes_again_has_begun_once_the_log_may_have_it() -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        script = Script(live, Fails.LOST, "the second leaves")
        group = group_of(insert(info, 2))
        first, second = start(live, group_of(insert(info, 1)), group)
        await first
        assert not group.begun
        live.log.hold()
        script.until.set_result(None)
        await settle_tasks()
        assert await rows_in(live) == [10, 1, 2]
        assert group.begun
        live.log.release()
        await second


async def test_group_that_a_repeated_pack_finds_in_the_log_has_begun() -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        await live.wal.append(group_of(insert(info, 10)))
        live.fail_once(Fails.KEPT)
        group = group_of(insert(info, 2))
        await asyncio.gather(*start(live, group_of(insert(info, 1)), group))
        assert group.begun, "a deadline that strikes now says that it may have happened"


async def test_retry_in_a_pack_goes_on_in_the_next_term_with_the_first_try_that_it_joined() -> None:
    async with LiveWal.open() as live:
        info = await created(live)
        new = await created(live, "new")
        await live.wal.append(group_of(insert(info, 10)))
        live.log.refusal = refuse_segments
        live.channel.allocator._sleep = for_ever
        stamp = ProducerStamp(FEED, 1, 5)
        (first,) = start(live, group_of(insert(new, 1), producer=stamp))
        await settle_tasks()  # it waits for a segment, alone, until the term ends
        retry, other = start(
            live, group_of(insert(new, 1), producer=stamp), group_of(insert(info, 2))
        )
        assert (await other).row_offsets == {info.vchannels[0]: (10, 2)}
        live.fail_once(Fails.LOST)
        (last,) = start(live, group_of(insert(info, 4)))
        await last
        assert live.wal.status.reopened == 1
        live.log.refusal = lambda _: None
        assert await retry == await first
        assert await rows_in(live) == [10, 2, 4, 1]


async def for_ever(_: float) -> None:
    await asyncio.get_running_loop().create_future()


def refuse_segments(pack: Pack) -> Exception | None:
    is_segment = pack.first_type is MessageType.CREATE_SEGMENT
    return StorageFull("disk", 1, 2) if is_segment else None
