"""Every entry of a log whose database nobody has open, going on behind what cannot be read. Blocks.

An entry is believed when its checksum holds and it follows on the one before it: in position, checksum, tick and term. What
lies between two good entries is named as one range.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rocksdict import Rdict

from streamingnode.care.findings import Report
from wal.codec import decode_entry
from wal.entry import LogEntry
from wal.errors import Corrupt, StreamingNodeError
from wal.position import RocksMessageId
from wal.rocks.layout import entry_key, split_entry_key
from wal.rocks.log import read_range
from wal.rocksmq.group import Topic
from wal.rocksmq.messages import TopicEntry
from wal.rocksmq.messages import decode_entry as decode_topic_entry

STEP_BYTES = 1 << 20
"""Read of a log between two steps: a few milliseconds, so that a walk can be paced and ended."""

PROBES_MAX = 1 << 20
"""Positions tried behind damage, about 20 us each; a damaged block holds a few entries."""

Stored = tuple[int, bytes] | Exception
"""The last position of an entry and its bytes, or why reading failed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLog:
    """One log of a closed node: it must hold everything from position `first` to `end`.

    `first` is 0 when nobody knows. What a log that `is_torn` has behind `end`, the next owner drops.
    """

    name: str
    log_id: int
    entries: Rdict
    first: int
    end: int
    is_torn: bool


def stored_entries(log: ClosedLog) -> Iterator[Stored]:
    """Yield what is stored from the entry that holds position `first` on; behind damage, positions up to `end` are tried."""
    position, probes = log.first, 0
    while position <= max(log.end, log.first) and probes <= PROBES_MAX:
        iterator = log.entries.iter()
        iterator.seek(entry_key(log.log_id, position))
        try:
            while iterator.valid():
                found_id, last = split_entry_key(iterator.key())
                if found_id != log.log_id or (log.is_torn and last > log.end):
                    return
                yield last, iterator.value()
                position, probes = last + 1, 0
                iterator.next()
            iterator.status()  # without this a damaged block looks like the end
            return
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            if not probes:
                yield error
            position, probes = position + 1, probes + 1


def good_entries(log: ClosedLog, stored: Iterable[Stored], report: Report) -> Iterator[LogEntry]:
    """Yield the entries that are what was written, and report what does not follow or is not there."""
    expected, failure = log.first, ""
    before: LogEntry | None = None
    for each in stored:
        try:
            entry = _decoded(each, expected, before)
        except (StreamingNodeError, OSError) as error:
            failure, before = failure or str(error), None
            continue
        if failure or entry.first_position > expected:
            _lost(log, expected, entry.first_position - 1, failure, report)
        expected, failure, before = entry.last_position + 1, "", entry
        report.count("log entries")
        report.count("log positions", entry.count)
        yield entry
    if failure or expected <= log.end:
        _lost(log, expected, log.end, failure, report)


def _decoded(stored: Stored, expected: int, before: LogEntry | None) -> LogEntry:
    """Return an entry that may stand at a position, directly behind `before` if that is known. Raises `Corrupt`."""
    if isinstance(stored, Exception):
        raise Corrupt(str(stored))
    last, data = stored
    try:
        previous_crc32c = None if before is None else before.crc32c
        entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=previous_crc32c)
    except Corrupt:
        entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=None)
        if entry.first_position <= expected:
            raise
        # Behind a gap, nothing tells what it has to follow.
    if entry.last_position != last:
        raise Corrupt(f"the key of position {last} holds the entry that ends at {entry.last_position}")
    if entry.first_position < expected:
        raise Corrupt(f"an entry begins at position {entry.first_position}, which another one has")
    if before is not None and (entry.first_tick <= before.time_tick or entry.wal_term < before.wal_term):
        raise Corrupt(f"tick or term of the entry at position {entry.first_position} go back")
    return entry


def _lost(log: ClosedLog, first: int, last: int, failure: str, report: Report) -> None:
    detail = failure.partition(" — ")[0] or "missing, and was acknowledged"
    report.damage(f"log {log.name!r}, positions {first} to {max(first, last)}", detail)


TopicRead = Callable[[Topic, int], list[TopicEntry]]
"""Returns entries of a topic from the one that holds an id on; none to let it be."""


def read_topic(entries: Rdict, topic: Topic, message_id: int) -> list[TopicEntry]:
    """Return entries of a topic from the one that holds a message on. Raises `Corrupt`."""
    kept = topic.begin_id, topic.end_id
    return read_range(entries, topic.log_id, decode_topic_entry, message_id, kept, STEP_BYTES)


def check_topics(topics: Mapping[str, Topic], read: TopicRead, report: Report) -> None:
    """Read every topic to its end; of a damaged one, what is behind the damage is not looked at."""
    for name, topic in topics.items():
        message_id, crc32c = topic.begin_id, topic.crc32c
        try:
            while message_id <= topic.end_id:
                entries = read(topic, message_id)
                if not entries:
                    break
                count = sum(len(entry.messages()) for entry in entries)
                message_id, crc32c = entries[-1].last_position + 1, entries[-1].crc32c
                report.count("topic messages", count)
                report.read("topics", sum(entry.size_bytes for entry in entries))
            if message_id > topic.end_id and crc32c != topic.crc32c:
                raise Corrupt(f"its last entry is another one than was written before id {message_id}")
        except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
            report.error(f"topic {name!r}, from id {message_id}", error)
        report.count("topics")
