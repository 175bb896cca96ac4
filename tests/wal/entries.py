"""Entries that are in no log."""

from collections.abc import Sequence
from typing import Any

from wal.append import AppendGroup, AppendTicket
from wal.entry import LogEntry
from wal.message import MutableMessage
from wal.position import ProducerStamp


def into_entry(
    messages: Sequence[MutableMessage],
    *,
    wal_name: str = "memory",
    first_position: int,
    crc32c: int = 0,
    size_bytes: int = 0,
    producer: ProducerStamp | None = None,
) -> LogEntry:
    """Return the entry that stamped messages would be at this position."""
    nobody_waits: Any = None
    group = AppendGroup(list(messages), producer=producer)
    group.ticket = AppendTicket(first_position, crc32c, size_bytes, nobody_waits, nobody_waits)
    return group.entry(wal_name)
