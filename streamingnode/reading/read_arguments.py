"""What a caller may ask a reader for: ticks that are ticks, and types that can be filtered by. No I/O."""

from collections.abc import Iterable

from wal.errors import InvalidArgument, shown
from wal.message_type import SYSTEM, MessageType
from wal.timetick import TICK_MAX


def check_tick(what: str, tick: int | None) -> int | None:
    """Return the tick given as the argument `what`, None for none. Raises `InvalidArgument`: a clock's time is no tick."""
    if tick is None or (isinstance(tick, int) and not isinstance(tick, bool) and 0 <= tick <= TICK_MAX):
        return tick
    raise InvalidArgument(
        f"{what}={tick!r} is no time tick — pass one that a message, a result or consistent_tick() gave"
    )


def check_types(types: Iterable[MessageType] | None) -> frozenset[MessageType] | None:
    """Return the types of message to deliver, None for all. Raises `InvalidArgument`: a wrong one would hide everything."""
    if types is None:
        return None
    chosen = list(types) if isinstance(types, Iterable) else []
    if not chosen or any(not isinstance(each, MessageType) or each in SYSTEM for each in chosen):
        raise InvalidArgument(
            f"types={shown(types)} — list what to deliver of inserts, deletes and DDL, as [sn.MessageType.INSERT]; "
            "ticks come with include_ticks=True, transactions with the types of their bodies"
        )
    return frozenset(chosen)
