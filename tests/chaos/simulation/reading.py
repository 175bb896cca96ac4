"""The readers of a simulated node: whole scans, resumed ones, followers, named readers, states."""

from collections.abc import AsyncIterator

from scanner.deliver_policy import DeliverPolicy
from streamingnode.node import Node
from streamingnode.read_message import ReadMessage
from streamingnode.reader import CollectionReader
from tests.chaos.journal import Listed, Removed, Scanned, Seen, Span, State
from tests.chaos.simulation.notes import Notes, removed_of, rows_of, spans_of
from tests.chaos.simulation.world import PromiseBroken
from wal.errors import StreamingNodeError, Truncated


class Reading:
    """Reads of one life; `truncated` says that the node gives up log behind its cuts."""

    def __init__(self, notes: Notes, node: Node, life: int, *, truncated: bool) -> None:
        self._notes = notes
        self._node = node
        self._life = life
        self._truncated = truncated
        self._world = notes.world
        self._choose = notes.world.choose
        self._readers = 0

    def name(self, collection: str) -> str:
        """Return what a collection is called in the history: one that is made again has another
        name.
        """
        return f"{collection}#{self._node.collection(collection).id}"

    def reader(self, what: str) -> str:
        """Return a name that no other reader has."""
        self._readers += 1
        return f"{what} {self._readers} of life {self._life}"

    async def look(self, when: str) -> None:
        """Read everything, and note it."""
        asked_ns = self._world.now_ns()
        await self._node.consistent_tick()  # what the catalog says is durable then
        found = [each.name for each in self._node.collections()]
        self._notes.events.append(Listed(asked_ns, tuple(self.name(each) for each in found)))
        for collection in found:
            await self.scan(collection, self.reader(when))
            await self.state(collection)

    async def scan(self, collection: str, reader: str, *, after: int = 0) -> None:
        """Read from a tick, or from the first on, and now and then once more from the middle."""
        asked_ns = self._world.now_ns()
        until = await self._node.consistent_tick()
        policy = DeliverPolicy.start_after(after) if after else DeliverPolicy.all()
        rows = list[Seen]()
        spans = list[Span]()
        removed = list[Removed]()
        # now: it may be another one than when the tick was asked for
        first_tick = 0
        name = self.name(collection)
        async with self._node.read(collection, policy, until=until) as messages:
            async for message in self._all_of(messages):
                first_tick = first_tick or message.time_tick
                rows += rows_of(message)
                spans += spans_of(message)
                removed += removed_of(message)
        # The log may begin behind a cut: what came before is in states only.
        since = after or ((first_tick - 1 if first_tick else until) if self._truncated else 0)
        told_ns = self._world.now_ns()
        read = (tuple(rows), tuple(spans), tuple(removed))
        self._scanned(Scanned(name, reader, asked_ns, told_ns, since, until, *read))
        known = self._notes.ticks.setdefault(name, [])
        known += {row.tick for row in rows[-3:]}
        if known and self._choose.random() < 0.3:
            await self._resume(collection, self._choose.choice(known))

    async def _resume(self, collection: str, after: int) -> None:
        try:
            await self.scan(collection, self.reader("resumed"), after=after)
        except Truncated:
            self._world.note("truncated")
            if not self._truncated:
                raise PromiseBroken("truncated, and nothing was given up") from None

    async def _all_of(self, messages: CollectionReader) -> AsyncIterator[ReadMessage]:
        """Yield what a reader delivers, asked for in one of three ways."""
        match self._choose.randrange(3):
            case 0:
                async for message in messages:
                    yield message
            case 1:
                while found := await messages.next_messages():
                    for message in found:
                        yield message
            case _:
                async for batch in messages.batches(
                    max_rows=self._choose.randint(1, 5), max_wait_s=0.01
                ):
                    for message in batch:
                        yield message

    async def follow(self, collection: str) -> None:
        """Read for ever, and note what has come whenever a tick says that it is complete."""
        name = self.name(collection)
        reader = self.reader("follower")
        reached = 0
        rows = list[Seen]()
        try:
            async with self._node.read(collection, include_ticks=True) as messages:
                async for message in self._all_of(messages):
                    rows += rows_of(message)
                    reached = reached or message.time_tick - 1
                    if self._choose.random() < 0.3:
                        now = self._world.now_ns()
                        self._scanned(
                            Scanned(name, reader, 0, now, reached, message.time_tick, tuple(rows))
                        )
                        reached = message.time_tick
                        rows = []
        except StreamingNodeError as error:
            self._world.note("follower", error.code)

    async def read_by_name(self, collection: str) -> None:
        """Go on where the last reader of this name acknowledged."""
        asked_ns = self._world.now_ns()
        until = await self._node.consistent_tick()
        name = self.name(collection)
        acknowledged = self._notes.acknowledged
        after = acknowledged.get(name, -1)
        rows = list[Seen]()
        async with self._node.read(collection, name="billing", until=until) as messages:
            async for message in self._all_of(messages):
                after = message.time_tick - 1 if after < 0 else after
                rows += rows_of(message)
                if self._choose.random() < 0.3:
                    acknowledged[name] = -1  # until it is durable, either place is right
                    await messages.ack(message)
                    acknowledged[name] = message.time_tick
        after = until if after < 0 else after
        reader = self.reader(f"named {name}")
        self._scanned(
            Scanned(name, reader, asked_ns, self._world.now_ns(), after, until, tuple(rows))
        )

    async def state(self, collection: str) -> None:
        """Note the current rows, now and then those of a tick long past."""
        asked_ns = self._world.now_ns()
        tick = await self._node.consistent_tick()
        name = self.name(collection)
        past = self._notes.ticks.setdefault(name, [])
        is_past = bool(past) and self._choose.random() < 0.2
        if is_past:
            tick = self._choose.choice(past)
            asked_ns = 0
        past.append(tick)
        try:
            values = (
                (await self._node.snapshot(collection, as_of=tick))["value"].to_numpy().tolist()
            )
        except Truncated:
            if is_past and name in self._notes.cleared:
                return
            if tick < self._node.collection(collection).created_tick:
                return  # it was made anew after the tick was asked for
            raise
        self._notes.events.append(
            State(name, asked_ns, self._world.now_ns(), tick, tuple(sorted(values)))
        )
        self._world.note("state", name, tick, len(values))

    def _scanned(self, scanned: Scanned) -> None:
        self._notes.events.append(scanned)
        self._world.answered()
        self._world.note("scanned", scanned.collection, scanned.until_tick, len(scanned.rows))
