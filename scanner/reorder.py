"""What a reader is given and when: in the order of ticks, once a tick says that nothing lower
follows. No I/O.

The log stores of this project deliver in tick order already, and then reordering costs next to
nothing; the promise to readers does not depend on it.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import cast

from wal.entry import LogEntry, PackedRows, RowBatch, Visible
from wal.errors import InvalidArgument
from wal.headers import SYSTEM, CommitTxnHeader, MessageType
from wal.message import ALL_VCHANNELS, Message, TransactionMessage


class ReorderBuffer:
    """Entries above the last tick popped, by the tick of their last group: ticks are never given
    twice.
    """

    __slots__ = ("_entries", "last_tick")

    def __init__(self) -> None:
        self._entries: dict[int, LogEntry] = {}
        self.last_tick = 0

    def push(self, entry: LogEntry) -> None:
        """Take an entry, unless it is here already, or too late to be delivered in order."""
        if entry.time_tick > self.last_tick:
            self._entries.setdefault(entry.time_tick, entry)

    def pop_until(self, tick: int) -> list[LogEntry]:
        """Return the entries at or below a confirmed tick, ascending; a tick that is no news is
        ignored.
        """
        if tick <= self.last_tick:
            return []
        self.last_tick = tick
        ticks = sorted(self._entries)
        return [self._entries.pop(at) for at in ticks[: bisect_right(ticks, tick)]]


class ScanFilter:
    """What one reader wants, decided on whole messages: a transaction that touches a wanted
    vchannel comes whole.

    `vchannels` and `types` None means any; a message for all vchannels is on each of them. Types
    apply to plain messages only; listing a system type raises `InvalidArgument`. Ticks pass above
    `after_tick`, those stored in the log never.
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
                f"{names} cannot be filtered by — transactions and ticks reach every reader"
            )
        self._vchannels = vchannels
        self._types = types
        self.after_tick = after_tick

    def select(self, visible: Sequence[Visible], time_tick: int) -> Sequence[Visible]:
        """Return what of one entry passes, in order; `time_tick` is that of its last group."""
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
        """Return what passes: whole transactions with rows on a wanted vchannel, of plain groups
        what is wanted there.
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
        """Whether the transaction of this commit would pass."""
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
