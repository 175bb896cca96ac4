"""Confirmed ticks on their way to readers: entries and idle ticks go to the live tail."""

from collections.abc import Sequence
from typing import Protocol

from interceptors.timetick.ack_detail import AckDetail, AckKind
from interceptors.timetick.mvcc import MvccManager
from wal.message import LogEntry


class TailSink(Protocol):
    """Where readers get what is confirmed. Neither method suspends; both are called in ascending ticks."""

    def append(self, entry: LogEntry) -> None:
        """Give readers an entry; it confirms its own tick."""

    def advance(self, tick: int) -> None:
        """Tell readers that everything at or below `tick` has been given to them."""


class ReaderRelease:
    """Gives readers newly confirmed ticks; call it with what the ack manager confirmed, in order."""

    __slots__ = ("_mvcc", "_tail")

    def __init__(self, tail: TailSink, mvcc: MvccManager) -> None:
        self._tail = tail
        self._mvcc = mvcc

    def __call__(self, details: Sequence[AckDetail]) -> None:
        """Release ascending details; a failed tick releases nothing by itself."""
        told_tick = 0
        for detail in details:
            if detail.entry is not None:
                self._tail.append(detail.entry)
            elif detail.kind is AckKind.SYNC:
                self._tail.advance(detail.tick)
            told_tick = detail.tick
        if told_tick:
            self._mvcc.confirm(told_tick)
