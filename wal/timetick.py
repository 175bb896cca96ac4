"""Time ticks: uint64 hybrid timestamps, Unix milliseconds above an 18-bit logical counter. No clock
of its own.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from wal.errors import InvalidArgument, shown

LOGICAL_BITS = 18
TICK_MAX = (1 << 63) - 1
"""Ticks stay below 2^63 so that they fit the signed 64-bit columns of Parquet readers; that is the
year 3084.
"""
CLOCK_LEAP_MS_MAX = 3_600_000
"""A clock that runs this far ahead of the time that passed is not believed."""
IDS_MAX = 1 << 32
"""Ids that are handed out together: they are ahead of the clock by 16 seconds."""
AHEAD_MS_MAX = 60_000
"""Ticks that are further ahead of the clock are told of; less is what clocks are corrected by."""


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
    """Return when a tick was handed out, in UTC, to the millisecond. Raises `InvalidArgument` for
    what is no tick.
    """
    if not isinstance(tick, int) or isinstance(tick, bool) or not 0 <= tick <= TICK_MAX:
        raise InvalidArgument(
            f"{shown(tick)} is no time tick — pass one of a message, a result or consistent_tick()"
        )
    return _EPOCH + physical_ms(tick) * _MILLISECOND


def tick_shown(tick: int) -> str:
    """Return a tick and its time, as a text for people."""
    return f"{tick} ({tick_to_time(tick).isoformat(timespec='milliseconds')})"


def time_to_tick(moment: datetime) -> int:
    """Return the first tick of the millisecond that `moment` lies in: ticks below it were handed
    out before the moment.

    Raises `InvalidArgument` for a time without a zone, which may mean any of 24 moments, and for
    one before 1970.
    """
    if not isinstance(moment, datetime):
        raise InvalidArgument(f"{shown(moment)} is no time — pass a datetime with a time zone")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InvalidArgument(
            f"{moment.isoformat()} has no time zone — pass datetime.now(UTC), or add tzinfo="
        )
    # Whole milliseconds by integer division: `timestamp()` is a float, whose rounding would move
    # some moments by one.
    tick = compose_tick((moment - _EPOCH) // _MILLISECOND)
    if not 0 <= tick <= TICK_MAX:
        raise InvalidArgument(
            f"{moment.isoformat()} is outside the times ticks can tell — from 1970 to 3084"
        )
    return tick


def tick_given(what: str, given: object) -> int:
    """Return the tick that a caller gave as the argument `what`: a tick, or the time of one as a
    `datetime` with a zone.

    Raises `InvalidArgument` for anything else: a number that a clock gave is no tick.
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
    """Hands out strictly ascending ticks of a node, each above every tick it has seen, whatever the
    clock does.

    `now_ms` returns Unix milliseconds, `elapsed_ms` milliseconds from an arbitrary start, by a
    clock that nobody sets. A clock that is over `CLOCK_LEAP_MS_MAX` ahead of where the time that
    passed puts it is not followed: ticks go on with the time that passed, `on_leap` is told once by
    how many milliseconds, and they follow the clock again when it comes back. `above` is the
    highest tick ever promised by an earlier term. Not safe across threads: it lives on the event
    loop.
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
        """The highest tick handed out or observed."""
        self._origin_ms = now_ms() - elapsed_ms()
        self._leaping = False

    def allocate(self, count: int = 1) -> int:
        """Return the first of so many ticks above all earlier ones, one after the other."""
        first = max(self.last + 1, self.now_ms() << LOGICAL_BITS)
        self.last = first + count - 1
        return first

    def now_ms(self) -> int:
        """Return the clock that ticks follow, in Unix ms: a leap that they do not follow is not in
        it.
        """
        now = self._now_ms()
        expected = self._origin_ms + self._elapsed_ms()
        ahead = now - expected
        if ahead <= CLOCK_LEAP_MS_MAX:
            self._leaping = False
            # corrections forward add up; one back may be undone without being a leap
            self._origin_ms += max(0, ahead)
            return now
        if not self._leaping:
            self._leaping = True
            self._on_leap(ahead)
        return expected

    @property
    def ahead_ms(self) -> int:
        """How far the highest tick is ahead of the clock; 0 for most, who never had a clock that
        was.
        """
        return max(0, physical_ms(self.last) - self.now_ms())

    def observe(self, tick: int) -> None:
        """Never hand out `tick` or anything below it: how cause stays before effect across
        nodes.
        """
        self.last = max(self.last, tick)


class IdAllocator:
    """Hands out ascending ids of 64 bits, made of time and a counter as ticks are; see
    `TickAllocator`.
    """

    def __init__(self, ticks: TickAllocator) -> None:
        self._ticks = ticks

    def alloc(self, count: int) -> range:
        """Return `count` ids that follow each other, above all earlier ones.

        Raises `InvalidArgument` for what is no count.
        """
        if type(count) is not int or not 1 <= count <= IDS_MAX:
            raise InvalidArgument(f"{shown(count)} ids were asked for — ask for 1 to {IDS_MAX}")
        first = self._ticks.allocate(count)
        return range(first, first + count)

    def alloc_one(self) -> int:
        """Return one id, above all earlier ones."""
        return self._ticks.allocate()

    def update_id(self, used: int) -> None:
        """Never hand out `used` or anything below it: somebody has it, whatever the clock says.

        Raises `InvalidArgument` for what no id can be.
        """
        if type(used) is not int or used > TICK_MAX:
            step = f"give a whole number of up to {TICK_MAX}"
            raise InvalidArgument(f"{shown(used)} is no id — {step}")
        self._ticks.observe(used)
