"""What all clients of a world noted over its lives: the events that are judged, and what they
remember beside them.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from interceptors.errors import (
    CollectionNotFound,
    PartitionNotFound,
    ProducerFenced,
    SequenceTooOld,
)
from streamingnode.read_message import ReadMessage
from streamingnode.writing.write import WriteResult
from tests.chaos.journal import Asked, Clear, Drop, Event, Outcome, Put, Removed, Seen, Span, Told
from tests.chaos.simulation.world import PromiseBroken, World
from wal.errors import StreamingNodeError
from wal.headers import MessageType

KEYS = 6
OF_PRODUCERS = (ProducerFenced, SequenceTooOld)


@dataclass(slots=True)
class ProducedWrite:
    """A write of a named producer: to be repeated as it is until its result is known, and told the
    same ever after.
    """

    op: int
    puts: tuple[Put, ...]
    drops: tuple[Drop, ...] = ()
    sequence: int = 0
    result: WriteResult | None = None


@dataclass(slots=True)
class Produced:
    """The writes of one named producer, over all lives."""

    sequences: int = 0
    unanswered: list[ProducedWrite] = field(default_factory=list)
    answered: list[ProducedWrite] = field(default_factory=list)


@dataclass(slots=True)
class Notes:
    """The events, and the numbers that are given out."""

    world: World
    events: list[Event] = field(default_factory=list)
    calls: int = 0
    values: int = 0
    ticks: dict[str, list[int]] = field(default_factory=dict)
    """By collection: ticks that a reader met or asked for."""
    cleared: set[str] = field(default_factory=set)
    """Collections of which somebody has asked to drop a partition: states before that are not
    kept.
    """
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By named reader: the tick that it has acknowledged for sure."""
    produced: dict[str, Produced] = field(default_factory=lambda: defaultdict(Produced))
    """By named producer: what became of its writes."""

    def puts(
        self, name: str, count: int, *, replace: bool = False, partition: str = ""
    ) -> tuple[Put, ...]:
        """Return so many new rows of drawn keys."""
        puts = []
        for _ in range(count):
            self.values += 1
            puts.append(
                Put(name, self.world.choose.randrange(KEYS), self.values, replace, partition)
            )
        return tuple(puts)

    def deadline_s(self) -> float | None:
        """Return a deadline for a call, mostly none; who misses it knows whether the log had the
        write.
        """
        choose = self.world.choose
        return None if choose.random() > 0.1 else choose.random() * 0.01 + 1e-6

    def asked(
        self,
        client: str,
        puts: tuple[Put, ...],
        drops: tuple[Drop, ...] = (),
        clears: tuple[Clear, ...] = (),
    ) -> int:
        """Note that a call begins, and return its number."""
        self.calls += 1
        self.events.append(Asked(self.calls, client, self.world.now_ns(), puts, drops, clears))
        return self.calls

    def told(
        self, op: int, outcome: Outcome, result: WriteResult | None = None, error: str = ""
    ) -> None:
        """Note that a call has ended."""
        tick = position = 0
        spans: tuple[Span, ...] = ()
        if result is not None:
            tick = result.time_tick
            position = result.message_ids[-1].position
            spans = tuple(
                Span(tick, name, first, count)
                for name, (first, count) in result.row_offsets.items()
            )
        self.world.note(op, outcome, tick, error)
        self.events.append(Told(op, self.world.now_ns(), outcome, tick, error, position, spans))
        self.world.answered()

    def tried(self, op: int) -> None:
        """Note that a call is tried, perhaps again and in another process: it is open until that
        one ends, too.
        """
        self.events.append(Told(op, self.world.now_ns(), "open"))

    @asynccontextmanager
    async def call(
        self,
        client: str,
        puts: tuple[Put, ...] = (),
        drops: tuple[Drop, ...] = (),
        clears: tuple[Clear, ...] = (),
    ) -> AsyncIterator[list[WriteResult]]:
        """Note a call and what becomes of it; the block may leave the result it was told.

        Raises `PromiseBroken` for an error that can only be another caller's.
        """
        async with self.outcome_of(self.asked(client, puts, drops, clears)) as results:
            try:
                yield results
            except OF_PRODUCERS as error:
                raise PromiseBroken(f"a call of no producer was told {error.code}") from error
            except (CollectionNotFound, PartitionNotFound) as error:
                names = {*map(collection_of, puts), *map(collection_of, drops)}
                if not clears and "c" not in names and not any(put.partition for put in puts):
                    raise PromiseBroken(
                        f"a call of what is never dropped was told {error.code}"
                    ) from error
                raise

    @asynccontextmanager
    async def outcome_of(self, op: int) -> AsyncIterator[list[WriteResult]]:
        """Note what becomes of a call that was asked; the block may leave the result it was
        told.
        """
        results: list[WriteResult] = []
        outcome: Outcome = "open"
        code = ""
        try:
            yield results
            outcome = "ok"
        except StreamingNodeError as error:
            outcome = "open" if error.retryable == "indeterminate" else "failed"
            code = error.code
            raise
        finally:
            if self.world.living:
                self.told(op, outcome, results[0] if results else None, code)


def collection_of(change: Put | Drop) -> str:
    """Return what the node calls the collection of a row or key."""
    return change.collection.partition("#")[0]


def dicts_of(puts: tuple[Put, ...]) -> list[dict[str, int]]:
    """Return rows as a caller has them."""
    return [{"key": put.key, "value": put.value} for put in puts]


def rows_of(message: ReadMessage) -> Iterator[Seen]:
    """Yield the rows a message brings, those of a transaction in order."""
    for body in message.bodies or (message,):
        arrow = body.to_arrow()
        if arrow is not None and "value" in arrow.schema.names:
            for value in arrow["value"].to_numpy().tolist():
                yield Seen(message.time_tick, message.message_id.position, value)


def removed_of(message: ReadMessage) -> Iterator[Removed]:
    """Yield the keys that it removes."""
    for body in message.bodies or (message,):
        if body.type is MessageType.DELETE and (keys := body.to_arrow()) is not None:
            yield Removed(
                message.time_tick,
                message.message_id.position,
                tuple(keys["key"].to_numpy().tolist()),
            )


def spans_of(message: ReadMessage) -> Iterator[Span]:
    """Yield the row offsets it brings."""
    for body in message.bodies or (message,):
        for vchannel, (first, count) in body.row_offsets.items():
            yield Span(message.time_tick, vchannel, first, count)
