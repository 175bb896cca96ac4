"""Reading a range of entries and checking every one; runs on a reader thread, one hop for a whole batch.

In: where to start, where the synced part ends, how many bytes. Out: decoded entries without a gap, or `Corrupt` with the
range. RocksDB ends an iteration early over a damaged block and says so only in `status()`; an end before the synced
position, a gap in positions or a break in the checksum chain are looked for all the same.
"""

from rocksdict import Rdict, RdictIter

from wal.codec import decode_entry, entry_crc32c
from wal.errors import Corrupt
from wal.message import LogEntry
from wal.message_id import POSITION_MAX
from wal.rocks.keys import entry_key, split_entry_key


def read_range(
    entries: Rdict, log_id: int, *, position: int, first_position: int, end_position: int, bytes_max: int, wal_name: str
) -> list[LogEntry]:
    """Return entries from the one that holds `position` on, until `bytes_max` is reached or `end_position` is read.

    `first_position` is the earliest kept, `end_position` the last synced one, and `position` is between them. Raises
    `Corrupt` for damage, a gap or an early end.
    """
    iterator = entries.iter()
    previous_crc32c, expected = _seek(iterator, log_id, position, first_position)
    found: list[LogEntry] = []
    size = 0
    while size < bytes_max and expected <= end_position:
        last_position = _current_position(iterator, log_id)
        if last_position is None:
            raise _missing(expected, end_position)
        entry = decode_entry(iterator.value(), wal_name=wal_name, previous_crc32c=previous_crc32c)
        if entry.first_position != expected or entry.last_position != last_position:
            raise _missing(expected, entry.first_position - 1)
        previous_crc32c, expected = entry.crc32c, last_position + 1
        size += entry.size_bytes
        found.append(entry)
        iterator.next()
    return found


def first_entry(entries: Rdict, log_id: int) -> tuple[int, bytes] | None:
    """Return the last position of the first entry of a log, and its bytes; None when it has none."""
    iterator = entries.iter()
    iterator.seek(entry_key(log_id, 0))
    return _current(iterator, log_id)


def last_entry(entries: Rdict, log_id: int) -> tuple[int, bytes] | None:
    """Return the last position of a log, and its last entry's bytes; None when it has none."""
    iterator = entries.iter()
    iterator.seek_for_prev(entry_key(log_id, POSITION_MAX))
    return _current(iterator, log_id)


def last_position(entries: Rdict, log_id: int) -> int:
    """Return the last position of a log without looking at the entry, 0 when it has none."""
    iterator = entries.iter()
    iterator.seek_for_prev(entry_key(log_id, POSITION_MAX))
    return _current_position(iterator, log_id) or 0


def _seek(iterator: RdictIter, log_id: int, position: int, first_position: int) -> tuple[int | None, int]:
    """Go to the entry that holds `position`; return the checksum and the position it must follow on.

    The entry before it is looked at too: so the chain is checked across batches, and no entry can be missing in between.
    """
    iterator.seek_for_prev(entry_key(log_id, position - 1))
    before = _current(iterator, log_id)
    if before is None:
        iterator.seek(entry_key(log_id, first_position))
        return None, first_position
    iterator.next()
    return entry_crc32c(before[1]), before[0] + 1


def _current(iterator: RdictIter, log_id: int) -> tuple[int, bytes] | None:
    position = _current_position(iterator, log_id)
    return None if position is None else (position, iterator.value())


def _current_position(iterator: RdictIter, log_id: int) -> int | None:
    """Return where the iterator is in a log, None when it is outside. Raises when damage took it there."""
    # RocksDB's iteration bounds would spare the look at each key, but rocksdict encodes them as if not in raw mode.
    if not iterator.valid():
        iterator.status()
        return None
    found_id, position = split_entry_key(iterator.key())
    return position if found_id == log_id else None


def _missing(first: int, last: int) -> Corrupt:
    return Corrupt(f"positions {first} to {last} are missing or unreadable")
