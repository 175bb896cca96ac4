"""Bugs of readers: rows left out, repeated, too early, not to the end, and places that are kept
wrong.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

import scanner.source
import streamingnode.read_message
import wal.entry
from scanner.deliver_policy import StartingPoint
from scanner.named_reader import NamedReaders, ReaderPosition
from scanner.source import EntrySource
from streamingnode.embedded import EmbeddedReading
from streamingnode.reader import CollectionReader
from tests.chaos.seeded.bug import Right, SeededBug
from wal.entry import LogEntry, TransactionBuffer
from wal.errors import Truncated
from wal.headers import MessageType
from wal.live_tail import LiveTail
from wal.message import Message


def _entry_left_out(right: Right) -> Right:
    async def following(source: EntrySource) -> list[LogEntry]:
        entries: list[LogEntry] = await right(source)
        return entries[1:] if len(entries) > 2 else entries

    return following


def _starts_one_late(right: Right) -> Right:
    def start_with(log: Any, entry: LogEntry | None, *, after_tick: int) -> Any:
        start = right(log, entry, after_tick=after_tick)
        if entry is None:
            return start
        return start._replace(position=min(start.position + 1, entry.first_position))

    return start_with


def _starts_one_early(right: Right) -> Right:
    async def start_after_tick(*arguments: Any) -> Any:
        start = await right(*arguments)
        return start._replace(after_tick=start.after_tick - 1)

    return start_after_tick


def _all_with_a_hole(_right: Right) -> Right:
    async def start_at_earliest(reads: Any) -> Any:
        return StartingPoint(reads.log.first_position, 0)

    return start_at_earliest


def _truncation_not_told(right: Right) -> Right:
    async def start_after_tick(reads: Any, tick: int) -> Any:
        try:
            return await right(reads, tick)
        except Truncated:
            return StartingPoint(reads.log.first_position, tick)

    return start_after_tick


def _tail_skips(right: Right) -> Right:
    def read(tail: LiveTail, position: int, *, bytes_max: int) -> list[LogEntry]:
        entries: list[LogEntry] = right(tail, position, bytes_max=bytes_max)
        return entries[:1] + entries[2:] if len(entries) > 2 else entries

    return read


def _lost_at_the_switch(right: Right) -> Right:
    def switch_to(source: EntrySource, tail: LiveTail) -> bool:
        was_tailing = source.tailing
        if right(source, tail) and not was_tailing:
            source._position += source._reads.log.durable_position > source._position
        return source.tailing

    return switch_to


def _told_one_tick_too_many(right: Right) -> Right:
    def following(source: EntrySource, tail: LiveTail) -> Any:
        read = right(source, tail)
        return read and read._replace(confirmed_tick=read.confirmed_tick + 1)

    return following


def _bodies_at_once(right: Right) -> Right:
    def observe_message(buffer: TransactionBuffer, message: Message) -> Any:
        outcome = right(buffer, message)
        is_body = message.txn_id and message.type in {MessageType.INSERT, MessageType.DELETE}
        return (
            msgspec.structs.replace(message, txn_id=0)
            if is_body and message.txn_id in buffer._open
            else outcome
        )

    return observe_message


def _half_a_transaction(right: Right) -> Right:
    def assemble(bodies: Sequence[Message], commit: Message) -> Any:
        transaction = right(bodies, commit)
        if len(transaction.bodies) > 1:
            return msgspec.structs.replace(transaction, bodies=transaction.bodies[1:])
        return transaction

    return assemble


def _one_shard_of_a_tick(right: Right) -> Right:
    return lambda parts, schemas: right(parts[:1], schemas)


def _ends_early(right: Right) -> Right:
    def start(reader: CollectionReader, backend: Any, request: Any, **rest: Any) -> None:
        right(
            reader,
            backend,
            request._replace(until=request.until and request.until - (1 << 20)),
            **rest,
        )

    return start


def _repeats_what_was_acknowledged(right: Right) -> Right:
    async def scan(reading: EmbeddedReading, start: Any) -> None:
        is_place = isinstance(start, StartingPoint)
        await right(
            reading, start._replace(after_tick=max(start.after_tick - 1, 0)) if is_place else start
        )

    return scan


def _acknowledged_in_memory(_right: Right) -> Right:
    async def save(readers: NamedReaders, key: str, position: ReaderPosition) -> None:
        readers._positions[key] = position

    return save


def _acknowledged_too_far(right: Right) -> Right:
    async def save(readers: NamedReaders, key: str, position: ReaderPosition) -> None:
        await right(readers, key, msgspec.structs.replace(position, tick=position.tick + (1 << 22)))

    return save


SCAN_OFF_BY_ONE = SeededBug("scan off by one", EntrySource, "_read_log", _entry_left_out)
OTHERS = (
    SeededBug("a reader starts one late", scanner.source, "_start_with", _starts_one_late),
    SeededBug("a reader starts one early", scanner.source, "_start_after_tick", _starts_one_early),
    SeededBug("a history with a hole", scanner.source, "_start_at_earliest", _all_with_a_hole),
    SeededBug(
        "a reader is not told of truncation",
        scanner.source,
        "_start_after_tick",
        _truncation_not_told,
    ),
    SeededBug("the live tail skips", LiveTail, "read", _tail_skips),
    SeededBug(
        "an entry lost at the switch to the tail", EntrySource, "_switch_to", _lost_at_the_switch
    ),
    SeededBug(
        "readers are told of a tick too many", EntrySource, "_read_tail", _told_one_tick_too_many
    ),
    SeededBug("bodies before their commit", TransactionBuffer, "_observe_message", _bodies_at_once),
    SeededBug("half a transaction", wal.entry, "assemble_transaction", _half_a_transaction),
    SeededBug(
        "one shard of an insert", streamingnode.read_message, "_merged", _one_shard_of_a_tick
    ),
    SeededBug("a read ends early", CollectionReader, "__init__", _ends_early),
    SeededBug(
        "acknowledged messages come again", EmbeddedReading, "_scan", _repeats_what_was_acknowledged
    ),
    SeededBug("acknowledged in memory only", NamedReaders, "save", _acknowledged_in_memory),
    SeededBug("acknowledged too far", NamedReaders, "save", _acknowledged_too_far),
)
