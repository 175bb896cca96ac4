"""What every log of the real chain keeps, whatever runs at once: I5 and I6, over restarts too."""

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.state import SegmentLimits
from tests.chaos.judge.entries import judge_entries
from tests.interceptors.live_channel import (
    Limits,
    LiveChannel,
    delete,
    group_of,
    insert,
    insert_body,
    messages_in,
    settle_tasks,
)
from wal.entry import LogEntry
from wal.errors import StreamingNodeError
from wal.headers import MessageType
from wal.memory_store import MemoryLogStore

LIMITS = Limits(segment=SegmentLimits(rows_max=4))
ACTIONS = (
    "insert",
    "upsert",
    "pack",
    "pack",
    "begin",
    "body",
    "body",
    "commit",
    "rollback",
    "create partition",
    "drop partition",
    "drop",
    "cut",
    "seal",
    "roll back",
    "hold",
    "release",
)
Step = tuple[str, int, bool]
"""What, of which collection and shard, and whether everything else comes to rest before the
next.
"""
calm = st.sampled_from([True, True, False])
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), calm), max_size=25)


@dataclass
class Clients:
    """Calls that run beside each other on one channel; what they are refused is theirs."""

    channel: LiveChannel
    transactions: list[int]
    known: list[CollectionInfo]
    running: list[asyncio.Task[Any]] = field(default_factory=list)

    def start(self, call: Awaitable[object]) -> None:
        async def run() -> None:
            with suppress(StreamingNodeError):
                await call

        self.running.append(asyncio.get_running_loop().create_task(run()))

    async def begin(self) -> None:
        self.transactions.append(await self.channel.begin(60_000))

    # one arm for each action
    async def step(self, action: str, number: int, *, rests: bool) -> None:  # noqa: C901, PLR0912
        channel = self.channel
        infos = self.channel.shard.catalog.collections()
        info = infos[number % len(infos)]
        shard = number // 2
        txn_id = self.transactions[number % len(self.transactions)] if self.transactions else 0
        match action:
            case "insert":
                self.start(channel.append(insert(info, 1 + number, shard=shard)))
            case "upsert":
                self.start(channel.transact(delete(info, shard=shard), insert(info, shard=shard)))
            case "pack":  # one group of each collection, some of which may be gone
                groups = [
                    group_of(delete(each), insert(each, 1 + number, shard=shard))
                    for each in self.known
                ]
                groups[0].is_transaction = True
                self.running += channel.start(*groups)
            case "begin":
                self.start(self.begin())
            case "body" if txn_id:
                self.start(
                    channel.append(insert_body(info, 1 + number, shard=shard, txn_id=txn_id))
                )
            case "commit" if txn_id:
                self.start(channel.commit(txn_id))
            case "rollback" if txn_id:
                self.start(channel.rollback(txn_id))
            case "create partition":
                self.start(channel.create_partition(info, f"part{len(self.running)}"))
            case "drop partition" if len(info.partitions) > 1:
                self.start(channel.drop_partition(info, info.partitions[-1].id))
            case "drop" if info.name == "b":  # the other one stays
                self.start(channel.drop_collection(info))
            case "cut":
                self.start(channel.cut())
            case "seal":
                self.start(channel.sealer.seal_due(channel.append_group))
            case "roll back":
                self.start(channel.txn.roll_back_due(channel.append_group))
            case "hold":
                channel.log.release()
                channel.log.hold()
            case "release":
                channel.log.release()
            case _:
                pass  # nothing there to do it with
        if rests:
            await settle_tasks()

    async def end(self) -> None:
        self.channel.log.release()
        await settle_tasks()
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


async def entries_of_lives(lives: list[list[Step]]) -> list[LogEntry]:
    """Let clients do the steps of each life on a channel that is recovered from the log before, and
    return that log.
    """
    memory = await MemoryLogStore().open_log("p0")
    transactions: list[int] = []
    known: list[CollectionInfo] = []
    for life in lives:
        async with LiveChannel.open(memory, LIMITS) as channel:
            if not known:
                known += [await channel.create_collection(name, shards=2) for name in ("a", "b")]
            clients = Clients(channel, transactions, known)
            for action, number, rests in life:
                await clients.step(action, number, rests=rests)
            await clients.end()
    return await memory.read(memory.first_position, bytes_max=1 << 40)


@settings(max_examples=60)
@given(lives=st.lists(steps, min_size=1, max_size=3))
def test_no_transaction_spans_a_schema_change_and_every_insert_is_inside_its_segments_life(
    lives: list[list[Step]],
) -> None:
    assert list(judge_entries(asyncio.run(entries_of_lives(lives)))) == []


DONE = ("insert", "begin", "body", "commit", "create partition", "insert", "cut")


@pytest.mark.parametrize(
    "moved, to, said",
    [
        (MessageType.CREATE_PARTITION, MessageType.COMMIT_TXN, "spans a schema change"),
        (MessageType.CREATE_SEGMENT, MessageType.CREATE_PARTITION, "which does not grow there"),
        (MessageType.CUT, MessageType.CREATE_PARTITION, "which does not grow there"),
        (MessageType.CUT, MessageType.CREATE_SEGMENT, "growing are []"),
    ],
    ids=[
        "a schema change inside",
        "a segment made late",
        "a segment sealed early",
        "a cut too early",
    ],
)
def test_a_log_whose_entries_changed_places_is_found(
    moved: MessageType, to: MessageType, said: str
) -> None:
    entries = asyncio.run(entries_of_lives([[(action, 0, True) for action in DONE]]))
    assert list(judge_entries(entries)) == []
    types = [messages_in(entry)[0].type for entry in entries]
    entry = entries.pop(types.index(moved))
    types.remove(moved)
    entries.insert(types.index(to), entry)
    assert said in " ".join(judge_entries(entries))
