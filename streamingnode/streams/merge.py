"""Merges batches of many channels into packs: each batch as it arrives, or all messages of one tick
together. No I/O.
"""

from collections import deque
from collections.abc import Collection
from itertools import chain
from typing import NamedTuple

from streamingnode.streams.messages import DELETES, INSERTS, Batch, MsgPack, MsgPosition, TsMsg


class PlainMerge:
    """Each batch is a pack, in order of arrival."""

    held_bytes = 0
    """Bytes of received messages that are not yet in a pack."""

    def __init__(self) -> None:
        self._channels: list[str] = []
        self._packs: deque[MsgPack] = deque()

    def add(self, channel: str) -> None:
        """Add a channel."""
        self._channels.append(channel)

    def push(self, channel: str, message_id: int, batch: Batch) -> None:
        """Add the batch that is the queue's message `message_id`; ids ascend in a channel."""
        at = [MsgPosition(channel, message_id, batch.end_ts)]
        self._packs.append(MsgPack(batch.messages, batch.begin_ts, batch.end_ts, at, at))

    def pop(self) -> MsgPack | None:
        """Return the next pack, None when more batches are needed."""
        return self._packs.popleft() if self._packs else None

    def behind(self) -> Collection[str]:
        """Return the channels that need more batches before the next pack."""
        return () if self._packs else self._channels

    def seek(self, position: MsgPosition) -> None:
        """Discard the received batches of a position's channel, which continues from the
        position.
        """
        self._packs = deque(
            each for each in self._packs if each.end_positions[0].channel != position.channel
        )


class _Stretch(NamedTuple):
    """Messages of one batch up to `tick`, if there is one; their end ticks are between `begin_ts`
    and `end_ts`.
    """

    message_id: int
    messages: list[TsMsg]
    begin_ts: int
    end_ts: int
    size_bytes: int
    tick: int | None


class _Lane:
    """One channel: received stretches (`input_buf`), stretches not yet in a pack (`unsolved_buf`),
    and its last tick.
    """

    def __init__(self, channel: str, start: MsgPosition | None = None) -> None:
        self.channel = channel
        self.start = start
        self.input_buf: deque[_Stretch] = deque()
        self.unsolved_buf: list[_Stretch] = []
        self.tick = self.tick_id = -1
        self.skip_to = self.after_ts = start.timestamp if start and start.inclusive else 0

    def receive(self, message_id: int, batch: Batch) -> None:
        self.start = self.start or MsgPosition(self.channel, message_id, inclusive=True)
        begin = 0
        size_bytes = batch.size_bytes
        count = len(batch.messages)
        for at in (*batch.ticks, count):
            part = batch.messages[begin:at]
            tick = batch.messages[at].end_ts if at < count else None
            if part or tick is not None:
                end_ts = batch.end_ts if len(part) == count else _end(part)
                self.input_buf.append(
                    _Stretch(message_id, part, batch.begin_ts, end_ts, size_bytes, tick)
                )
            begin = at + 1
            size_bytes = 0

    def advance(self, goal: int) -> bool:
        """Move stretches from `input_buf` to `unsolved_buf` until one ends with the tick `goal`;
        return whether any moved.

        After a seek, messages at or below `skip_to` are skipped until the tick that ended the
        earlier pack: they were in that pack. Messages after that tick were not, whatever their own
        ticks are.
        """
        waiting = len(self.input_buf)
        while self.tick < goal and self.input_buf:
            stretch = self.input_buf.popleft()
            if self.skip_to:
                left = [each for each in stretch.messages if each.end_ts > self.skip_to]
                stretch = stretch._replace(messages=left, end_ts=_end(left))
            self.unsolved_buf.append(stretch)
            if stretch.tick is not None and stretch.tick >= self.skip_to:
                self.skip_to = 0
                if stretch.tick > self.tick:
                    self.tick = stretch.tick
                    self.tick_id = stretch.message_id
        return len(self.input_buf) < waiting


class TickMerge:
    """A pack for each tick that all channels have in common: all messages above the previous tick
    and up to this one.

    A message that follows a tick at or above its own breaks the tick's promise: it goes into the
    next pack.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._lanes: dict[str, _Lane] = {}
        self._last_ts = 0

    def add(self, channel: str) -> None:
        """See `PlainMerge.add`."""
        self._lanes[channel] = _Lane(channel)

    def push(self, channel: str, message_id: int, batch: Batch) -> None:
        """See `PlainMerge.push`."""
        self._lanes[channel].receive(message_id, batch)
        self.held_bytes += batch.size_bytes

    def pop(self) -> MsgPack | None:
        """See `PlainMerge.pop`. Its cost is linear in channels plus stretches, never in their
        product or in messages.
        """
        while behind := self._behind():
            goal = self._goal()
            if not sum(lane.advance(goal) for lane in behind):
                return None
        return self._emit(self._goal()) if self._lanes else None

    def behind(self) -> Collection[str]:
        """See `PlainMerge.behind`."""
        return [lane.channel for lane in self._behind()]

    def seek(self, position: MsgPosition) -> None:
        """See `PlainMerge.seek`. The next pack begins at the smallest tick that a channel is at."""
        lane = self._lanes[position.channel]
        self.held_bytes -= sum(each.size_bytes for each in chain(lane.input_buf, lane.unsolved_buf))
        self._lanes[position.channel] = _Lane(position.channel, position)
        self._last_ts = min(lane.after_ts for lane in self._lanes.values())

    def _goal(self) -> int:
        return max(self._last_ts + 1, *(lane.tick for lane in self._lanes.values()), 0)

    def _behind(self) -> list[_Lane]:
        goal = self._goal()
        return [lane for lane in self._lanes.values() if lane.tick < goal]

    def _emit(self, end_ts: int) -> MsgPack:
        pack = MsgPack([], self._last_ts, end_ts)
        for lane in self._lanes.values():
            left: list[_Stretch] = []
            for stretch in lane.unsolved_buf:
                if stretch.end_ts <= end_ts:
                    pack.messages += stretch.messages
                    self.held_bytes -= stretch.size_bytes
                elif stretch.begin_ts > end_ts:
                    # the common case above the tick: no message is inspected
                    left.append(stretch)
                else:
                    pack.messages += [each for each in stretch.messages if each.end_ts <= end_ts]
                    above = [each for each in stretch.messages if each.end_ts > end_ts]
                    left.append(
                        stretch._replace(
                            messages=above, begin_ts=min(each.end_ts for each in above)
                        )
                    )
            lane.unsolved_buf = left
            message_id = left[0].message_id if left else lane.tick_id
            end = MsgPosition(lane.channel, message_id, end_ts, inclusive=True)
            pack.start_positions.append(lane.start or end)
            pack.end_positions.append(end)
            lane.start = end
            lane.after_ts = end_ts
        self._last_ts = end_ts
        pack.messages = _without_repeats(pack.messages)
        return pack


Merge = PlainMerge | TickMerge
"""How a stream forms packs."""


def _without_repeats(messages: list[TsMsg]) -> list[TsMsg]:
    """Return the messages, keeping only the first insert or delete of each id and part."""
    ids = [each.id for each in messages if each.id]
    if len(set(ids)) == len(ids):  # the common case
        return messages
    firsts: dict[object, TsMsg] = {}
    for message in messages:
        repeats = message.id and message.type in INSERTS + DELETES
        firsts.setdefault((message.id, message.part) if repeats else id(message), message)
    return list(firsts.values())


def _end(messages: list[TsMsg]) -> int:
    return max((each.end_ts for each in messages), default=-1)
