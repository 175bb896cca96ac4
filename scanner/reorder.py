"""Orders entries by tick and filters them: an entry passes once a tick confirms that nothing lower
follows. No I/O.

This project's log stores already deliver in tick order, which makes reordering nearly free. The
ordering promise to readers does not depend on it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from wal.entry import LogEntry, PackedRows, RowBatch, Visible
from wal.errors import InvalidArgument
from wal.headers import SYSTEM, CommitTxnHeader, MessageType
from wal.message import ALL_VCHANNELS, Message, TransactionMessage


class ReorderBuffer:
    """Entries above the last popped tick, by the tick of their last group; ticks are unique."""

    __slots__ = ("_entries", "last_tick")

    def __init__(self) -> None:
        self._entries: dict[int, LogEntry] = {}
        self.last_tick = 0

    def push(self, entry: LogEntry) -> None:
        """Add an entry, unless it is a duplicate or too late to be delivered in order."""
        if entry.time_tick > self.last_tick:
            self._entries.setdefault(entry.time_tick, entry)

    def pop_until(self, tick: int) -> list[LogEntry]:
        """Remove and return the entries at or below a confirmed tick, ascending; none when it is
        not new.
        """
        if tick <= self.last_tick:
            return []
        self.last_tick = tick
        ticks = sorted(self._entries)
        return [self._entries.pop(at) for at in ticks[: bisect_right(ticks, tick)]]


class ScanFilter:
    """The filter of one reader. It passes whole messages: a transaction that touches a wanted
    vchannel comes whole.

    None for `vchannels` or `types` means any. A message for all vchannels is on each of them. Types
    filter plain messages only; listing a system type raises `InvalidArgument`. Only messages above
    `after_tick` pass; time ticks stored in the log never pass.
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
            raise InvalidArgument(
                f"types cannot name {names} — transactions and ticks reach every reader"
            )
        self._vchannels = vchannels
        self._types = types
        self.after_tick = after_tick

    def select(self, visible: Sequence[Visible], time_tick: int) -> Sequence[Visible]:
        """Return the messages of one entry that pass, in order; `time_tick` is that of its last
        group.
        """
        if time_tick <= self.after_tick:
            return ()
        if visible and isinstance(rows := visible[0], PackedRows):
            passing = self._select_rows(rows)
            return () if passing is None else (passing,)
        if self._vchannels is None and self._types is None:
            head = visible[0] if visible else None
            return (
                () if isinstance(head, Message) and head.type is MessageType.TIME_TICK else visible
            )
        return [message for message in visible if self._passes(message)]

    def _select_rows(self, rows: PackedRows) -> PackedRows | None:
        """Return the rows that pass: whole transactions with rows on a wanted vchannel, and wanted
        batches of plain groups.
        """
        later = rows.within(above=self.after_tick)
        vchannels = self._vchannels
        types = self._types

        def is_there(batch: RowBatch) -> bool:
            return vchannels is None or batch.vchannel in vchannels

        def is_wanted(batch: RowBatch) -> bool:
            return is_there(batch) and (types is None or batch.type in types)

        if later is None or all(map(is_wanted, later.batches)):
            return later
        return later.only(later.transactions & later.groups_where(is_there), is_wanted)

    def wants_commit(self, commit: Message) -> bool:
        """Return whether the transaction of this commit passes."""
        return commit.time_tick > self.after_tick and self._touches_wanted(commit)

    def _passes(self, message: Visible) -> bool:
        if isinstance(message, TransactionMessage):
            return self._touches_wanted(message.commit)
        assert isinstance(message, Message), "rows come alone"
        if message.type is MessageType.TIME_TICK or (
            self._types is not None and message.type not in self._types
        ):
            return False
        return (
            self._vchannels is None
            or message.vchannel == ALL_VCHANNELS
            or message.vchannel in self._vchannels
        )

    def _touches_wanted(self, commit: Message) -> bool:
        return self._vchannels is None or not self._vchannels.isdisjoint(
            cast("CommitTxnHeader", commit.header).vchannels
        )
