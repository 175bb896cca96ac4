"""The clients of a simulated node: each does drawn calls one after the other and notes what it was told and what it read."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pyarrow as pa

from bench.chaos.journal import Asked, Drop, Event, Outcome, Put, Scanned, Seen, State, Told
from bench.chaos.simulation.world import PromiseBroken, World
from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.reading.read_message import ReadMessage
from streamingnode.writing.producer import Producer
from wal.errors import OnShutdown, StreamingNodeError, TransactionExpired, Truncated

FIELDS: dict[str, pa.DataType] = {"key": pa.int64(), "value": pa.int64()}
SCHEMA = pa.schema(FIELDS)
NAMES = ("a", "b")
SHARDS = {"a": 2, "b": 1}
KEYS = 6


@dataclass(slots=True)
class History:
    """What all clients of a world noted, and the numbers they give out."""

    events: list[Event] = field(default_factory=list)
    ops: int = 0
    values: int = 0
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By named reader: the tick that it has acknowledged for sure."""
    sequences: int = 0
    unanswered: list[tuple[int, int, Put]] = field(default_factory=list)
    """Writes of the named producer that nobody knows the outcome of: sequence, call and row."""
    answered: list[tuple[int, int, Put]] = field(default_factory=list)
    """Those that are known: sequence, tick and row."""


