"""Confirmed ticks on their way to readers: entries go to the live tail, idle ticks are promised first.

An idle tick is in no entry, so before a reader hears of it the store remembers that no later term may go below it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from interceptors.timetick.ack_detail import AckDetail, AckKind
from interceptors.timetick.mvcc import MvccManager
from wal.errors import StreamingNodeError
from wal.message import LogEntry


class TailSink(Protocol):
    """Where readers get what is confirmed. Neither method suspends; both are called in ascending ticks."""

    def append(self, entry: LogEntry) -> None:
        """Give readers an entry; it confirms its own tick."""

    def advance(self, tick: int) -> None:
        """Tell readers that everything at or below `tick` has been given to them."""


class ReaderRelease:
    """Gives readers newly confirmed ticks; call it with what the ack manager confirmed, in order."""

    __slots__ = ("_mvcc", "_promise_tick", "_tail")

    def __init__(self, tail: TailSink, mvcc: MvccManager, promise_tick: Callable[[int], None]) -> None:
        self._tail = tail
        self._mvcc = mvcc
        self._promise_tick = promise_tick

    def __call__(self, details: Sequence[AckDetail]) -> None:
        """Release ascending details; a failed tick releases nothing by itself.

        Raises, after all entries are released, what kept an idle tick from being promised; readers do not hear of that tick.
        """
        unpromised: StreamingNodeError | None = None
        told_tick = 0
        for detail in details:
            if detail.entry is not None:
                self._tail.append(detail.entry)
            elif detail.kind is AckKind.SYNC:
                try:
                    self._promise_tick(detail.tick)
                except StreamingNodeError as error:
                    unpromised = error
                    continue
                self._tail.advance(detail.tick)
            told_tick = detail.tick
        if told_tick:
            self._mvcc.confirm(told_tick)
        if unpromised is not None:
            raise unpromised
