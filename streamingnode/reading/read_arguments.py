"""What a caller may ask a reader for: ticks that are ticks, and types that can be filtered by. No I/O."""

from collections.abc import Iterable
from datetime import datetime

from wal.errors import InvalidArgument
from wal.message_type import SYSTEM, MessageType
from wal.timetick import tick_given


def check_tick(what: str, tick: int | datetime | None) -> int | None:
    """Return the tick given as the argument `what`, None for none. Raises `InvalidArgument`: a clock's number is no tick."""
    return None if tick is None else tick_given(what, tick)


def check_types(types: Iterable[MessageType] | None) -> frozenset[MessageType] | None:
    """Return the types of message to deliver, None for all. Raises `InvalidArgument`: a wrong one would hide everything."""
    if types is None:
        return None
    chosen = list(types) if isinstance(types, Iterable) else []
    if not chosen or any(not isinstance(each, MessageType) or each in SYSTEM for each in chosen):
        raise InvalidArgument(
            f"types={types!r} — list what to deliver of inserts, deletes and DDL, as [sn.MessageType.INSERT]; ticks come "
            "with include_ticks=True, transactions with the types of their bodies"
        )
    return frozenset(chosen)
