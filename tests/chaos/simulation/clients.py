"""The clients of a simulated node: each does drawn calls one after the other and notes what it was told and what it read.

Collection `a` only grows, `b` is upserted and deleted from and has a partition that comes and goes, `c` comes and goes.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import anyio
import pyarrow as pa

from interceptors.errors import CollectionNotFound, TransactionExpired
from streamingnode.node import Node
from streamingnode.writing.producer import Producer
from tests.chaos.journal import Clear, Drop, Made, Put
from tests.chaos.simulation.notes import KEYS, Notes
from tests.chaos.simulation.reading import Reading
from tests.chaos.simulation.world import PromiseBroken
from wal.errors import OnShutdown, StreamingNodeError

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "value": pa.int64()}
SCHEMA = pa.schema(FIELDS)
SHARDS = {"a": 2, "b": 1, "c": 1}
PARTITION = "eu"
PRODUCER = "simulated"


LEANINGS = (0.1, 1.0, 1.0, 4.0)


class _Kind(NamedTuple):
    """A kind of call, and how often it is made."""

    call: Callable[[], Awaitable[None]]
    weight: float


class Clients:
    """The clients of one life."""

    def __init__(self, notes: Notes, node: Node, life: int, *, truncated: bool) -> None:
        self.notes, self.node = notes, node
        self.reading = Reading(notes, node, life, truncated=truncated)
        self._choose: random.Random = notes.world.choose
        self._client = f"life {life}"
        self._producing, self._changing = asyncio.Lock(), asyncio.Lock()

    async def create(self) -> None:
        """Make the collections."""
        for name in SHARDS:
            await self._make(name)

    async def work(self, calls: int) -> None:
        """Have several clients do so many calls in all, then end."""
        clients, kinds = self._choose.randint(1, 4), self._kinds()
        async with asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(self._follow())
            writers = [tasks.create_task(self._call_often(calls // clients, kinds)) for _ in range(clients)]
            await asyncio.wait(writers)
            follower.cancel()

    async def _follow(self) -> None:
        with suppress(CollectionNotFound):
            await self.reading.follow(self._any())

    async def _call_often(self, calls: int, kinds: Sequence[_Kind]) -> None:
        for _ in range(calls):
            (call,) = self._choose.choices([kind.call for kind in kinds], [kind.weight for kind in kinds])
            try:
                await self._perhaps_cut_short(call)
            except OnShutdown:
                return
            except StreamingNodeError as error:
                self.notes.world.note(error.code)

    def _kinds(self) -> list[_Kind]:
        """Return what this life's clients do: rather this or rather that, so that rare things meet each other somewhere."""
        reading = self.reading
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self._insert),
            (3, self._upsert),
            (2, self._delete),
            (4, self._buffered),
            (3, self._streamed),
            (2, self._overlapping),
            (4, self._produce),
            (2, self._cut),
            (1, lambda: self._make("c")),
            (1, self._drop_collection),
            (1, self._make_partition),
            (1, self._drop_partition),
            (2, lambda: reading.scan(self._any(), reading.reader("scan"))),
            (2, lambda: reading.state(self._any())),
            (2, lambda: reading.read_by_name(self._any())),
            (1, lambda: asyncio.sleep(self._choose.random() * 0.5)),
        ]
        return [_Kind(call, weight * self._choose.choice(LEANINGS)) for weight, call in kinds]

    async def _perhaps_cut_short(self, call: Callable[[], Awaitable[None]]) -> None:
        if self._choose.random() > 0.06:
            return await call()
        with anyio.move_on_after(self._choose.random() * 0.01):
            await call()
        return None

    # --- rows -----------------------------------------------------------------------------------------------------------

    async def _insert(self) -> None:
        collection = self._any()
        partition = self._partition_of(collection)
        puts = self._puts(collection, self._choose.randint(1, 3), partition=partition)
        async with self.notes.call(self._client, puts) as tick:
            tick.append((await self.node.insert(collection, _rows(puts), partition=partition or None)).time_tick)

    async def _upsert(self) -> None:
        partition = self._partition_of("b")
        puts = self._puts("b", 1, replace=True, partition=partition)
        async with self.notes.call(self._client, puts) as tick:
            tick.append((await self.node.upsert("b", _rows(puts), partition=partition or None)).time_tick)

    async def _delete(self) -> None:
        key = self._choose.randrange(KEYS)
        async with self.notes.call(self._client, drops=(Drop(self.reading.name("b"), key),)) as tick:
            tick.append((await self.node.delete("b", [key])).time_tick)

    async def _buffered(self) -> None:
        partition = self._partition_of("b")
        puts = (*self._puts("a", 1), *self._puts("b", 1, partition=partition))
        async with self.notes.call(self._client, puts) as tick:
            async with self.node.transaction() as txn:
                for put in puts:
                    await txn.insert(_collection(put), _rows((put,)), partition=put.partition or None)
            assert txn.result is not None
            tick.append(txn.result.time_tick)

    async def _streamed(self) -> None:
        partition = self._partition_of("b")
        puts = (*self._puts("a", 1), *self._puts("b", 2, partition=partition))
        async with self.notes.call(self._client, puts) as tick:
            txn_id = await self.node.begin_transaction(keepalive_s=self._choose.choice([0.02, 5.0]))
            for put in puts:
                await self.node.insert(_collection(put), _rows((put,)), txn_id=txn_id, partition=put.partition or None)
                if self._choose.random() < 0.3:
                    await asyncio.sleep(self._choose.random() * 0.2)
            if self._choose.random() < 0.3:
                await self.node.rollback_transaction(txn_id)
                raise TransactionExpired("rolled back by its client")
            tick.append((await self.node.commit_transaction(txn_id)).time_tick)

    async def _overlapping(self) -> None:
        """Have a transaction end in another, and a cut before that one ends."""
        first, second = self._puts("a", 1), self._puts("a", 1)
        async with self.notes.call(self._client, second) as later_tick:
            async with self.notes.call(self._client, first) as tick:
                inner = await self.node.begin_transaction()
                outer = await self.node.begin_transaction()
                await self.node.insert("a", _rows(first), txn_id=inner)
                await self.node.insert("a", _rows(second), txn_id=outer)
                await self._insert()
                tick.append((await self.node.commit_transaction(inner)).time_tick)
            await self._cut()
            await self._insert()
            later_tick.append((await self.node.commit_transaction(outer)).time_tick)

    async def _produce(self) -> None:
        """Write through a named producer, after repeating what has no answer yet, perhaps for lives."""
        notes = self.notes
        async with self._producing:
            producer = await self.node.producer(PRODUCER)
            (put,) = self._puts("a", 1)
            notes.sequences += 1
            notes.unanswered.append((notes.sequences, notes.asked("producer", (put,)), put))
            while notes.unanswered:
                sequence, op, put = notes.unanswered[0]
                notes.tried(op)
                result = await producer.insert(_collection(put), _rows((put,)), sequence=sequence)
                notes.unanswered.pop(0)
                notes.told(op, "ok", result.time_tick)
                notes.answered.append((sequence, result.time_tick, put))
            if self._choose.random() < 0.5:
                await self._repeat(producer, *self._choose.choice(notes.answered))

    async def _repeat(self, producer: Producer, sequence: int, tick: int, put: Put) -> None:
        """Write again what was written, maybe lives ago: the original result, and no second row."""
        again = await producer.insert(_collection(put), _rows((put,)), sequence=sequence)
        if again.time_tick != tick:
            raise PromiseBroken(f"sequence {sequence} was written at tick {tick}, and again at {again.time_tick}")

    async def _cut(self) -> None:
        result = await self.node.flush()
        self.notes.world.note("cut", result.number, result.tick)

    # --- collections and partitions ---------------------------------------------------------------------------------------

    async def _make(self, name: str) -> None:
        async with self._changing:
            made = await self.node.create_collection(
                name, SCHEMA, primary_key="key", shards=SHARDS[name], if_not_exists=True
            )
            self.notes.events.append(Made(self.notes.world.now_ns(), f"{name}#{made.id}"))

    async def _drop_collection(self) -> None:
        async with self._changing:
            clear = Clear(self.reading.name("c"))
            self.notes.world.dropped.add(self.node.collection("c").id)
            async with self.notes.call(self._client, clears=(clear,)):
                await self.node.drop_collection("c")

    async def _make_partition(self) -> None:
        async with self._changing:
            await self.node.create_partition("b", PARTITION, if_not_exists=True)

    async def _drop_partition(self) -> None:
        async with self._changing:
            clear = Clear(self.reading.name("b"), PARTITION)
            self.notes.cleared.add(clear.collection)
            async with self.notes.call(self._client, clears=(clear,)):
                await self.node.drop_partition("b", PARTITION)

    def _any(self) -> str:
        return self._choose.choice([each.name for each in self.node.collections()] or ["a"])

    def _partition_of(self, collection: str) -> str:
        """Return a partition that is there, "" for the one that always is."""
        has = PARTITION in self.node.collection(collection).partitions
        return PARTITION if has and self._choose.random() < 0.5 else ""

    def _puts(self, collection: str, count: int, *, replace: bool = False, partition: str = "") -> tuple[Put, ...]:
        return self.notes.puts(self.reading.name(collection), count, replace=replace, partition=partition)


def _collection(put: Put) -> str:
    return put.collection.partition("#")[0]


def _rows(puts: tuple[Put, ...]) -> list[dict[str, int]]:
    return [{"key": put.key, "value": put.value} for put in puts]
