"""What all clients of a world noted over its lives: the events that are judged, and what they remember beside them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from streamingnode.read_message import ReadMessage
from tests.chaos.journal import Asked, Clear, Drop, Event, Outcome, Put, Removed, Seen, Span, Told
from tests.chaos.simulation.world import World
from wal.errors import StreamingNodeError
from wal.headers import MessageType

KEYS = 6


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
    """Collections of which somebody has asked to drop a partition: states before that are not kept."""
    acknowledged: dict[str, int] = field(default_factory=dict)
    """By named reader: the tick that it has acknowledged for sure."""
    sequences: int = 0
    unanswered: list[tuple[int, int, Put]] = field(default_factory=list)
    """Writes of the named producer that nobody knows the outcome of: sequence, call and row."""
    answered: list[tuple[int, int, Put]] = field(default_factory=list)
    """Those that are known: sequence, tick and row."""

    def puts(self, name: str, count: int, *, replace: bool = False, partition: str = "") -> tuple[Put, ...]:
        """Return so many new rows of drawn keys."""
        puts = []
        for _ in range(count):
            self.values += 1
            puts.append(Put(name, self.world.choose.randrange(KEYS), self.values, replace, partition))
        return tuple(puts)

    def asked(
        self, client: str, puts: tuple[Put, ...], drops: tuple[Drop, ...] = (), clears: tuple[Clear, ...] = ()
    ) -> int:
        """Note that a call begins, and return its number."""
        self.calls += 1
        self.events.append(Asked(self.calls, client, self.world.now_ns(), puts, drops, clears))
        return self.calls

    def told(self, op: int, outcome: Outcome, tick: int = 0, error: str = "") -> None:
        """Note that a call has ended."""
        self.world.note(op, outcome, tick, error)
        self.events.append(Told(op, self.world.now_ns(), outcome, tick, error))
        self.world.answered()

    def tried(self, op: int) -> None:
        """Note that a call is tried, perhaps again and in another process: it is open until that one ends, too."""
        self.events.append(Told(op, self.world.now_ns(), "open"))

    @asynccontextmanager
    async def call(
        self, client: str, puts: tuple[Put, ...] = (), drops: tuple[Drop, ...] = (), clears: tuple[Clear, ...] = ()
    ) -> AsyncIterator[list[int]]:
        """Note a call and what becomes of it; the block may leave the tick it was told."""
        op = self.asked(client, puts, drops, clears)
        tick: list[int] = []
        outcome: Outcome = "open"
        code = ""
        try:
            yield tick
            outcome = "ok"
        except StreamingNodeError as error:
            outcome, code = ("open" if error.retryable == "indeterminate" else "failed"), error.code
            raise
        finally:
            if self.world.living:
                self.told(op, outcome, tick[0] if tick else 0, code)


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
            yield Removed(message.time_tick, message.message_id.position, tuple(keys["key"].to_numpy().tolist()))


def spans_of(message: ReadMessage) -> Iterator[Span]:
    """Yield the row offsets it brings."""
    for body in message.bodies or (message,):
        for vchannel, (first, count) in body.row_offsets.items():
            yield Span(message.time_tick, vchannel, first, count)
