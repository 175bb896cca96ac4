"""Which messages a reader wants. No I/O.

Decided on whole messages: a plain message by itself, a transaction as one at its commit. So begins and bodies always pass,
and a transaction that touches a wanted vchannel comes whole. Ticks stored in the log are not delivered: batches carry them
as their confirmed tick.
"""

from collections.abc import Sequence
from typing import cast

from wal.errors import InvalidArgument
from wal.headers import CommitTxnHeader
from wal.message import ALL_VCHANNELS, AnyMessage, Message
from wal.message_type import SYSTEM, MessageType


class ScanFilter:
    """The conditions of one reader; all of them hold for a message that passes.

    `vchannels` and `types` None means any; a message for all vchannels is on each of them. Types apply to plain messages
    only; listing a system type raises `InvalidArgument`. Ticks pass above `after_tick`.
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
            raise InvalidArgument(f"{names} cannot be filtered by — transactions and ticks reach every reader")
        self._vchannels = vchannels
        self._types = types
        self.after_tick = after_tick

    def select(self, messages: Sequence[AnyMessage], time_tick: int) -> Sequence[AnyMessage]:
        """Return those of one tick's messages that pass, in order."""
        if time_tick <= self.after_tick:
            return ()
        if self._vchannels is None and self._types is None:
            if messages and messages[0].type is not MessageType.TIME_TICK:
                return messages
            return ()
        return [message for message in messages if self._passes(message)]

    def wants_commit(self, commit: Message) -> bool:
        """Whether the transaction of this commit would pass."""
        return commit.time_tick > self.after_tick and self._on_wanted(_vchannels_of(commit))

    def _passes(self, message: AnyMessage) -> bool:
        if not isinstance(message, Message):
            return self._on_wanted(_vchannels_of(message.commit))
        if message.type is MessageType.TIME_TICK or (self._types is not None and message.type not in self._types):
            return False
        return self._vchannels is None or message.vchannel == ALL_VCHANNELS or message.vchannel in self._vchannels

    def _on_wanted(self, vchannels: tuple[str, ...]) -> bool:
        return self._vchannels is None or not self._vchannels.isdisjoint(vchannels)


def _vchannels_of(commit: Message) -> tuple[str, ...]:
    return cast("CommitTxnHeader", commit.header).vchannels
