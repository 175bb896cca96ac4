"""The contract of a log of entries, which are bytes: logs of packs and topics are both made of one.

`tests/wal/log_contract.py` and `tests/wal/owned_log_contract.py` are the contract as tests; every
store passes them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

E = TypeVar("E", bound="Entry")

Decode = Callable[[bytes, int | None], E]
"""Returns an entry, checked against the checksum of the one before it, None where that is not kept.
Raises `Corrupt`.
"""


class Entry(Protocol):
    """What a log needs to know of an entry."""

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
        """How many bytes it has in the log."""


class EntryLog(Protocol[E]):
    """One ordered log of entries. Positions are dense; an entry takes one for each message in it.

    All methods are called on the event loop; none blocks it.
    """

    first_position: int
    """Position of the earliest message still kept; `next_position` when none is."""
    next_position: int

    @property
    def durable_position(self) -> int:
        """Position of the last message known to be synced; `first_position - 1` when none is."""

    async def read(self, position: int, *, bytes_max: int) -> list[E]:
        """Return consecutive synced entries from the one that holds `position`, at least one if
        there is one.

        Stops after the entry that reaches `bytes_max`. Empty when `position` is past the last
        synced entry. Every entry is checked: checksum, chain, density. Raises `Truncated` below
        `first_position`, `Corrupt` with the range for damage or an early end.
        """

    async def wait_beyond(self, position: int) -> None:
        """Wait, without polling, until a message after `position` is synced. Raises `OnShutdown` on
        close.
        """


class OwnedLog(EntryLog[E], Protocol[E]):
    """A log whose owner keeps its ends in records of the state map, and writes it in a `Batch`."""

    log_id: int

    async def go_on(self, first_position: int, last_position: int, crc32c: int) -> None:
        """Go on from the ends that the owner's records tell of, after its store was opened.

        Raises `Corrupt` when the last entry is not the one with this position and checksum.
        """


class Batch:
    """Changes that become durable together, or not at all."""

    def __init__(self, records: Mapping[str, bytes | None] | None = None) -> None:
        self.records: dict[str, bytes | None] = dict(records or {})
        """Of the state map; None removes."""
        self.entries: list[tuple[OwnedLog[Any], int, bytes]] = []
        """Entries by log and last position, in their order."""
        self.kept: dict[OwnedLog[Any], int] = {}
        """Logs that begin at a later position from now on."""
        self.removed: list[OwnedLog[Any]] = []
        """Logs that are given up as a whole."""

    def append(self, log: OwnedLog[Any], last_position: int, data: bytes) -> None:
        """Add an entry to a log, behind those that are there."""
        self.entries.append((log, last_position, data))

    def truncate(self, log: OwnedLog[Any], first_position: int) -> None:
        """Give up all messages of a log before a position, which may lie inside an entry."""
        self.kept[log] = first_position

    def remove(self, log: OwnedLog[Any]) -> None:
        """Give up a log as a whole."""
        self.removed.append(log)

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.records or self.entries or self.kept or self.removed)
