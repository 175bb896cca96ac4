"""The newest tick at which each vchannel changed, and whether it is confirmed: what a consistent read of it waits for. Pure.

A transaction changes its vchannels at its commit; its begin and bodies change nothing.
"""

from typing import NamedTuple

from wal.headers import CommitTxnHeader
from wal.message import LogEntry
from wal.message_type import MessageType


class VChannelMvcc(NamedTuple):
    """A read of `vchannel` at `time_tick` sees all of it; when not `confirmed`, readers are not there yet."""

    vchannel: str
    time_tick: int
    confirmed: bool


class MvccManager:
    """Ticks of the vchannels of one log since its term began; `first_tick` stands for everything before.

    `updates` counts how often one of them moved.
    """

    __slots__ = ("_confirmed_tick", "_first_tick", "_ticks", "updates")

    def __init__(self, first_tick: int) -> None:
        self._first_tick = first_tick
        self._confirmed_tick = first_tick
        self._ticks: dict[str, int] = {}
        self.updates = 0

    def update(self, entry: LogEntry) -> None:
        """Take in a durable entry, before or after it is confirmed; entries may come out of order."""
        for message in entry.messages:
            if message.type is MessageType.DROP_COLLECTION:
                self._ticks.pop(message.vchannel, None)
            elif isinstance(message.header, CommitTxnHeader):
                for vchannel in message.header.vchannels:
                    self._changed(vchannel, entry.time_tick)
            elif message.vchannel and not message.txn_id:
                self._changed(message.vchannel, entry.time_tick)

    def confirm(self, tick: int) -> None:
        """Everything at or below `tick` is confirmed."""
        self._confirmed_tick = max(self._confirmed_tick, tick)

    def of(self, vchannel: str) -> VChannelMvcc:
        """Return the tick of a vchannel; one that has not changed in this term is complete at the term's first tick."""
        tick = self._ticks.get(vchannel, self._first_tick)
        return VChannelMvcc(vchannel, tick, tick <= self._confirmed_tick)

    def all_vchannels(self) -> list[VChannelMvcc]:
        """Return the ticks of the vchannels that changed in this term, by name."""
        return [self.of(vchannel) for vchannel in sorted(self._ticks)]

    def _changed(self, vchannel: str, tick: int) -> None:
        if tick > self._ticks.get(vchannel, 0):
            self._ticks[vchannel] = tick
            self.updates += 1
