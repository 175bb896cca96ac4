"""Batches of many channels in, packs out: each batch as it comes, or all messages of one tick
together. No I/O.
"""

from collections import deque
from collections.abc import Collection
from itertools import chain
from typing import NamedTuple

from streamingnode.streams.messages import DELETES, INSERTS, Batch, MsgPack, MsgPosition, TsMsg


class PlainMerge:
    """Each batch is a pack, in the order in which they come."""

    held_bytes = 0
    """What has come and is in no pack yet."""

    def __init__(self) -> None:
        self._channels: list[str] = []
        self._packs: deque[MsgPack] = deque()

    def add(self, channel: str) -> None:
        """Merge a channel more."""
        self._channels.append(channel)

    def push(self, channel: str, message_id: int, batch: Batch) -> None:
        """Take in what the queue holds as `message_id`; ids ascend in a channel."""
        at = [MsgPosition(channel, message_id, batch.end_ts)]
        self._packs.append(MsgPack(batch.messages, batch.begin_ts, batch.end_ts, at, at))

    def pop(self) -> MsgPack | None:
        """Return the next pack, None when more has to come first."""
        return self._packs.popleft() if self._packs else None

    def behind(self) -> Collection[str]:
        """Return the channels of which more has to come."""
        return () if self._packs else self._channels

    def seek(self, position: MsgPosition) -> None:
        """Forget what came of the channel of a position: it goes on from there."""
        self._packs = deque(
            each for each in self._packs if each.end_positions[0].channel != position.channel
        )


class _Stretch(NamedTuple):
    """Messages of one batch, ended by `tick`, if any; their own end ticks are from `begin_ts` to
    `end_ts`.
    """

    message_id: int
    messages: list[TsMsg]
    begin_ts: int
    end_ts: int
    size_bytes: int
    tick: int | None


class _Lane:
    """One channel: what was received, what is above the tick in progress, and how far its ticks
    have come.
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

        After a seek, what is at or below `skip_to` was in an earlier pack, up to the tick that
        ended it; what comes behind that tick was not, whatever it says of itself.
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
    """A pack for each tick that all channels have in common: all messages above the tick before it,
    up to it.

    A message that comes behind a tick it is not above was promised not to: it is in the next pack.
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
        """See `PlainMerge.pop`. What it looks at is linear in channels and stretches, never in both
        or in messages.
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
                    # most of what is above, looked at without its messages
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
"""How a stream makes packs."""


def _without_repeats(messages: list[TsMsg]) -> list[TsMsg]:
    """Return inserts and deletes of one id and part once, the first of them, and everything else as
    it is.
    """
    ids = [each.id for each in messages if each.id]
    if len(set(ids)) == len(ids):  # as a rule
        return messages
    firsts: dict[object, TsMsg] = {}
    for message in messages:
        repeats = message.id and message.type in INSERTS + DELETES
        firsts.setdefault((message.id, message.part) if repeats else id(message), message)
    return list(firsts.values())


def _end(messages: list[TsMsg]) -> int:
    return max((each.end_ts for each in messages), default=-1)