class Clients:
    """The clients of one life."""

    def __init__(self, world: World, history: History, node: Node, life: int, *, truncated: bool) -> None:
        self.truncated = truncated
        self.world, self.history, self.node = world, history, node
        self._choose: random.Random = world.choose
        self._life = life
        self._reads = 0
        self._producing = asyncio.Lock()

    async def create(self) -> None:
        """Make the collections."""
        for name in NAMES:
            await self.node.create_collection(name, SCHEMA, primary_key="key", shards=SHARDS[name], if_not_exists=True)

    async def work(self, calls: int) -> None:
        """Have several clients do so many calls in all, then end."""
        clients = self._choose.randint(1, 4)
        async with asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(self._follow(self._choose.choice(NAMES)))
            writers = [tasks.create_task(self._write(calls // clients)) for _ in range(clients)]
            await asyncio.wait(writers)
            follower.cancel()

    async def look(self, when: str) -> None:
        """Read everything, and note it."""
        for name in NAMES:
            await self._scan(name, self._reader(when), after=0)
            await self._state(name)

    # --- writes ---------------------------------------------------------------------------------------------------------

    async def _write(self, calls: int) -> None:
        kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (8, self._insert),
            (3, self._upsert),
            (2, self._delete),
            (4, self._buffered),
            (3, self._streamed),
            (4, self._produce),
            (2, self._cut),
            (2, lambda: self._scan(self._name(), self._reader("scan"), after=0)),
            (2, lambda: self._state(self._name())),
            (2, lambda: self._read_by_name(self._name())),
            (1, lambda: asyncio.sleep(self._choose.random() * 0.5)),
        ]
        calls_, weights = [kind for _, kind in kinds], [weight for weight, _ in kinds]
        for _ in range(calls):
            (call,) = self._choose.choices(calls_, weights)
            try:
                await self._perhaps_cut_short(call)
            except OnShutdown:
                return
            except StreamingNodeError as error:
                self.world.note(error.code)

    async def _perhaps_cut_short(self, call: Callable[[], Awaitable[None]]) -> None:
        if self._choose.random() > 0.06:
            return await call()
        with anyio.move_on_after(self._choose.random() * 0.01):
            await call()
        return None

    async def _insert(self) -> None:
        name = self._name()
        puts = self._puts(name, self._choose.randint(1, 3))
        async with self._call(puts) as tick:
            rows = _rows(puts)
            tick.append((await self.node.insert(name, rows)).time_tick)

    async def _upsert(self) -> None:
        puts = self._puts("b", 1, replace=True)
        async with self._call(puts) as tick:
            tick.append((await self.node.upsert("b", _rows(puts))).time_tick)

    async def _delete(self) -> None:
        key = self._choose.randrange(KEYS)
        async with self._call((), (Drop("b", key),)) as tick:
            tick.append((await self.node.delete("b", [key])).time_tick)

    async def _buffered(self) -> None:
        puts = (*self._puts("a", 1), *self._puts("b", 1))
        async with self._call(puts) as tick:
            async with self.node.transaction() as txn:
                for put in puts:
                    await txn.insert(put.collection, _rows((put,)))
            assert txn.result is not None
            tick.append(txn.result.time_tick)

    async def _streamed(self) -> None:
        puts = (*self._puts("a", 1), *self._puts("b", 2))
        async with self._call(puts) as tick:
            txn_id = await self.node.begin_transaction(keepalive_s=self._choose.choice([0.02, 5.0]))
            for put in puts:
                await self.node.insert(put.collection, _rows((put,)), txn_id=txn_id)
                if self._choose.random() < 0.2:
                    await asyncio.sleep(self._choose.random() * 0.1)
            if self._choose.random() < 0.3:
                await self.node.rollback_transaction(txn_id)
                raise TransactionExpired("rolled back by its client")
            tick.append((await self.node.commit_transaction(txn_id)).time_tick)

    async def _produce(self) -> None:
        """Write through a named producer, after repeating what has no answer yet, perhaps for lives."""
        history = self.history
        async with self._producing:
            producer = await self.node.producer("simulated")
            history.sequences, history.ops = history.sequences + 1, history.ops + 1
            (put,) = self._puts("a", 1)
            history.unanswered.append((history.sequences, history.ops, put))
            history.events.append(Asked(history.ops, "producer", self.world.now_ns(), (put,)))
            while history.unanswered:
                sequence, op, put = history.unanswered[0]
                result = await producer.insert(put.collection, _rows((put,)), sequence=sequence)
                history.unanswered.pop(0)
                self.world.note("produced", op, result.time_tick)
                history.events.append(Told(op, self.world.now_ns(), "ok", result.time_tick))
                history.answered.append((sequence, result.time_tick, put))
            if self._choose.random() < 0.5:
                await self._repeat(producer, *self._choose.choice(history.answered))

    async def _repeat(self, producer: Producer, sequence: int, tick: int, put: Put) -> None:
        """Write again what was written, maybe lives ago: the original result, and no second row."""
        again = await producer.insert(put.collection, _rows((put,)), sequence=sequence)
        if again.time_tick != tick:
            raise PromiseBroken(f"sequence {sequence} was written at tick {tick}, and again at {again.time_tick}")

    async def _cut(self) -> None:
        result = await self.node.flush()
        self.world.note("cut", result.number, result.tick)

    def _name(self) -> str:
        return self._choose.choice(NAMES)

    def _puts(self, name: str, count: int, *, replace: bool = False) -> tuple[Put, ...]:
        puts = []
        for _ in range(count):
            self.history.values += 1
            puts.append(Put(name, self._choose.randrange(KEYS), self.history.values, replace))
        return tuple(puts)

    @asynccontextmanager
    async def _call(self, puts: tuple[Put, ...], drops: tuple[Drop, ...] = ()) -> AsyncIterator[list[int]]:
        self.history.ops += 1
        op = self.history.ops
        self.history.events.append(Asked(op, f"life {self._life}", self.world.now_ns(), puts, drops))
        tick: list[int] = []
        outcome: Outcome = "open"
        try:
            yield tick
            outcome = "ok"
        except StreamingNodeError as error:
            outcome = "open" if error.retryable == "indeterminate" else "failed"
            raise
        finally:
            if self.world.living:
                self.world.note(op, outcome, tick)
                self.history.events.append(Told(op, self.world.now_ns(), outcome, tick[0] if tick else 0))

    # --- reads ----------------------------------------------------------------------------------------------------------

    def _reader(self, what: str) -> str:
        self._reads += 1
        return f"{what} {self._reads} of life {self._life}"

    async def _scan(self, name: str, reader: str, *, after: int) -> None:
        asked_ns = self.world.now_ns()
        until = await self.node.consistent_tick()
        policy = DeliverPolicy.start_after(after) if after else DeliverPolicy.all()
        rows: list[Seen] = []
        first_tick = 0
        async with self.node.read(name, policy, until=until) as messages:
            async for message in messages:
                first_tick = first_tick or message.time_tick
                rows += rows_of(message)
        # The log may begin behind a cut: what came before is in states only.
        since = after or (first_tick - 1 if first_tick else until)
        self._scanned(Scanned(name, reader, asked_ns, self.world.now_ns(), since, until, tuple(rows)))
        if rows and self._choose.random() < 0.3:
            middle = self._choose.choice(rows).tick
            try:
                await self._scan(name, self._reader("resumed"), after=middle)
            except Truncated:
                self.world.note("truncated")
                if not self.truncated:
                    raise PromiseBroken("truncated, and nothing was given up") from None

    async def _follow(self, name: str) -> None:
        """Read for ever, and note what has come whenever a tick says that it is complete."""
        reader, reached, rows = self._reader("follower"), 0, list[Seen]()
        try:
            async with self.node.read(name, include_ticks=True) as messages:
                async for message in messages:
                    rows += rows_of(message)
                    reached = reached or message.time_tick - 1
                    if self._choose.random() < 0.3:
                        now = self.world.now_ns()
                        self._scanned(Scanned(name, reader, 0, now, reached, message.time_tick, tuple(rows)))
                        reached, rows = message.time_tick, []
        except StreamingNodeError as error:
            self.world.note("follower", error.code)

    async def _read_by_name(self, name: str) -> None:
        """Go on where the last reader of this name acknowledged."""
        reader = f"named {name}"
        after = self.history.acknowledged.get(name, -1)
        asked_ns = self.world.now_ns()
        until = await self.node.consistent_tick()
        rows: list[Seen] = []
        async with self.node.read(name, name="billing", until=until) as messages:
            async for message in messages:
                after = message.time_tick - 1 if after < 0 else after
                rows += rows_of(message)
                if self._choose.random() < 0.3:
                    self.history.acknowledged[name] = -1  # until it is durable, either place is right
                    await messages.ack(message)
                    self.history.acknowledged[name] = message.time_tick
        after = until if after < 0 else after
        self._scanned(Scanned(name, self._reader(reader), asked_ns, self.world.now_ns(), after, until, tuple(rows)))

    async def _state(self, name: str) -> None:
        asked_ns = self.world.now_ns()
        tick = await self.node.consistent_tick()
        values = (await self.node.snapshot(name, as_of=tick))["value"].to_numpy().tolist()
        self.history.events.append(State(name, asked_ns, self.world.now_ns(), tick, tuple(sorted(values))))
        self.world.note("state", name, tick, len(values))

    def _scanned(self, scanned: Scanned) -> None:
        self.history.events.append(scanned)
        self.world.note("scanned", scanned.collection, scanned.until_tick, len(scanned.rows))


def _rows(puts: tuple[Put, ...]) -> list[dict[str, int]]:
    return [{"key": put.key, "value": put.value} for put in puts]


def rows_of(message: ReadMessage) -> Iterator[Seen]:
    """Yield the rows a message brings, those of a transaction in order."""
    for body in message.bodies or (message,):
        arrow = body.to_arrow()
        if arrow is not None and "value" in arrow.schema.names:
            for value in arrow["value"].to_numpy().tolist():
                yield Seen(message.time_tick, message.message_id.position, value)
