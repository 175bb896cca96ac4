"""The contract of a log of entries, which are bytes. Logs of packs and topics are both built on it.

`tests/wal/log_contract.py` and `tests/wal/owned_log_contract.py` are the contract as tests; every
store passes them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

E = TypeVar("E", bound="Entry")

Decode = Callable[[bytes, int | None], E]
"""Returns the entry in some bytes, checked against the checksum of the entry before it, or None if
that entry is not kept. Raises `Corrupt`.
"""


class Entry(Protocol):
    """The properties that a log needs of an entry."""

    @property
    def first_position(self) -> int:
        """The position of its first message."""

    @property
    def last_position(self) -> int:
        """The position of its last message."""

    @property
    def crc32c(self) -> int:
        """Its checksum, which the next entry repeats."""

    @property
    def size_bytes(self) -> int:
        """Its size in the log, in bytes."""


class EntryLog(Protocol[E]):
    """One ordered log of entries. Positions are dense; an entry takes one for each message in it.

    All methods are called on the event loop; none blocks it.
    """

    first_position: int
    """Position of the earliest kept message; `next_position` when the log is empty."""
    next_position: int

    @property
    def durable_position(self) -> int:
        """Position of the last message known to be synced; `first_position - 1` when there is
        none.
        """

    async def read(self, position: int, *, bytes_max: int) -> list[E]:
        """Return consecutive synced entries from the one that holds `position`; at least one, if
        any exists.

        Stops after the entry that reaches `bytes_max`. Empty when `position` is past the last
        synced entry. Every entry is checked: checksum, chain, density. Raises `Truncated` below
        `first_position`, `Corrupt` with the range for damage or an early end.
        """

    async def wait_beyond(self, position: int) -> None:
        """Wait, without polling, until a message after `position` is synced. Raises `OnShutdown` on
        close.
        """


class OwnedLog(EntryLog[E], Protocol[E]):
    """A log whose owner stores its ends in records of the state map and writes it with a
    `Batch`.
    """

    log_id: int

    async def go_on(self, first_position: int, last_position: int, crc32c: int) -> None:
        """Continue from the ends in the owner's records, after the store is opened.

        Raises `Corrupt` when the last entry is not the one with this position and checksum.
        """


class Batch:
    """Changes that become durable together, or not at all."""

    def __init__(self, records: Mapping[str, bytes | None] | None = None) -> None:
        self.records: dict[str, bytes | None] = dict(records or {})
        """Records of the state map; None removes a key."""
        self.entries: list[tuple[OwnedLog[Any], int, bytes]] = []
        """Appended entries in order: the log, the last position and the bytes of each."""
        self.kept: dict[OwnedLog[Any], int] = {}
        """The new first position of each truncated log."""
        self.removed: list[OwnedLog[Any]] = []
        """Logs to delete."""

    def append(self, log: OwnedLog[Any], last_position: int, data: bytes) -> None:
        """Append an entry to a log."""
        self.entries.append((log, last_position, data))

    def truncate(self, log: OwnedLog[Any], first_position: int) -> None:
        """Truncate all messages of a log before a position, which may lie inside an entry."""
        self.kept[log] = first_position

    def remove(self, log: OwnedLog[Any]) -> None:
        """Delete a log with all its entries."""
        self.removed.append(log)

    @property
    def is_empty(self) -> bool:
        """Whether the batch changes nothing."""
        return not (self.records or self.entries or self.kept or self.removed)
