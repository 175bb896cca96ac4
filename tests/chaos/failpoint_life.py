"""One life of a node that passes every failpoint outside Spark, with a journal of what it was told
and what it read.

Run in a process of its own: the life is as long as the failpoint that is armed allows. The calls
are few and of every kind; what matters is where they are cut off.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pyarrow as pa

import streamingnode as sn
from flusher.cuts import Lease, write_lease
from flusher.run import FlushOptions
from interceptors.errors import TransactionExpired
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.opening import OpenNode
from streamingnode.read_message import ReadMessage
from tests.chaos.journal import Asked, Drop, Journal, Outcome, Put, Scanned, Seen, State, Told
from wal import failpoint
from wal.append import AppendResult
from wal.errors import StorageFailed, StreamingNodeError

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "value": pa.int64()}
SCHEMA = pa.schema(FIELDS)
NAMES = ("a", "b")
CALLS_PER_LIFE = 1_000_000
"""Calls and values of one life are numbered above those of the life before."""
LONG_ENOUGH_S = 20.0
"""No life takes this long, on any machine that passes at all."""


def live(directory: Path, journal: Path, number: int, armed: str) -> None:
    """Open the node, use it in every way, close it; `armed` as in the environment variable."""
    failpoint.arm_from(armed)
    with Journal(journal) as noted:
        anyio.run(Life(directory, noted, number, retention_s=0, leases="flush.cut_" in armed).run)


def judge(directory: Path, journal: Path, number: int) -> None:
    """Open the node and note all that is in it, before and after a cut, and once more from the
    start.
    """
    with Journal(journal) as noted:
        anyio.run(Life(directory, noted, number, retention_s=86_400, leases=False).look)


class Life:
    """The clients of one node, in one process."""

    def __init__(
        self, directory: Path, journal: Journal, number: int, *, retention_s: float, leases: bool
    ) -> None:
        self._directory = directory
        self._journal = journal
        self._retention_s = retention_s
        self._leases = leases
        self._calls = itertools.count(CALLS_PER_LIFE * number)
        self._client = f"life {number}"

    async def run(self) -> None:
        """Do everything once; errors that the failpoint causes end a call, not the life."""
        with anyio.fail_after(LONG_ENOUGH_S), suppress(OSError, StreamingNodeError):
            async with self._opened() as node:
                for step in (
                    self._create,
                    self._write,
                    self._transactions,
                    self._read,
                    self._cut,
                    self._give_up_log,
                ):
                    with suppress(OSError, StreamingNodeError):
                        await step(node)

    async def look(self) -> None:
        """Read everything, before and after a cut. Raises whatever is wrong with the node."""
        with anyio.fail_after(LONG_ENOUGH_S):
            async with self._opened() as node:
                await self._create(node)
                await self._note_all(node, "before the cut")
                await self._write(node)
                await node.flush()
                await self._note_all(node, "after the cut")
            async with self._opened() as node:
                await self._note_all(node, "after closing")

    def _opened(self) -> OpenNode:
        settings = {
            "flush": FlushOptions(retry_first_s=0.01),
            "cut_interval_s": None,
            "flush.retention.interval_s": 0.05,
            "flush.retention.min_age_s": self._retention_s,
            "ticks.interval_s": 0.01,
        }
        return sn.open_node(self._directory, config=load_config(arguments=settings))

    # --- writes -----------------------------------------------------------------------------------

    async def _create(self, node: Node) -> None:
        for name in NAMES:
            await node.create_collection(
                name, SCHEMA, primary_key="key", shards=2, if_not_exists=True
            )

    async def _write(self, node: Node) -> None:
        """Write in several ways at once, which go together, and then one by one."""
        async with asyncio.TaskGroup() as tasks:
            for key in range(6):
                tasks.create_task(self._insert(node, NAMES[key % 2], key))
            for write in (self._buffered, self._upsert, self._delete):
                tasks.create_task(write(node))
        await self._upsert(node)
        await self._delete(node)

    async def _insert(self, node: Node, name: str, key: int) -> None:
        op = next(self._calls)
        async with self._call(op, (Put(name, key, op * 10),)) as outcome:
            outcome.append(await node.insert(name, [{"key": key, "value": op * 10}]))

    async def _upsert(self, node: Node) -> None:
        op = next(self._calls)
        async with self._call(op, (Put("a", 1, op * 10, replace=True),)) as outcome:
            outcome.append(await node.upsert("a", [{"key": 1, "value": op * 10}]))

    async def _delete(self, node: Node) -> None:
        op = next(self._calls)
        async with self._call(op, (), (Drop("b", 3),)) as outcome:
            outcome.append(await node.delete("b", [3]))

    async def _transactions(self, node: Node) -> None:
        await self._buffered(node)
        await self._streamed(node, commit=True)
        await self._streamed(node, commit=False)
        await self._forgotten(node)

    async def _buffered(self, node: Node) -> None:
        op, puts = self._pair()
        async with self._call(op, puts) as outcome:
            async with node.transaction() as txn:
                for put in puts:
                    await txn.insert(put.collection, [{"key": put.key, "value": put.value}])
            assert txn.result is not None
            outcome.append(txn.result)

    async def _streamed(self, node: Node, *, commit: bool) -> None:
        op, puts = self._pair()
        async with self._call(op, puts) as outcome:
            txn_id = await node.begin_transaction()
            for put in puts:
                await node.insert(
                    put.collection, [{"key": put.key, "value": put.value}], txn_id=txn_id
                )
            if commit:
                outcome.append(await node.commit_transaction(txn_id))
            else:
                await node.rollback_transaction(txn_id)
                raise TransactionExpired("rolled back by its client")

    async def _forgotten(self, node: Node) -> None:
        """Leave a transaction to expire."""
        op, puts = self._pair()
        async with self._call(op, puts):
            txn_id = await node.begin_transaction(keepalive_s=0.02)
            await node.insert("a", [{"key": puts[0].key, "value": puts[0].value}], txn_id=txn_id)
            while True:
                await anyio.sleep(0.05)
                await node.insert("a", [], txn_id=txn_id)
                await node.commit_transaction(txn_id)

    def _pair(self) -> tuple[int, tuple[Put, Put]]:
        op = next(self._calls)
        return op, (Put("a", 7, op * 10), Put("b", 7, op * 10 + 1))

    @asynccontextmanager
    async def _call(
        self, op: int, puts: tuple[Put, ...], drops: tuple[Drop, ...] = ()
    ) -> AsyncIterator[list[AppendResult]]:
        """Note a call and what became of it; what it raised stays inside."""
        self._journal.note(Asked(op, self._client, time.monotonic_ns(), puts, drops))
        results: list[AppendResult] = []
        outcome: Outcome = "ok"
        try:
            yield results
        except StreamingNodeError as error:
            outcome = "open" if error.retryable == "indeterminate" else "failed"
        except OSError:
            outcome = "open"
        tick, position = (
            (results[0].time_tick, results[0].message_id.position) if results else (0, 0)
        )
        self._journal.note(Told(op, time.monotonic_ns(), outcome, tick, position=position))

    # --- reads and cuts ---------------------------------------------------------------------------

    async def _read(self, node: Node) -> None:
        """Read by name and acknowledge, so that a position is saved."""
        until = await node.consistent_tick()
        async with node.read("a", name="billing", until=until) as messages:
            async for message in messages:
                await messages.ack(message)

    async def _cut(self, node: Node) -> None:
        await node.flush()
        await anyio.sleep(0.25)  # the floor file is synced this often
        await self._write_leases(node)
        await self._write(node)
        await node.flush()
        await self._read(node)

    async def _write_leases(self, node: Node) -> None:
        """Say for both collections that a table has taken the first cut."""
        for collection in node.collections() if self._leases else ():
            lease = Lease(
                table=str(self._directory / "tables" / collection.name),
                node_id=node.node_id,
                collection_id=collection.id,
                cut=1,
                tick=1,
            )
            await anyio.to_thread.run_sync(write_lease, self._directory, lease)

    async def _give_up_log(self, node: Node) -> None:
        """Give retention a few rounds to remove the log before the cuts, and the first cut with
        leases.
        """
        await anyio.sleep(0.3)

    async def _note_all(self, node: Node, when: str) -> None:
        for name in NAMES:
            asked_ns = time.monotonic_ns()
            tick = await node.consistent_tick()
            # its lease is of no table that could have what the node has given up
            with suppress(StorageFailed):
                values = (await node.snapshot(name, as_of=tick))["value"].to_numpy().tolist()
                self._journal.note(
                    State(name, asked_ns, time.monotonic_ns(), tick, tuple(sorted(values)))
                )
            await self._scan(node, name, f"{self._client} {when}")

    async def _scan(self, node: Node, name: str, reader: str) -> None:
        asked_ns = time.monotonic_ns()
        until = await node.consistent_tick()
        rows: list[Seen] = []
        async with node.read(name, until=until) as messages:
            async for message in messages:
                rows += rows_of(message)
        after = rows[0].tick - 1 if rows else until  # the log may begin behind a cut
        self._journal.note(
            Scanned(name, reader, asked_ns, time.monotonic_ns(), after, until, tuple(rows))
        )


def rows_of(message: ReadMessage) -> Iterator[Seen]:
    """Yield the rows a message brings, those of a transaction in order."""
    for body in message.bodies or (message,):
        arrow = body.to_arrow()
        if arrow is not None and "value" in arrow.schema.names:
            for value in arrow["value"].to_numpy().tolist():
                yield Seen(message.time_tick, message.message_id.position, value)
