"""What a caller may ask a reader for: ticks that are ticks, and types that can be filtered by. No I/O."""

from collections.abc import Iterable
from datetime import datetime

from scanner.deliver_policy import DeliverPolicy, StartAfterTick
from wal.errors import InvalidArgument, shown
from wal.message_type import SYSTEM, MessageType
from wal.timetick import tick_given


def check_tick(what: str, tick: int | datetime | None) -> int | None:
    """Return the tick given as the argument `what`, None for none. Raises `InvalidArgument`: a clock's number is no tick."""
    return None if tick is None else tick_given(what, tick)


def check_passed(policy: DeliverPolicy, until: int | None, newest: int) -> None:
    """Raise `InvalidArgument` for a reader that starts after, or ends with, a tick above `newest`."""
    if until is not None and until > newest:
        raise InvalidArgument(
            f"until={until} is yet to come, it is {newest} now — pass one that a result or consistent_tick() gave, "
            "or leave it out to read on"
        )
    if isinstance(policy, StartAfterTick) and policy.tick > newest:
        raise InvalidArgument(
            f"tick {policy.tick} is yet to come, it is {newest} now — start at the end for what is to come"
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
