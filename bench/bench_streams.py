"""Tick streams over many channels, against plainly reading the same messages from their topics and
sorting them by tick.

One producer has written them before, with ticks in between, which end a batch in every channel. The
topics are opened anew for each reading; what is read is decoded on both sides, and only tick
streams acknowledge it meanwhile.
"""

import sys
import time
from functools import partial
from pathlib import Path

from bench.baseline import scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from streamingnode.opening import open_node, run_async
from streamingnode.streams.factory import MsgStreamFactory
from streamingnode.streams.messages import TICKS, MsgPack, MsgType, TsMsg, new_memory_dispatcher
from wal.rocksmq.contract import MessageQueue

CHANNELS = 16
FEW = 4
MANY = 64
MESSAGES = 200_000
BATCH = 100
READ_AT_ONCE = 1_000
BODY = bytes(100)
MESSAGE_US_MAX = 1e6 / 300_000
COST_RATIO_MAX = 1.5

_GROUP = "bench"


def run(settings: Settings) -> list[Measurement]:
    """Return messages per second of tick streams, and what their number of channels does to
    that.
    """
    return run_async(partial(_measure, settings))


async def _measure(settings: Settings) -> list[Measurement]:
    count = int(MESSAGES * settings.scale)
    aligned, plain = await _rates(settings, CHANNELS, BATCH, count)
    few, many, thin = [
        median((await _rates(settings, channels, batch, count))[0])
        for channels, batch in ((FEW, BATCH), (MANY, BATCH), (MANY, BATCH * FEW // MANY))
    ]
    made = partial(Measurement, name="streams", unit="messages/s")
    against = f"tick stream, {MANY} channels, against {FEW}"
    return [
        made(
            case=f"tick stream, {CHANNELS} channels", value=median(aligned), baseline=median(plain)
        ),
        made(
            case=f"a message of {CHANNELS} channels",
            value=1e6 / median(aligned),
            unit="us",
            aim=MESSAGE_US_MAX,
        ),
        made(
            case=f"{against}, {BATCH} in a batch", value=many, baseline=few, aim=1 / COST_RATIO_MAX
        ),
        made(case=f"{against}, as many in a tick", value=thin, baseline=few),
    ]


async def _rates(
    settings: Settings, channels: int, batch: int, count: int
) -> tuple[list[float], list[float]]:
    """Return how many messages a second come of a tick stream, and of reading and sorting."""
    note(f"streams, {channels} channels, {batch} in a batch")
    names = [f"c{number}" for number in range(channels)]
    ticks = max(1, count // (channels * batch))
    rates: tuple[list[float], list[float]] = [], []
    with scratch(settings.directory) as path:
        await _fill(path, names, ticks, channels * batch)
        for _ in range(settings.repeats):
            for read, found in zip((_align, _read_and_sort), rates, strict=True):
                async with open_node(path) as node:
                    took_s, came = await read(node.mq, names, ticks)
                    await MsgStreamFactory(node.mq).new_disposer(names, _GROUP)()
                assert came == ticks * channels * batch, f"{came} messages came"
                found.append(came / took_s)
    return rates


async def _fill(path: Path, names: list[str], ticks: int, tick_messages: int) -> None:
    async with (
        open_node(path) as node,
        MsgStreamFactory(node.mq, new_memory_dispatcher).new_msg_stream() as producer,
    ):
        await producer.as_producer(names)
        for end in range(tick_messages, (ticks + 1) * tick_messages, tick_messages):
            messages = [
                TsMsg(MsgType.SEARCH, ts, ts, BODY, (ts,))
                for ts in range(end - tick_messages + 1, end + 1)
            ]
            await producer.produce(MsgPack(messages))
            await producer.broadcast(MsgPack([TsMsg(MsgType.TIME_TICK, end, end, b"")]))


async def _align(queue: MessageQueue, names: list[str], ticks: int) -> tuple[float, int]:
    async with MsgStreamFactory(queue, new_memory_dispatcher).new_tt_msg_stream() as stream:
        await stream.as_consumer(names, _GROUP)
        began = time.perf_counter()
        count = 0
        for _ in range(ticks):
            count += len((await stream.consume()).messages)
        return time.perf_counter() - began, count


async def _read_and_sort(queue: MessageQueue, names: list[str], _ticks: int) -> tuple[float, int]:
    for name in names:
        await queue.create_consumer_group(name, _GROUP)
    dispatcher = new_memory_dispatcher()
    found = list[TsMsg]()
    began = time.perf_counter()
    for name in names:
        while messages := await queue.consume(name, _GROUP, READ_AT_ONCE):
            for each in messages:
                found += dispatcher.decode(each.payload, each.properties).messages
    found.sort(key=lambda message: message.end_ts)
    took_s = time.perf_counter() - began
    return took_s, sum(message.type not in TICKS for message in found)


if __name__ == "__main__":
    sys.exit(main("tick streams against reading and sorting", run))
