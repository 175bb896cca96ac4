"""Topics of RocksMQ against Redis Streams with consumer groups, and what retention gives back.
Long.

Messages of 1 KiB, acknowledged after fsync on both sides (`appendfsync always`), in turn on the
same disk: ours in this process, the peer over a Unix socket through a client that parses nothing.
Its ids are given, so that their replies have known lengths; what it does at once goes through one
pipelined connection.
"""

import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from bench.baseline import Load, Measured, measure_warm, scratch
from bench.measurement import Measurement, median
from bench.redis_exchange import VALUES, Exchange, add, entry_id, fill_redis, read_bytes
from bench.redis_streams import connected, lacking, serving, words
from bench.report import Settings, main, note
from streamingnode.config import NodeConfig
from streamingnode.node import Node
from streamingnode.opening import open_node, run_async
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.queue import RocksMQ

TOPIC = "jobs"
GROUP = "workers"
LOADS: tuple[tuple[int, int, float], ...] = ((1, 100, 2.0), (64, 1, 1.0))
"""Producers or consumers, messages at a time of each, and the part of what the peer does to
reach.
"""
CONSUMED = 40_000
RETAINED_BYTES = 1 << 30
GIVEN_BACK_AIM = 0.95
_RETAINED_BATCH = 1_000


def run(settings: Settings) -> list[Measurement]:
    """Return messages per second produced, and consumed and acknowledged; nothing of a peer that is
    not there.
    """
    if lack := lacking():
        note(f"Redis is left out: {lack}")
    return run_async(partial(_measure, settings))


