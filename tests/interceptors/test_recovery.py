"""One state, however it came about: live appends, a whole replay, or any checkpoint and the rest of
the log.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interceptors.recovery import recover
from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.state import SegmentLimits, ShardState
from interceptors.txn_session import TxnLimits
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    delete,
    delete_body,
    group_of,
    insert,
    insert_body,
)
from wal.entry import TransactionBuffer
from wal.errors import Corrupt, StorageFull, StreamingNodeError, Truncated
from wal.headers import DDL, CutHeader, InsertHeader, MessageType
from wal.message import Message, TransactionMessage

TIGHT = Limits(
    txn=TxnLimits(size_bytes_max=2000, age_s_max=30, keepalive_ms_default=5_000),
    segment=SegmentLimits(bytes_max=60, growing_bytes_high=300, growing_bytes_low=100),
)


@dataclass
class Checkpoint:
    """What a flusher would save: where to resume, the tick, the state."""

    position: int
    tick: int
    shard_state: bytes


@dataclass
class History:
    """A live channel with a walk over it; each step picks its subject by a number."""

    channel: LiveChannel
    collections: list[CollectionInfo] = field(default_factory=list)
    partitions: list[tuple[CollectionInfo, int]] = field(default_factory=list)
    transactions: list[int] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    async def walk(self, steps: list[tuple[str, int]]) -> None:
        for name, number in steps:
            step: Callable[[int], Awaitable[object]] = getattr(self, name)
            if self.collections or name in {"create", "begin", "pass_time"}:
                with suppress(StreamingNodeError):  # refused, so it must have changed nothing
                    await step(number)
            self._checkpoint()

    def _checkpoint(self) -> None:
        state = self.channel.shard.state
        self.checkpoints.append(
            Checkpoint(self.channel.resume_position, state.tick, state.snapshot())
        )

    def _collection(self, number: int) -> CollectionInfo:
        live = self.channel.shard.catalog.collections()
        known = live if live and number % 6 else self.collections  # now and then one that is gone
        return known[number % len(known)]

    def _txn(self, number: int) -> int:
        recent = self.transactions[-3:]
        return recent[number % len(recent)] if recent else 0

    async def create(self, number: int) -> None:
        self.collections.append(
            await self.channel.create_collection(f"c{number % 3}", shards=1 + number % 2)
        )

    async def drop(self, number: int) -> None:
        await self.channel.drop_collection(self._collection(number))

    async def create_partition(self, number: int) -> None:
        info = self._collection(number)
        self.partitions.append((info, await self.channel.create_partition(info, f"p{number % 2}")))

    async def drop_partition(self, number: int) -> None:
        if self.partitions:
            await self.channel.drop_partition(*self.partitions[number % len(self.partitions)])

    async def insert(self, number: int) -> None:
        info = self._collection(number)
        await self.channel.append(
            *(insert(info, 1 + number % 4, shard=shard) for shard in range(len(info.vchannels)))
        )

    async def insert_into_partition(self, number: int) -> None:
        if self.partitions:
            info, partition_id = self.partitions[number % len(self.partitions)]
            await self.channel.append(insert(info, partition_id=partition_id))

    async def delete(self, number: int) -> None:
        await self.channel.append(delete(self._collection(number)))

    async def upsert(self, number: int) -> None:
        info = self._collection(number)
        await self.channel.transact(delete(info), insert(info, 1 + number % 3), insert(info))

    async def pack(self, number: int) -> None:
        infos = [self._collection(number + each) for each in range(3)]
        shards = [number % len(info.vchannels) for info in infos]
        groups = [
            group_of(insert(info, 1 + number % 4, shard=shard), delete(info, shard=shard))
            for info, shard in zip(infos, shards, strict=True)
        ]
        groups += [group_of(delete(info), insert(info)) for info in infos[:2]]
        groups[1].is_transaction = groups[4].is_transaction = True
        await self.channel.pack(*groups)

    async def begin(self, _: int) -> None:
        self.transactions.append(await self.channel.begin())

    async def body(self, number: int) -> None:
        info = self._collection(number // 3)
        txn_id = self._txn(number)
        if txn_id:
            rows = insert_body(info, 1 + number % 3, txn_id=txn_id)
            await self.channel.append(delete_body(info, txn_id=txn_id), rows)

    async def commit(self, number: int) -> None:
        if txn_id := self._txn(number):
            await self.channel.commit(txn_id)

    async def rollback(self, number: int) -> None:
        if txn_id := self._txn(number):
            await self.channel.rollback(txn_id)

    async def cut(self, _: int) -> None:
        await self.channel.cut()

    async def seal(self, _: int) -> None:
        await self.channel.sealer.seal_due(self.channel.append_group)

    async def pass_time(self, number: int) -> None:
        self.channel.pass_ms(1000 * (number % 8))
        await self.channel.txn.roll_back_due(self.channel.append_group)

    async def refused_insert(self, number: int) -> None:
        self.channel.log.refusal = lambda _: StorageFull("disk", 1, 2)
        try:
            await self.channel.append(insert(self._collection(number)))
        finally:
            self.channel.log.refusal = lambda _: None


STEPS = [
    name
    for name in vars(History)
    if not name.startswith("_") and name not in {"walk", *History.__annotations__}
]
LIKELY = [*STEPS, *("insert", "pack", "begin", "body", "body", "commit") * 2]
walks = st.lists(st.tuples(st.sampled_from(LIKELY), st.integers(0, 11)), min_size=1, max_size=40)


def run(steps: list[tuple[str, int]], check: Callable[[History], Awaitable[None]]) -> None:
    async def main() -> None:
        async with LiveChannel.open(limits=TIGHT) as channel:
            history = History(channel)
            await history.walk([("create", 0), *steps])
            await check(history)

    anyio.run(main)


@given(walks, st.data())
def test_any_checkpoint_and_the_rest_of_the_log_make_the_live_channel(
    steps: list[tuple[str, int]], data: st.DataObject
) -> None:
    async def check(history: History) -> None:
        channel = history.channel
        saved = data.draw(st.sampled_from(history.checkpoints))
        recovered = await recover(
            channel.memory, position=saved.position, tick=saved.tick, shard_state=saved.shard_state
        )
        assert recovered.shard_state.snapshot() == channel.shard.state.snapshot()
        for begin_message, bodies in recovered.open_transactions:
            live = channel.txn.bodies_of(begin_message.txn_id)
            assert [body.header for body in live] == [body.header for body in bodies]
        assert len(recovered.open_transactions) == len(channel.txn.sessions)

    run(steps, check)


@given(walks)
def test_replay_of_any_prefix_makes_the_state_of_that_moment(steps: list[tuple[str, int]]) -> None:
    async def check(history: History) -> None:
        expected = {
            ShardState.restore(saved.shard_state).position: saved.shard_state
            for saved in history.checkpoints
        }
        replayed = ShardState()
        buffer = TransactionBuffer()
        for entry in await history.channel.entries():
            for message in buffer.observe(entry):
                replayed.observe(message)
                replayed.observe(message)  # a repeat does nothing
                if message.position in expected:
                    assert replayed.snapshot() == expected.pop(message.position)
        assert set(expected) <= {0}

    run(steps, check)


@given(walks)
def test_offsets_segments_cuts_and_transactions_keep_their_promises(
    steps: list[tuple[str, int]],
) -> None:
    async def check(history: History) -> None:
        visible = await history.channel.visible()
        _check_offsets_are_contiguous(visible)
        _check_rows_lie_between_creation_and_seal(visible)
        _check_no_transaction_spans_an_exclusive_message(visible)
        numbers = [
            m.header.number
            for m in visible
            if isinstance(m, Message) and isinstance(m.header, CutHeader)
        ]
        assert numbers == list(range(1, len(numbers) + 1))

    run(steps, check)


def _rows(message: Message | TransactionMessage) -> list[Message]:
    return list(message.bodies)


def _check_offsets_are_contiguous(visible: list[Message | TransactionMessage]) -> None:
    next_offsets: dict[str, int] = {}
    for message in visible:
        for row in _rows(message):
            offset = next_offsets.setdefault(row.vchannel, 0)
            if isinstance(row.header, InsertHeader):
                assert row.header.first_offset == offset
                next_offsets[row.vchannel] = offset + row.header.rows
            elif row.type is MessageType.DELETE:
                assert getattr(row.header, "next_offset", None) == offset


def _check_rows_lie_between_creation_and_seal(visible: list[Message | TransactionMessage]) -> None:
    growing: set[int] = set()
    for message in visible:
        for row in _rows(message):
            match row.type:
                case MessageType.CREATE_SEGMENT:
                    growing.add(getattr(row.header, "segment_id", 0))
                case MessageType.FLUSH:
                    growing.remove(getattr(row.header, "segment_id", 0))
                case MessageType.CUT:
                    assert isinstance(row.header, CutHeader)
                    growing -= set(row.header.segment_ids)
                case MessageType.INSERT:
                    assert getattr(row.header, "segment_id", 0) in growing
                case _:
                    pass


def _check_no_transaction_spans_an_exclusive_message(
    visible: list[Message | TransactionMessage],
) -> None:
    fences: dict[str, int] = {}
    for message in visible:
        if message.type in DDL and isinstance(message, Message):
            fences[message.vchannel] = message.time_tick
        elif isinstance(message, TransactionMessage):
            assert all(fences.get(body.vchannel, 0) < message.txn_id for body in message.bodies)


@pytest.mark.anyio
async def test_commit_whose_begin_is_before_the_checkpoint_is_corrupt() -> None:
    async with LiveChannel.open() as channel:
        txn_id = await channel.begin()
        position = channel.memory.next_position
        tick = channel.ticks.last
        await channel.commit(await channel.begin())
        await channel.commit(txn_id)
        with pytest.raises(Corrupt, match="begins before"):
            await recover(channel.memory, position=position, tick=tick)


@pytest.mark.anyio
async def test_checkpoint_before_the_earliest_entry_is_refused() -> None:
    async with LiveChannel.open() as channel:
        await channel.create_collection("a")
        for _ in range(3):
            await channel.cut()
        await channel.memory.truncate(3)
        with pytest.raises(Truncated):
            await recover(channel.memory, position=1)


@pytest.mark.anyio
async def test_messages_of_an_unknown_collection_are_passed_over() -> None:
    async with LiveChannel.open() as channel:
        info = await channel.create_collection("a")
        first = channel.memory.next_position
        await channel.append(insert(info))
        await channel.append(delete(info))
        await channel.drop_collection(info)
        recovered = await recover(channel.memory, position=first)
    assert recovered.shard_state.segments == {}


@pytest.mark.anyio
async def test_commits_in_what_is_read_are_known_and_what_began_before_it_is_unknown() -> None:
    async with LiveChannel.open() as channel:
        info = await channel.create_collection("a")
        early = await channel.begin()
        spanning = await channel.begin()
        await channel.commit(early)
        position = channel.memory.next_position
        tick = channel.ticks.last
        await channel.commit(spanning)
        late = await channel.begin()
        given_up = await channel.begin()
        await channel.append(insert_body(info, txn_id=late))
        await channel.commit(late)
        await channel.rollback(given_up)
        whole = (await recover(channel.memory)).commits
        part = (await recover(channel.memory, position=position, tick=tick + 1000)).commits
    assert [each in whole for each in (early, spanning, late, given_up)] == [
        True,
        True,
        True,
        False,
    ]
    assert whole.known_after == 0
    assert [each in part for each in (early, spanning, late, given_up)] == [
        False,
        True,
        True,
        False,
    ]
    assert early < spanning <= part.known_after < late < given_up
