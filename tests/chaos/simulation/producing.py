"""The named producers of a simulated node: writes that are repeated until their result is known,
and now and then later.

Two producers say their sequences themselves, which are the same numbers; one has them drawn. Each
is opened again and again, so there are always older openings of it, whose writes must be refused
whatever goes into the log with them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from interceptors.errors import ProducerFenced, SequenceTooOld
from streamingnode.node import Node
from streamingnode.writing.producer import Producer
from streamingnode.writing.write import WriteResult
from tests.chaos.journal import Drop, Put
from tests.chaos.simulation.notes import (
    KEYS,
    Notes,
    Produced,
    ProducedWrite,
    collection_of,
    dicts_of,
)
from tests.chaos.simulation.reading import Reading
from tests.chaos.simulation.world import PromiseBroken
from wal.errors import StreamingNodeError

T = TypeVar("T")
SAYING = ("simulated", "simulated too")
DRAWN = "drawn"
WRITES_MAX = 3
"""New ones of a call, all at once; a crash leaves as many unanswered."""


class Producing:
    """The producers of one life."""

    def __init__(self, notes: Notes, node: Node, reading: Reading) -> None:
        self._notes = notes
        self._node = node
        self._reading = reading
        self._choose = notes.world.choose
        self._turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._open: dict[str, Producer] = {}
        self._fenced: list[Producer] = []

    async def say(self) -> None:
        """Write under sequences of one's own, after repeating what has no answer yet, perhaps for
        lives.
        """
        name = self._choose.choice(SAYING)
        produced = self._notes.produced[name]
        async with self._turn[name]:
            producer = await self._opened(name)
            for _ in range(self._choose.randint(1, WRITES_MAX)):
                produced.sequences += 1
                produced.unanswered.append(self._new_write(produced.sequences))
            _, errors = await _ended(
                [self._try(producer, produced, write) for write in produced.unanswered]
            )
            if errors:
                raise errors[0]
            await self._repeat(producer, produced)

    async def draw(self) -> None:
        """Write under sequences that are drawn, and ask for each what was written under it."""
        async with self._turn[DRAWN]:
            producer = await self._opened(DRAWN)
            produced = self._notes.produced[DRAWN]
            before = producer.last_sequence
            writes = [self._new_write(0) for _ in range(self._choose.randint(1, WRITES_MAX))]
            _, errors = await _ended([self._write_once(producer, write) for write in writes])
            if errors:
                raise errors[0]
            if producer.last_sequence < before + len(writes):
                raise PromiseBroken(
                    f"{len(writes)} writes after sequence {before} end at {producer.last_sequence}"
                )
            if producer.last_sequence > before + len(writes):
                return  # an earlier one was given a sequence, and has not come into the log
            answered = {_told_by(write.result): write for write in writes}
            for sequence in range(before + 1, before + len(writes) + 1):
                again = await self._write(producer, writes[0], sequence)
                write = answered.pop(_told_by(again), None)
                if write is None:
                    raise PromiseBroken(
                        f"sequence {sequence} was told {_told_by(again)}, which is no first result "
                        "of it"
                    )
                write.sequence = sequence
                produced.answered.append(write)
            await self._repeat(producer, produced)

    async def write_fenced(self) -> None:
        """Write as who was fenced, which is refused, alone or among others."""
        if not self._fenced:
            return
        producer = self._choose.choice(self._fenced)
        write = self._new_write(0)
        self._notes.told(write.op, "failed", error=ProducerFenced.code)  # whatever becomes of it
        sequence = None if producer.name == DRAWN else self._choose.randint(1, 20)
        await self._write(producer, write, sequence)
        raise PromiseBroken(f"a fenced opening of {producer.name} has written")

    async def _opened(self, name: str) -> Producer:
        """Return the producer, mostly opened again, and remember who was fenced by that.

        One whose sequences are drawn always is: so nothing of an earlier call is under way any
        more.
        """
        older = self._open.get(name)
        if older is not None and name != DRAWN and self._choose.random() < 0.3:
            return older
        producer = self._open[name] = await self._node.producer(name)
        if older is not None:
            self._fenced.append(older)
        return producer

    def _new_write(self, sequence: int) -> ProducedWrite:
        """Return a write of rows to `a`, of a row that replaces others in `b`, of both, or of a key
        removed there.
        """
        notes = self._notes
        names = [self._reading.name(each) for each in "ab"]
        kind = self._choose.randrange(8)
        puts: tuple[Put, ...] = ()
        drops: tuple[Drop, ...] = ()
        if kind == 0:
            drops = (Drop(names[1], self._choose.randrange(KEYS)),)
        elif kind == 1:
            puts = (*notes.puts(names[0], 1), *notes.puts(names[1], 1, replace=True))
        elif kind == 2:
            puts = notes.puts(names[1], 1, replace=True)
        else:
            puts = notes.puts(names[0], self._choose.randint(1, 2))
        return ProducedWrite(notes.asked("producer", puts, drops), puts, drops, sequence)

    async def _try(self, producer: Producer, produced: Produced, write: ProducedWrite) -> None:
        """Try a write that has no answer, now and then twice at once, which is told the same."""
        self._notes.tried(write.op)
        tries = [
            self._write(producer, write, write.sequence)
            for _ in range(self._choose.choice([1, 1, 2]))
        ]
        results, errors = await _ended(tries)
        # then nobody will ever know
        if results or any(isinstance(error, SequenceTooOld) for error in errors):
            produced.unanswered.remove(write)
        if results:
            write.result = results[0]
            produced.answered.append(write)
            self._notes.told(write.op, "ok", write.result)
        for result in results[1:]:
            _check_same(write, result)
        if errors:
            raise errors[0]

    async def _write_once(self, producer: Producer, write: ProducedWrite) -> None:
        async with self._notes.outcome_of(write.op) as results:
            write.result = await self._write(producer, write, None)
            results.append(write.result)

    async def _repeat(self, producer: Producer, produced: Produced) -> None:
        """Write again what was written, maybe lives ago, or some of it: the original results, and
        no second row.
        """
        for _ in range(self._choose.randrange(3)):
            write = self._choose.choice(produced.answered)
            _check_same(write, await self._write(producer, write, write.sequence))

    async def _write(
        self, producer: Producer, write: ProducedWrite, sequence: int | None
    ) -> WriteResult:
        timeout = self._notes.deadline_s()
        if write.drops:
            (drop,) = write.drops
            return await producer.delete("b", [drop.key], sequence=sequence, timeout=timeout)
        first = write.puts[0]
        if len({put.collection for put in write.puts}) > 1:
            async with producer.transaction(sequence=sequence) as txn:
                for put in write.puts:
                    add = txn.upsert if put.replace else txn.insert
                    await add(collection_of(put), dicts_of((put,)))
            assert txn.result is not None, "left without an error, so committed"
            return txn.result
        call = producer.upsert if first.replace else producer.insert
        return await call(
            collection_of(first), dicts_of(write.puts), sequence=sequence, timeout=timeout
        )


async def _ended(
    calls: Iterable[Coroutine[Any, Any, T]],
) -> tuple[list[T], list[StreamingNodeError]]:
    """Run calls at once, to their ends, and return what they returned and the errors of ours that
    they raised.
    """
    results: list[T] = []
    errors: list[StreamingNodeError] = []

    async def run(call: Coroutine[Any, Any, T]) -> None:
        try:
            results.append(await call)
        except StreamingNodeError as error:
            errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(run(call))
    return results, errors


def _check_same(write: ProducedWrite, again: WriteResult) -> None:
    first = _told_by(write.result)
    if _told_by(again) != first:
        raise PromiseBroken(
            f"sequence {write.sequence} was told {first}, and then {_told_by(again)}"
        )


def _told_by(result: WriteResult | None) -> tuple[object, ...]:
    assert result is not None, "only what was answered is repeated"
    offsets = tuple(sorted(result.row_offsets.items()))
    return result.time_tick, result.txn_id, tuple(map(str, result.message_ids)), offsets
