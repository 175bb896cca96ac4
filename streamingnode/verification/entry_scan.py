"""Every entry of a log as RocksDB gives it, going on behind what it cannot read. Blocks.

RocksDB ends an iteration over a damaged block as if that were the end, and says so only in `status()`. Here that is a step
of its own, and the scan goes on at the next position that can be read.
"""

from collections.abc import Iterator

from rocksdict import Rdict, RdictIter

from wal.rocks.layout import entry_key, split_entry_key

PROBES_MAX = 1 << 20
"""Positions tried behind damage, about 20 us each; a damaged block holds a few entries."""


class Unreadable(str):
    """Why reading failed here; the scan goes on behind it."""

    __slots__ = ()


def scan_entries(
    entries: Rdict, log_id: int, *, end_position: int, start_position: int = 0
) -> Iterator[tuple[int, bytes] | Unreadable]:
    """Yield (last position, bytes) of each entry from the one that holds `start_position`, and where reading failed.

    Behind damage, positions up to `end_position` are tried.
    """
    position = start_position
    while True:
        iterator = entries.iter()
        iterator.seek(entry_key(log_id, position))
        failure: str | None = None
        while True:
            found, failure = _current(iterator, log_id)
            if found is None:
                break
            yield found
            position = found[0] + 1
            iterator.next()
        if failure is None:
            return
        yield Unreadable(failure)
        readable = _next_readable(entries, log_id, position, end_position)
        if readable is None:
            return
        position = readable


def last_readable_position(entries: Rdict, log_id: int) -> int:
    """Return the last position of a log, 0 when it has none or its end cannot be read."""
    iterator = entries.iter()
    iterator.seek_for_prev(entry_key(log_id, (1 << 64) - 1))
    found, _ = _current(iterator, log_id)
    return 0 if found is None else found[0]


def _next_readable(entries: Rdict, log_id: int, position: int, end_position: int) -> int | None:
    for probe in range(position + 1, min(end_position, position + PROBES_MAX) + 1):
        iterator = entries.iter()
        iterator.seek(entry_key(log_id, probe))
        found, failure = _current(iterator, log_id)
        if found is not None:
            return probe
        if failure is None:
            return None
    return None


def _current(iterator: RdictIter, log_id: int) -> tuple[tuple[int, bytes] | None, str | None]:
    """Return the entry the iterator is at, or why there is none; (None, None) at the end of the log."""
    try:
        if not iterator.valid():
            iterator.status()
            return None, None
        found_id, position = split_entry_key(iterator.key())
        return ((position, iterator.value()), None) if found_id == log_id else (None, None)
    except Exception as error:  # noqa: BLE001 - rocksdict raises nothing more exact
        return None, str(error)
