"""Which part of a damaged log can be kept. Reads; blocks.

A log is a row of entries without a gap, so of a damaged one a single unbroken stretch is kept: the one recovery starts
in, at the checkpoint's position. What lies before it is in files. What lies after its end is given up as a log, also
entries behind the damage that are whole, because what they build on is missing; they stay readable in the quarantined
database, and the plan names them. The positions given up are filled with time ticks, so that no position is ever given
to two messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rocksdict import Rdict

from streamingnode.verification.entry_scan import Unreadable, last_readable_position, scan_entries
from wal.codec import decode_entry, encode_entry, entry_crc32c
from wal.errors import Corrupt, StreamingNodeError
from wal.headers import TimeTickHeader
from wal.message import MutableMessage
from wal.message_id import RocksMessageId
from wal.message_type import MessageType
from wal.rocks.layout import entry_key

FILL_MESSAGES = 4096
"""Time ticks in one entry of the filling; one entry has one tick."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions of entries that are whole and follow each other; `tick` and `crc32c` are the last one's."""

    first: int
    last: int
    tick: int
    crc32c: int

    def __str__(self) -> str:
        return f"positions {self.first} to {self.last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSalvage:
    """What is kept of one log, None for nothing; then come time ticks up to `end`. `stretches` are all that is readable."""

    name: str
    log_id: int
    start: int
    end: int
    kept: Stretch | None
    stretches: tuple[Stretch, ...]

    @property
    def first_position(self) -> int:
        """Where the log begins afterwards."""
        return self.start if self.kept is None else self.kept.first

    @property
    def fill_from(self) -> int:
        """The first position filled with time ticks; past `end` when there is none."""
        return self.start if self.kept is None else self.kept.last + 1

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The positions that are given up, those that could be read last."""
        if self.fill_from > self.end:
            return ()
        lost = f"log {self.name!r}: positions {self.fill_from} to {self.end}"
        behind = [stretch for stretch in self.stretches if stretch.first >= self.fill_from]
        readable = "; ".join(map(str, behind))
        return (f"{lost}; of these still readable in quarantine: {readable or 'none'}",)


def salvage_log(
    entries: Rdict, *, name: str, log_id: int, first_position: int, checkpoint_position: int, floor_position: int
) -> LogSalvage:
    """Return what can be kept of a log; a checkpoint position of 0 means that there is no cut yet."""
    end = max(floor_position, last_readable_position(entries, log_id))
    stretches = tuple(readable_stretches(entries, log_id, end))
    end = max([end, *(stretch.last for stretch in stretches)])
    start = checkpoint_position or first_position
    kept = next((stretch for stretch in stretches if stretch.first <= start <= stretch.last), None)
    return LogSalvage(name=name, log_id=log_id, start=start, end=end, kept=kept, stretches=stretches)


def readable_stretches(entries: Rdict, log_id: int, end: int) -> Iterator[Stretch]:
    """Yield the unbroken stretches of a log, in order."""
    current: Stretch | None = None
    for found in scan_entries(entries, log_id, end_position=end):
        grown = None if isinstance(found, Unreadable) else _grown(current, *found)
        if current is not None and (grown is None or grown.first != current.first):
            yield current
        current = grown
    if current is not None:
        yield current


def _grown(current: Stretch | None, last_position: int, data: bytes) -> Stretch | None:
    """Return `current` with one more entry, a new stretch when it does not follow, None when it is not whole."""
    try:
        entry = decode_entry(data, wal_name=RocksMessageId.wal_name, previous_crc32c=None)
    except StreamingNodeError:
        return None
    if entry.last_position != last_position:
        return None
    follows = (
        current is not None
        and entry.first_position == current.last + 1
        and int.from_bytes(data[8:12], "little") == current.crc32c
        and entry.time_tick > current.tick
    )
    first = current.first if current is not None and follows else entry.first_position
    return Stretch(first, entry.last_position, entry.time_tick, entry.crc32c)


def salvaged_entries(
    entries: Rdict, salvage: LogSalvage, *, above_tick: int, term: int, source_id: str
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of the log as it is afterwards: what is kept, byte for byte, then the filling."""
    kept = salvage.kept
    if kept is not None:
        yield from _kept_entries(entries, salvage.log_id, kept)
    crc32c = 0 if kept is None else kept.crc32c
    position, tick = salvage.fill_from, above_tick
    while position <= salvage.end:
        count = min(FILL_MESSAGES, salvage.end - position + 1)
        tick += 1
        data = encode_entry(
            [_time_tick(tick, term, source_id) for _ in range(count)], first_position=position, previous_crc32c=crc32c
        )
        yield entry_key(salvage.log_id, position + count - 1), data
        crc32c = entry_crc32c(data)
        position += count


def _kept_entries(entries: Rdict, log_id: int, kept: Stretch) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a stretch again. Raises `Corrupt` when they are not what they were a moment ago."""
    current: Stretch | None = None
    for found in scan_entries(entries, log_id, end_position=kept.last, start_position=kept.first):
        if isinstance(found, Unreadable):  # a seek into the stretch may begin in the damaged block before it
            continue
        if found[0] > kept.last:
            break
        current = _grown(current, *found)
        yield entry_key(log_id, found[0]), found[1]
    if current != kept:
        raise Corrupt(f"the disk gives other bytes each time: {kept} were whole a moment ago — copy the disk first")


def fill_ticks(salvage: LogSalvage) -> int:
    """Return how many ticks the filling takes."""
    return -(-max(0, salvage.end - salvage.fill_from + 1) // FILL_MESSAGES)


def _time_tick(tick: int, term: int, source_id: str) -> MutableMessage:
    message = MutableMessage(MessageType.TIME_TICK, TimeTickHeader(source_id=source_id))
    return message.with_time_tick(tick).with_wal_term(term)
