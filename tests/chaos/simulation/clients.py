"""The clients of a simulated node: each does drawn calls one after the other and notes what it was
told and what it read.

Collection `a` only grows, `b` is upserted and deleted from and has a partition that comes and goes,
`c` comes and goes.
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
from tests.chaos.journal import Clear, Drop, Made, Put
from tests.chaos.simulation.notes import KEYS, Notes, collection_of, dicts_of
from tests.chaos.simulation.producing import Producing
from tests.chaos.simulation.reading import Reading
from wal.errors import OnShutdown, StreamingNodeError

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "value": pa.int64()}
SCHEMA = pa.schema(FIELDS)
SHARDS = {"a": 2, "b": 1, "c": 1}
PARTITION = "eu"
TOGETHER_MAX = 8
LEANINGS = (0.1, 1.0, 1.0, 4.0)


class _Kind(NamedTuple):
    """A kind of call, and how often it is made."""

    call: Callable[[], Awaitable[None]]
    weight: float


class Clients:
    """The clients of one life."""

    def __init__(self, notes: Notes, node: Node, life: int, *, truncated: bool) -> None:
        self.notes = notes
        self.node = node
        self.reading = Reading(notes, node, life, truncated=truncated)
        self.producing = Producing(notes, node, self.reading)
        self._choose: random.Random = notes.world.choose
        self._client = f"life {life}"
        self._changing = asyncio.Lock()

    async def create(self) -> None:
        """Make the collections."""
        for name in SHARDS:
            await self._make(name)

    async def work(self, calls: int) -> None:
        """Have several clients do so many calls in all, then end."""
        clients = self._choose.choice([1, 2, 3, 4, 12])
        kinds = self._kinds()
        async with asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(self._follow())
            writers = [
                tasks.create_task(self._call_often(max(1, calls // clients), kinds))
                for _ in range(clients)
            ]
            await asyncio.wait(writers)
            follower.cancel()

    async def _follow(self) -> None:
        with suppress(CollectionNotFound):
            await self.reading.follow(self._any())

    async def _call_often(self, calls: int, kinds: Sequence[_Kind]) -> None:
        for _ in range(calls):
            (kind,) = self._choose.choices(kinds, [kind.weight for kind in kinds])
            if not await self._call_once(kind.call):
                return

    async def _call_once(self, call: Callable[[], Awaitable[None]]) -> bool:
        """Make a call, and return whether there is any use in another one."""
        try:
            await self._perhaps_cut_short(call)
        except OnShutdown:
            return False
        except StreamingNodeError as error:
            self.notes.world.note(error.code)
        return True

    async def _together(self) -> None:
        """Make several calls at once: what they write goes in one entry, as far as it is not too
        early or too late.
        """
        producing = self.producing
        calls = [self._insert, self._insert, self._upsert, self._delete, self._buffered]
        calls += [producing.say, producing.draw, producing.write_fenced]
        async with asyncio.TaskGroup() as tasks:
            for call in self._choose.choices(calls, k=self._choose.randint(2, TOGETHER_MAX)):
                tasks.create_task(self._call_once(call))

    def _kinds(self) -> list[_Kind]:
        """Return what this life's clients do: rather this or rather that, so that rare things meet
        each other somewhere.
        """
        reading = self.reading
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self._insert),
            (3, self._upsert),
            (2, self._delete),
            (4, self._buffered),
            (3, self._streamed),
            (2, self._overlapping),
            (4, self.producing.say),
            (2, self.producing.draw),
            (1, self.producing.write_fenced),
            (6, self._together),
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

    # --- rows -------------------------------------------------------------------------------------

    async def _insert(self) -> None:
        await self._insert_into(self._any())

    async def _insert_into(self, collection: str) -> None:
        partition = self._partition_of(collection)
        puts = self._puts(collection, self._choose.randint(1, 3), partition=partition)
        rows = self._as_it_comes(puts)
        async with self.notes.call(self._client, puts) as told:
            told.append(
                await self.node.insert(
                    collection, rows, partition=partition or None, timeout=self.notes.deadline_s()
                )
            )

    async def _upsert(self) -> None:
        partition = self._partition_of("b")
        puts = self._puts("b", 1, replace=True, partition=partition)
        rows = self._as_it_comes(puts)
        async with self.notes.call(self._client, puts) as told:
            told.append(
                await self.node.upsert(
                    "b", rows, partition=partition or None, timeout=self.notes.deadline_s()
                )
            )

    async def _delete(self) -> None:
        key = self._choose.randrange(KEYS)
        async with self.notes.call(
            self._client, drops=(Drop(self.reading.name("b"), key),)
        ) as told:
            told.append(await self.node.delete("b", [key], timeout=self.notes.deadline_s()))

    def _as_it_comes(self, puts: tuple[Put, ...]) -> list[dict[str, int]] | pa.RecordBatch:
        """Return rows as dicts or as Arrow."""
        rows = dicts_of(puts)
        return (
            rows if self._choose.random() < 0.7 else pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
        )

    async def _buffered(self) -> None:
        partition = self._partition_of("b")
        puts = (
            *self._puts("a", self._choose.choice([1, 2, 6])),
            *self._puts("b", 1, partition=partition),
        )
        drops = (
            (Drop(self.reading.name("b"), self._choose.randrange(KEYS)),)
            if self._choose.random() < 0.3
            else ()
        )
        async with self.notes.call(self._client, puts, drops) as told:
            async with self.node.transaction() as txn:
                for drop in drops:
                    await txn.delete("b", [drop.key])
                for put in puts:
                    rows = self._as_it_comes((put,))
                    await txn.insert(collection_of(put), rows, partition=put.partition or None)
            assert txn.result is not None
            told.append(txn.result)

    async def _streamed(self) -> None:
        partition = self._partition_of("b")
        puts = (*self._puts("a", 1), *self._puts("b", 2, partition=partition))
        async with self.notes.call(self._client, puts) as told:
            txn_id = await self.node.begin_transaction(keepalive_s=self._choose.choice([0.02, 5.0]))
            for put in puts:
                await self.node.insert(
                    collection_of(put),
                    dicts_of((put,)),
                    txn_id=txn_id,
                    partition=put.partition or None,
                )
                if self._choose.random() < 0.3:
                    await asyncio.sleep(self._choose.random() * 0.2)
            if self._choose.random() < 0.3:
                await self.node.rollback_transaction(txn_id)
                raise TransactionExpired("rolled back by its client")
            told.append(await self.node.commit_transaction(txn_id))

    async def _overlapping(self) -> None:
        """Have a transaction end in another, and a cut before that one ends."""
        first = self._puts("a", 1)
        second = self._puts("a", 1)
        async with self.notes.call(self._client, second) as told_later:
            async with self.notes.call(self._client, first) as told:
                inner = await self.node.begin_transaction()
                outer = await self.node.begin_transaction()
                await self.node.insert("a", dicts_of(first), txn_id=inner)
                await self.node.insert("a", dicts_of(second), txn_id=outer)
                await self._insert_into("a")
                told.append(await self.node.commit_transaction(inner))
            await self._cut()
            await self._insert_into("a")
            told_later.append(await self.node.commit_transaction(outer))

    async def _cut(self) -> None:
        result = await self.node.flush()
        self.notes.world.note("cut", result.number, result.tick)

    # --- collections and partitions ---------------------------------------------------------------

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

    def _puts(
        self, collection: str, count: int, *, replace: bool = False, partition: str = ""
    ) -> tuple[Put, ...]:
        return self.notes.puts(
            self.reading.name(collection), count, replace=replace, partition=partition
        )
