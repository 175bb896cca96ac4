"""Puts entries into the order of their ticks, and lets them go only when a tick says that nothing lower follows. No I/O.

Entries come in as a log hands them out, ticks beside them; entries go out strictly ascending. The log stores of this
project deliver in tick order already, and then this costs next to nothing; the promise to readers does not depend on it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from wal.errors import InvalidArgument
from wal.headers import SYSTEM, CommitTxnHeader, MessageType
from wal.message import ALL_VCHANNELS, AnyMessage, LogEntry, Message


class ReorderBuffer:
    """Entries above the last tick popped. One entry for each tick: ticks are never given twice.

    What arrives at or below the last tick is too late to be delivered in order: it is refused and counted in `late_count`.
    The same entry again is refused.
    """

    __slots__ = ("_entries", "last_tick", "late_count", "size_bytes")

    def __init__(self) -> None:
        self._entries: dict[int, LogEntry] = {}
        self.last_tick = 0
        self.size_bytes = 0
        self.late_count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, entry: LogEntry) -> bool:
        """Take an entry; returns False when it is refused."""
        tick = entry.time_tick
        if tick <= self.last_tick:
            self.late_count += 1
            return False
        if tick in self._entries:
            return False
        self._entries[tick] = entry
        self.size_bytes += entry.size_bytes
        return True

    def pop_until(self, tick: int) -> list[LogEntry]:
        """Return the entries at or below a confirmed tick, ascending; a tick that is no news is ignored."""
        if tick <= self.last_tick:
            return []
        self.last_tick = tick
        ticks = sorted(self._entries)
        popped = [self._entries.pop(at) for at in ticks[: bisect_right(ticks, tick)]]
        self.size_bytes -= sum(entry.size_bytes for entry in popped)
        return popped


# --- filters ---
#
# Which messages a reader wants. No I/O.
#
# Decided on whole messages: a plain message by itself, a transaction as one at its commit. So begins and bodies always
# pass, and a transaction that touches a wanted vchannel comes whole. Ticks stored in the log are not delivered: batches
# carry them as their confirmed tick.


class ScanFilter:
    """The conditions of one reader; all of them hold for a message that passes.

    `vchannels` and `types` None means any; a message for all vchannels is on each of them. Types apply to plain messages
    only; listing a system type raises `InvalidArgument`. Ticks pass above `after_tick`.
    """

    __slots__ = ("_types", "_vchannels", "after_tick")

    def __init__(
        self,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
        after_tick: int = 0,
    ) -> None:
        if types is not None and types & SYSTEM:
            names = ", ".join(sorted(kind.name for kind in types & SYSTEM))
            raise InvalidArgument(f"{names} cannot be filtered by — transactions and ticks reach every reader")
        self._vchannels = vchannels
        self._types = types
        self.after_tick = after_tick

    def select(self, messages: Sequence[AnyMessage], time_tick: int) -> Sequence[AnyMessage]:
        """Return those of one tick's messages that pass, in order."""
        if time_tick <= self.after_tick:
            return ()
        if self._vchannels is None and self._types is None:
            if messages and messages[0].type is not MessageType.TIME_TICK:
                return messages
            return ()
        return [message for message in messages if self._passes(message)]

    def wants_commit(self, commit: Message) -> bool:
        """Whether the transaction of this commit would pass."""
        return commit.time_tick > self.after_tick and self._on_wanted(_vchannels_of(commit))

    def _passes(self, message: AnyMessage) -> bool:
        if not isinstance(message, Message):
            return self._on_wanted(_vchannels_of(message.commit))
        if message.type is MessageType.TIME_TICK or (self._types is not None and message.type not in self._types):
            return False
        return self._vchannels is None or message.vchannel == ALL_VCHANNELS or message.vchannel in self._vchannels

    def _on_wanted(self, vchannels: tuple[str, ...]) -> bool:
        return self._vchannels is None or not self._vchannels.isdisjoint(vchannels)


def _vchannels_of(commit: Message) -> tuple[str, ...]:
    return cast("CommitTxnHeader", commit.header).vchannels
