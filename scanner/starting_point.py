"""Finds the place in a log where a deliver policy starts.

A policy and the log's end at the time of opening come in; a position to read from and the tick to deliver above go out. The
position is the last-confirmed one of the first entry wanted, so transactions in flight there are assembled whole.
"""

from typing import NamedTuple

from scanner.deliver_policy import (
    DeliverAll,
    DeliverLatest,
    DeliverPolicy,
    StartAfter,
    StartAfterTick,
    StartFrom,
    check_policy,
)
from scanner.source import PatientLog
from wal.errors import InvalidArgument, Truncated
from wal.live_tail import LiveTail
from wal.log import Log
from wal.message import LogEntry
from wal.position import FIRST_POSITION, MessageId, message_id_kind


class LogEnd(NamedTuple):
    """Where a log ended when a reader was opened: its last synced position and its confirmed tick."""

    position: int
    confirmed_tick: int


class StartingPoint(NamedTuple):
    """Read from `position`; deliver what has a tick above `after_tick`."""

    position: int
    after_tick: int


def log_end(log: Log, tail: LiveTail | None) -> LogEnd:
    """Return where the log ends now."""
    return LogEnd(log.durable_position, tail.confirmed_tick if tail is not None else 0)


async def find_start(log: Log, reader: PatientLog, policy: DeliverPolicy, end: LogEnd) -> StartingPoint:
    """Return where `policy` starts in `log`.

    Raises `Truncated` when something it asks for is, or may be, no longer kept, and `InvalidArgument` for an id of another
    kind of log or of a message that does not exist yet. Cancelling loses nothing.
    """
    match policy:
        case DeliverAll():
            return await _start_at_earliest(log, reader)
        case DeliverLatest():
            return await _start_at_end(log, reader, end)
        case StartFrom(message_id=message_id) if message_id.position == log.next_position:
            _check_kind(log, message_id)
            await _wait_synced(log, message_id.position - 1)
            return await _start_at_end(log, reader, LogEnd(message_id.position - 1, 0))
        case StartFrom(message_id=message_id):
            entry = await _entry_of(log, reader, message_id)
            return _start_with(log, entry, after_tick=entry.time_tick - 1)
        case StartAfter(message_id=message_id):
            entry = await _entry_of(log, reader, message_id)
            return _start_with(log, entry, after_tick=entry.time_tick)
        case StartAfterTick(tick=tick):
            return await _start_after_tick(log, reader, tick)
        case _:
            check_policy(policy)
            raise AssertionError(f"nobody knows where {policy} starts")


def _start_with(log: Log, entry: LogEntry, *, after_tick: int) -> StartingPoint:
    # Below the first position lie only transactions that ended before the log was truncated to it, or ones that are lost:
    # which of the two shows when a commit turns up without its begin.
    return StartingPoint(max(entry.last_confirmed_position, log.first_position), after_tick)


async def _start_at_earliest(log: Log, reader: PatientLog) -> StartingPoint:
    """Start with the first entry from which on nothing is missing.

    Behind a truncation lie commits whose begins are gone. What comes before the last of them would be a history with a hole:
    rows, no transaction, rows. Last-confirmed positions ascend, so the first entry that needs nothing gone is searched for.
    """
    while (first_position := log.first_position) > FIRST_POSITION:
        low, high = first_position, log.durable_position + 1
        earliest: LogEntry | None = None
        try:
            while low < high:
                entry = await reader.entry_at((low + high) // 2)
                assert entry is not None, "what is synced can be read"
                if entry.last_confirmed_position >= first_position:
                    earliest, high = entry, entry.first_position
                else:
                    low = entry.last_position + 1
        except Truncated:
            continue  # the log was truncated meanwhile
        return StartingPoint(first_position, earliest.time_tick - 1 if earliest else 0)
    return StartingPoint(first_position, 0)


async def _start_at_end(log: Log, reader: PatientLog, end: LogEnd) -> StartingPoint:
    if end.position + 1 < log.first_position:  # truncated meanwhile, past something that came after the end
        kind = message_id_kind(log.wal_name)
        raise Truncated(kind(end.position + 1), kind(log.first_position))
    entry = await reader.entry_at(end.position) if end.position >= log.first_position else None
    if entry is None:
        return StartingPoint(log.first_position, end.confirmed_tick)
    return _start_with(log, entry, after_tick=max(entry.time_tick, end.confirmed_tick))


async def _entry_of(log: Log, reader: PatientLog, message_id: MessageId) -> LogEntry:
    _check_kind(log, message_id)
    if message_id.position < log.first_position:
        raise Truncated(message_id, type(message_id)(log.first_position))
    if message_id.position >= log.next_position:
        raise InvalidArgument(f"no message has the id {message_id} yet — start at the end for what is to come")
    await _wait_synced(log, message_id.position)
    entry = await reader.entry_at(message_id.position)
    assert entry is not None, "what is synced can be read"
    return entry


def _check_kind(log: Log, message_id: MessageId) -> None:
    if type(message_id) is not message_id_kind(log.wal_name):
        raise InvalidArgument(f"{message_id} is no position in a {log.wal_name} log — use an id this log gave out")


async def _wait_synced(log: Log, position: int) -> None:
    if position > log.durable_position:
        await log.wait_beyond(position - 1)


async def _start_after_tick(log: Log, reader: PatientLog, tick: int) -> StartingPoint:
    while True:
        first_position = log.first_position
        try:
            return await _search_after_tick(log, reader, tick)
        except Truncated:
            if log.first_position == first_position:
                raise  # else the log was truncated meanwhile, perhaps not up to the tick


async def _search_after_tick(log: Log, reader: PatientLog, tick: int) -> StartingPoint:
    low, high = log.first_position, log.durable_position + 1
    first_above: LogEntry | None = None
    last_below: LogEntry | None = None
    while low < high:
        entry = await reader.entry_at((low + high) // 2)
        assert entry is not None, "what is synced can be read"
        if entry.time_tick > tick:
            first_above, high = entry, entry.first_position
        else:
            last_below, low = entry, entry.last_position + 1
    if last_below is None and log.first_position > FIRST_POSITION:
        # Something above the tick may have been in front of what is kept.
        raise Truncated(f"tick {tick}", message_id_kind(log.wal_name)(log.first_position))
    nearest = first_above or last_below
    return StartingPoint(low, tick) if nearest is None else _start_with(log, nearest, after_tick=tick)
