"""What the append path of one node measures: outcomes, latency, sizes and, when asked for, where in the chain the time goes.

In: what the WAL and the chain observe, over all terms of the log. Out: `AppendStatistics`. A user's own observer hears
everything too, after it was counted here; about 2 us for each append group of one message, on the event loop.
"""

import time
from collections.abc import Callable

from streamingnode.statistics import AppendStatistics, InterceptorStatistics
from wal.append import AppendGroup, AppendObserver
from wal.distribution import Histogram
from wal.rate import Rate


class AppendMeter:
    """Counts and times the appends of a node; lives on its event loop."""

    def __init__(
        self, forward_to: AppendObserver | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._forward_to = forward_to
        self._ended = {"ok": 0, "error": 0, "cancel": 0}
        self._seconds = Histogram()
        self._message_bytes = Histogram()
        self._messages = Rate(clock)
        self._bytes = Rate(clock)
        self._before: dict[str, Histogram] = {}
        self._after: dict[str, Histogram] = {}

    def append_ended(self, group: AppendGroup, seconds: float, status: str) -> None:
        """Count an append; only those that succeeded are timed and sized."""
        self._ended[status] += 1
        if status == "ok":
            self._seconds.record(seconds)
            self._messages.add(len(group.messages))
            group_bytes = 0
            for message in group.messages:
                size_bytes = message.size_bytes
                group_bytes += size_bytes
                self._message_bytes.record(size_bytes)
            self._bytes.add(group_bytes)
        if self._forward_to is not None:
            self._forward_to.append_ended(group, seconds, status)

    def interceptor_timed(self, name: str, before_s: float, after_s: float, *, failed_before: bool) -> None:
        """Time one interceptor of one append."""
        if name not in self._before:
            self._before[name], self._after[name] = Histogram(), Histogram()
        self._before[name].record(before_s)
        if not failed_before:
            self._after[name].record(after_s)
        if self._forward_to is not None:
            self._forward_to.interceptor_timed(name, before_s, after_s, failed_before=failed_before)

    def statistics(self, *, in_flight: int) -> AppendStatistics:
        """Return what was measured so far."""
        return AppendStatistics(
            succeeded=self._ended["ok"],
            failed=self._ended["error"],
            cancelled=self._ended["cancel"],
            in_flight=in_flight,
            messages=self._messages.total,
            messages_per_s=self._messages.per_second,
            bytes=self._bytes.total,
            bytes_per_s=self._bytes.per_second,
            seconds=self._seconds.distribution(),
            message_bytes=self._message_bytes.distribution(),
            interceptors=tuple(
                InterceptorStatistics(
                    name=name, before_s=before.distribution(), after_s=self._after[name].distribution()
                )
                for name, before in self._before.items()
            ),
        )
