"""The merge of channels by their ticks: what arrived, in; packs that each hold one tick of all channels, out. Pure.

A channel is read up to its next tick, others wait for it. When all channels stand at the same tick, above that of the pack
before, the messages at or below it are a pack; those above it wait for theirs. So packs follow from what each channel holds
alone, not from when it arrived, and a stream that starts at a pack's end positions gives the same packs as one that went on.

A message costs the same however many channels there are; only a pack costs a step for each of them.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from streamingnode.streams.messages import DML, TICKS, MsgPack, MsgPosition, TsMsg


class Arrived(NamedTuple):
    """A message, where it was, and the message of the queue that brought it."""

    message: TsMsg
    position: MsgPosition
    queue_id: int


class TickPack(NamedTuple):
    """A pack, and what it ends with: channel and message of the queue of each message that nobody waits for any more."""

    pack: MsgPack
    done: list[tuple[str, int]]


class _Channel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.input_buf: deque[Arrived] = deque()
        """Arrived, and not looked at: the channel waits for others."""
        self.current: list[Arrived] = []
        """Looked at since the last pack."""
        self.unsolved_buf: OrderedDict[int, Arrived] = OrderedDict()
        """Above the tick of the last pack, by number, so in the order of arrival."""
        self.by_tick: list[tuple[int, int]] = []
        """End tick and number of the same: a heap."""
        self.numbers = 0
        self.tick = -1
        self.tick_position: MsgPosition | None = None
        self.start: MsgPosition | None = None
        self.skip_to: int | None = None
        """After a seek, the tick that the stream starts after: up to the first tick there, all at or below it was had."""


class TickMerge:
    """See the module. `push` what arrived while `wants` the channel, and take `packs`."""

    def __init__(self) -> None:
        self.packs: deque[TickPack] = deque()
        self.last_ts = 0
        """Tick of the last pack."""
        self._channels: dict[str, _Channel] = {}
        self._waiting: dict[str, _Channel] = {}
        """Those that have arrivals which nobody has looked at."""
        self._max_tick, self._at_max = -1, 0
        self._done: list[tuple[str, int]] = []

    def add(self, name: str) -> None:
        """Add a channel, which is read from where `push` begins."""
        self._channels[name] = _Channel(name)
        ticks = [channel.tick for channel in self._channels.values()]
        self._max_tick, self._at_max = max(ticks), ticks.count(max(ticks))

    def seek(self, positions: Iterable[MsgPosition]) -> None:
        """Start anew, each channel with the message of its position, which is pushed next, after its tick."""
        self._channels.clear()
        self._waiting.clear()
        self.packs.clear()
        self._done = []
        ticks: list[int] = []
        for position in positions:
            self.add(position.channel)
            channel = self._channels[position.channel]
            channel.skip_to, channel.start = position.timestamp, position
            ticks.append(position.timestamp)
        self.last_ts = min(ticks)

    def wants(self, name: str) -> bool:
        """Whether the channel is what the next pack waits for: all that arrived is looked at, its next tick is to come."""
        channel = self._channels[name]
        return not channel.input_buf and self._is_behind(channel)

    def push(self, name: str, arrived: Iterable[Arrived]) -> None:
        """Add what arrived in a channel, in its order; it may complete packs."""
        channel = self._channels[name]
        channel.input_buf.extend(arrived)
        advancing = [channel]
        while advancing:
            max_tick = self._max_tick
            for each in advancing:
                self._advance(each)
            # A pack, or a higher tick to wait for, lets others go on, and each of those looks at one arrival at least.
            if emits := self._at_max == len(self._channels) and self._max_tick > self.last_ts:
                self._emit()
            advancing = list(self._waiting.values()) if emits or self._max_tick > max_tick else []

    def take(self) -> TickPack | None:
        """Return the next pack, None when there is none."""
        return self.packs.popleft() if self.packs else None

    def _is_behind(self, channel: _Channel) -> bool:
        # At the tick of the last pack every channel is behind; above it, those below the highest.
        return channel.tick < self._max_tick or channel.tick <= self.last_ts

    def _advance(self, channel: _Channel) -> None:
        while channel.input_buf and self._is_behind(channel):
            arrived = channel.input_buf.popleft()
            message = arrived.message
            if channel.start is None:
                channel.start = _at(arrived.position, self.last_ts)
            if message.type in TICKS:
                self._done.append((channel.name, arrived.queue_id))
                if message.end_ts >= (channel.tick if channel.skip_to is None else channel.skip_to):
                    channel.skip_to = None
                    self._reach(channel, message.end_ts, arrived.position)
            elif channel.skip_to is not None and message.end_ts <= channel.skip_to:
                self._done.append((channel.name, arrived.queue_id))
            else:
                channel.current.append(arrived)
        if channel.input_buf:
            self._waiting[channel.name] = channel
        else:
            self._waiting.pop(channel.name, None)

    def _reach(self, channel: _Channel, tick: int, position: MsgPosition) -> None:
        was_at_max = channel.tick == self._max_tick
        channel.tick, channel.tick_position = tick, position
        if tick > self._max_tick:
            self._max_tick, self._at_max = tick, 1
        elif tick == self._max_tick and not was_at_max:
            self._at_max += 1

    def _emit(self) -> None:
        ts = self._max_tick
        taken: list[Arrived] = []
        starts: list[MsgPosition] = []
        ends: list[MsgPosition] = []
        for channel in self._channels.values():
            taken += self._take_up_to(channel, ts)
            first_left = next(iter(channel.unsolved_buf.values()), None)
            end = channel.tick_position if first_left is None else first_left.position
            assert channel.start is not None and end is not None, "it has had a tick"  # noqa: PT018
            starts.append(channel.start)
            channel.start = _at(end, ts)
            ends.append(channel.start)
        pack = MsgPack(
            msgs=[arrived.message for arrived in taken],
            begin_ts=self.last_ts,
            end_ts=ts,
            positions=[arrived.position for arrived in taken],
            start_positions=starts,
            end_positions=ends,
        )
        self.packs.append(TickPack(pack, self._done))
        self._done, self.last_ts = [], ts

    def _take_up_to(self, channel: _Channel, ts: int) -> list[Arrived]:
        """Return what of a channel is at or below a tick, in the order of arrival, of what came twice the first one."""
        numbers: list[int] = []
        while channel.by_tick and channel.by_tick[0][0] <= ts:
            numbers.append(heapq.heappop(channel.by_tick)[1])
        taken = [channel.unsolved_buf.pop(number) for number in sorted(numbers)]
        for arrived in channel.current:
            if arrived.message.end_ts <= ts:
                taken.append(arrived)
            else:
                channel.numbers += 1
                channel.unsolved_buf[channel.numbers] = arrived
                heapq.heappush(channel.by_tick, (arrived.message.end_ts, channel.numbers))
        channel.current = []
        self._done += [(channel.name, arrived.queue_id) for arrived in taken]
        return _without_repeats(taken)


def _without_repeats(arrived: list[Arrived]) -> list[Arrived]:
    seen: set[tuple[int, int]] = set()
    found: list[Arrived] = []
    for each in arrived:
        if each.message.type in DML:
            key = (each.message.id, each.message.part)
            if key in seen:
                continue
            seen.add(key)
        found.append(each)
    return found


def _at(position: MsgPosition, ts: int) -> MsgPosition:
    return msgspec.structs.replace(position, timestamp=ts)