async def _measure(settings: Settings) -> list[Measurement]:
    found = []
    for outstanding, batch, aim in LOADS:
        load = Load(outstanding=outstanding, batch=batch, seconds=settings.seconds)
        count = max(outstanding * batch, int(CONSUMED * settings.scale) // 6_400 * 6_400)
        case = f"{outstanding} x {'one message' if batch == 1 else f'{batch} messages'}"
        made = list[float]()
        taken = list[float]()
        their_made = list[float]()
        their_taken = list[float]()
        for _ in range(settings.repeats):
            note(f"topics, {case}")
            made.append((await _produce(load, settings.directory)).rows_per_s)
            taken.append(await _consume(load, count, settings.directory))
            if not lacking():
                their_made.append((await _produce_redis(load, settings.directory)).rows_per_s)
                their_taken.append(await _consume_redis(load, count, settings.directory))
        found.append(_against(f"{case} produced", made, their_made, aim))
        found.append(_against(f"{case} consumed and acknowledged", taken, their_taken, aim))
    return [*found, await _measure_retention(settings)]


def _against(case: str, ours: list[float], theirs: list[float], aim: float) -> Measurement:
    return Measurement(
        name="topics",
        case=case,
        value=median(ours),
        unit="messages/s",
        baseline=median(theirs),
        aim=aim if theirs else 0.0,
    )


# --- ours -----------------------------------------------------------------------------------------


async def _produce(load: Load, directory: Path) -> Measured:
    with scratch(directory) as path:
        async with open_node(path) as node:
            return await measure_warm(load, await _producing(node, load.batch))


async def _producing(node: Node, batch: int) -> Callable[[], Awaitable[object]]:
    await node.mq.create_topic(TOPIC)
    batches = itertools.cycle(
        [VALUES[start : start + batch] for start in range(0, len(VALUES) - batch, batch)]
    )
    return lambda: node.mq.produce(TOPIC, next(batches))


async def _consume(load: Load, count: int, directory: Path) -> float:
    """Return how many messages a second are consumed and acknowledged by a group that finds them
    all there.
    """
    with scratch(directory) as path:
        async with open_node(path) as node:
            produce = await _producing(node, 100)
            await node.mq.create_consumer_group(TOPIC, GROUP)
            for _ in range(count // 100):
                await produce()
        async with open_node(path) as node:  # anew, so that they come from the disk
            taken = 0

            async def consuming() -> None:
                nonlocal taken
                while messages := await node.mq.consume(TOPIC, GROUP, load.batch):
                    taken += len(messages)
                    await node.mq.ack(TOPIC, GROUP, [each.message_id for each in messages])

            began = time.perf_counter()
            await asyncio.gather(*[consuming() for _ in range(load.outstanding)])
            assert taken == count, f"{taken} messages were consumed, {count} produced"
            return count / (time.perf_counter() - began)


async def _measure_retention(settings: Settings) -> Measurement:
    """Return the part of the space of a topic that retention gives back once it has been
    acknowledged.
    """
    note("topics, retention")
    payload_bytes = max(_RETAINED_BATCH << 10, int(RETAINED_BYTES * settings.scale))
    with scratch(settings.directory) as path:
        async with open_node(path) as node:
            empty = await asyncio.to_thread(_size_of, path)
            await node.mq.create_topic(TOPIC)
            await node.mq.create_consumer_group(TOPIC, GROUP)
            messages = (VALUES * (1 + _RETAINED_BATCH // len(VALUES)))[:_RETAINED_BATCH]
            for _ in range(payload_bytes // (_RETAINED_BATCH << 10)):
                await node.mq.produce(TOPIC, messages)
                taken = await node.mq.consume(TOPIC, GROUP, _RETAINED_BATCH)
                await node.mq.ack(TOPIC, GROUP, [each.message_id for each in taken])
            full = await asyncio.to_thread(_size_of, path)
        async with open_node(path, config=NodeConfig(mq=MqOptions(retention_s=0))) as node:
            queue = node.mq
            assert isinstance(queue, RocksMQ), "it is in this process"
            began = time.perf_counter()
            await queue.retain()
            took_s = time.perf_counter() - began
            left = await asyncio.to_thread(_size_of, path)
    said = (
        f"{full >> 20} MiB before, {left >> 20} MiB after, an empty node has {empty >> 20} MiB; "
        f"in {took_s:.1f} s"
    )
    return Measurement(
        name="topics",
        case=f"given back of {payload_bytes >> 20} MiB",
        value=float(full - left),
        unit="bytes",
        baseline=float(full - empty),
        aim=GIVEN_BACK_AIM,
        note=said,
    )


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.rglob("*") if file.is_file())


# --- theirs ---------------------------------------------------------------------------------------


async def _produce_redis(load: Load, directory: Path) -> Measured:
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as place,
        serving(Path(place)) as socket,
    ):
        async with connected(socket) as connection:
            numbers = itertools.count(1)

            def append() -> Awaitable[object]:
                commands = b"".join([add(next(numbers)) for _ in range(load.batch)])
                return connection.append(commands, load.batch)

            return await measure_warm(load, append)


async def _consume_redis(load: Load, count: int, directory: Path) -> float:
    """Return what one consumer takes and acknowledges, with as many commands in the pipeline as we
    have consumers.
    """
    stream = b"rows"
    read_count = load.batch
    with (
        tempfile.TemporaryDirectory(dir=directory, prefix="bench-") as place,
        serving(Path(place)) as socket,
    ):
        await fill_redis(socket, count)
        async with Exchange.open(socket) as exchange:
            await exchange.ask(
                words(b"XGROUP", b"CREATE", stream, GROUP.encode(), b"0"), len(b"+OK\r\n")
            )
            take = words(
                *(
                    b"XREADGROUP",
                    b"GROUP",
                    GROUP.encode(),
                    b"consumer",
                    b"COUNT",
                    b"%d" % read_count,
                ),
                *(b"STREAMS", stream, b">"),
            )
            replies = len(b":%d\r\n" % read_count)
            began = time.perf_counter()
            for first in range(0, count, load.outstanding * read_count):
                await exchange.ask(
                    take * load.outstanding, read_bytes(read_count) * load.outstanding
                )
                acks = [
                    words(
                        b"XACK",
                        stream,
                        GROUP.encode(),
                        *map(entry_id, range(start, start + read_count)),
                    )
                    for start in range(first, first + load.outstanding * read_count, read_count)
                ]
                await exchange.ask(b"".join(acks), replies * load.outstanding)
            return count / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main("topics of RocksMQ against Redis Streams", run))
