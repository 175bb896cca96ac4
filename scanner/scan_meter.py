"""What one scanner measures while it runs: reads of the log, deliveries, how late these are. Costs nothing per message."""

from collections.abc import Sequence

from scanner.surroundings import Surroundings
from wal.distribution import Histogram
from wal.message import AnyMessage
from wal.rate import Rate
from wal.timetick import physical_ms


class ScanMeter:
    """The measurements of one scanner; `started = meter.clock()` begins one that takes time."""

    __slots__ = ("_now_s", "batches", "clock", "delivery_s", "messages", "read_s")

    def __init__(self, surroundings: Surroundings) -> None:
        self._now_s = surroundings.now_s
        self.clock = surroundings.monotonic
        self.read_s = Histogram()
        self.delivery_s = Histogram()
        self.messages = Rate(self.clock)
        self.batches = 0

    def read(self, started: float) -> None:
        """Take in a read of the log."""
        self.read_s.record(self.clock() - started)

    def delivered(self, messages: Sequence[AnyMessage], *, tailing: bool) -> None:
        """Take in a batch. Only a tailing reader's is timed: before that, the age of what it reads is not its doing."""
        if not messages:
            return
        self.batches += 1
        self.messages.add(len(messages))
        if tailing:
            self.delivery_s.record(self._now_s() - physical_ms(messages[-1].time_tick) / 1000)
