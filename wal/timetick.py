"""Time ticks: uint64 hybrid timestamps with Unix milliseconds above an 18-bit logical counter.
Clocks are passed in.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from wal.errors import InvalidArgument, shown

LOGICAL_BITS = 18
TICK_MAX = (1 << 63) - 1
"""Ticks stay below 2^63, which is in the year 3084, so that they fit the signed 64-bit columns of
Parquet readers.
"""
CLOCK_LEAP_MS_MAX = 3_600_000
"""Ticks do not follow a clock that is further ahead of the elapsed time than this."""
IDS_MAX = 1 << 32
"""The number of ids that one call may allocate: they run ahead of the clock by 16 seconds."""
AHEAD_MS_MAX = 60_000
"""Ticks that are further ahead of the clock than this are reported; ordinary clock corrections are
smaller.
"""


def compose_tick(physical_ms: int, logical: int = 0) -> int:
    """Return the tick of a Unix time in milliseconds and a logical counter."""
    return (physical_ms << LOGICAL_BITS) | logical


def physical_ms(tick: int) -> int:
    """Return the Unix time in milliseconds a tick carries."""
    return tick >> LOGICAL_BITS


def add_ms(tick: int, duration_ms: int) -> int:
    """Return the tick `duration_ms` later; the logical counter stays."""
    return tick + (duration_ms << LOGICAL_BITS)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def tick_to_time(tick: int) -> datetime:
    """Return the UTC time of a tick, to the millisecond. Raises `InvalidArgument` for a value that
    is not a tick.
    """
    if not isinstance(tick, int) or isinstance(tick, bool) or not 0 <= tick <= TICK_MAX:
        raise InvalidArgument(
            f"{shown(tick)} is no time tick — pass one of a message, a result or consistent_tick()"
        )
    return _EPOCH + physical_ms(tick) * _MILLISECOND


def tick_shown(tick: int) -> str:
    """Return a tick and its time as text for people."""
    return f"{tick} ({tick_to_time(tick).isoformat(timespec='milliseconds')})"


def time_to_tick(moment: datetime) -> int:
    """Return the first tick of the millisecond of `moment`: smaller ticks were allocated before the
    moment.

    Raises `InvalidArgument` for a time without a zone, which is ambiguous, and for a time before
    1970.
    """
    if not isinstance(moment, datetime):
        raise InvalidArgument(f"{shown(moment)} is no time — pass a datetime with a time zone")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidArgument(
            f"{moment.isoformat()} has no time zone — pass datetime.now(UTC), or add tzinfo="
        )
    # Compute milliseconds by integer division: `timestamp()` is a float, and its rounding would
    # shift some moments by one.
    tick = compose_tick((moment - _EPOCH) // _MILLISECOND)
    if not 0 <= tick <= TICK_MAX:
        raise InvalidArgument(
            f"{moment.isoformat()} is outside the range of ticks — pass a time from 1970 to 3084"
        )
    return tick


def tick_given(what: str, given: object) -> int:
    """Return the tick of the argument `what`, which is a tick or a `datetime` with a zone.

    Raises `InvalidArgument` for anything else.
    """
    if isinstance(given, datetime):
        try:
            return time_to_tick(given)
        except InvalidArgument as error:
            raise InvalidArgument(f"{what}={error}") from None
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= TICK_MAX:
        return given
    raise InvalidArgument(
        f"{what} {shown(given)} is no time tick — pass one that a message, a result or "
        "consistent_tick() gave, or a datetime"
    )


class TickAllocator:
    """Allocates strictly ascending ticks for a node, each above every observed tick, even when the
    clock jumps.

    `now_ms` returns Unix milliseconds; `elapsed_ms` returns milliseconds from an arbitrary start by
    a clock that cannot be set. Ticks do not follow a clock that leaps over `CLOCK_LEAP_MS_MAX`
    ahead of the elapsed time. They advance with the elapsed time instead, `on_leap` is called once
    with the leap in milliseconds, and they follow the clock again when it comes back. `above` is
    the highest tick that an earlier term has promised. Not thread-safe: it lives on the event loop.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        *,
        above: int = 0,
        on_leap: Callable[[int], None] = lambda _ahead_ms: None,
    ) -> None:
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._on_leap = on_leap
        self.last = above
        """The highest tick allocated or observed."""
        self._origin_ms = now_ms() - elapsed_ms()
        self._leaping = False

    def allocate(self, count: int = 1) -> int:
        """Return the first of `count` consecutive ticks, all above every earlier one."""
        first = max(self.last + 1, self.now_ms() << LOGICAL_BITS)
        self.last = first + count - 1
        return first

    def now_ms(self) -> int:
        """Return the clock that ticks follow, in Unix milliseconds, without leaps that ticks do not
        follow.
        """
        now = self._now_ms()
        expected = self._origin_ms + self._elapsed_ms()
        ahead = now - expected
        if ahead <= CLOCK_LEAP_MS_MAX:
            self._leaping = False
            # forward corrections accumulate; a backward one may later be undone without counting as
            # a leap
            self._origin_ms += max(0, ahead)
            return now
        if not self._leaping:
            self._leaping = True
            self._on_leap(ahead)
        return expected

    @property
    def ahead_ms(self) -> int:
        """How far the highest tick is ahead of the clock, in milliseconds; 0 unless the clock was
        ahead once.
        """
        return max(0, physical_ms(self.last) - self.now_ms())

    def observe(self, tick: int) -> None:
        """Allocate only ticks above `tick` from now on. This keeps causes before effects across
        nodes.
        """
        self.last = max(self.last, tick)


class IdAllocator:
    """Allocates ascending 64-bit ids, made of time and a counter like ticks; see
    `TickAllocator`.
    """

    def __init__(self, ticks: TickAllocator) -> None:
        self._ticks = ticks

    def alloc(self, count: int) -> range:
        """Return `count` consecutive ids, above all earlier ones.

        Raises `InvalidArgument` unless `count` is from 1 to `IDS_MAX`.
        """
        if type(count) is not int or not 1 <= count <= IDS_MAX:
            raise InvalidArgument(f"{shown(count)} ids were asked for — ask for 1 to {IDS_MAX}")
        first = self._ticks.allocate(count)
        return range(first, first + count)

    def alloc_one(self) -> int:
        """Return one id, above all earlier ones."""
        return self._ticks.allocate()

    def update_id(self, used: int) -> None:
        """Allocate only ids above `used` from now on, even when the clock is behind: it is in use
        already.

        Raises `InvalidArgument` for a value that cannot be an id.
        """
        if type(used) is not int or used > TICK_MAX:
            step = f"give a whole number of up to {TICK_MAX}"
            raise InvalidArgument(f"{shown(used)} is no id — {step}")
        self._ticks.observe(used)
