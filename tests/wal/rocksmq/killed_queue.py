"""A process that produces, consumes and acknowledges until it is killed, and says on stdout what it was told. A script."""

import asyncio
import random
import sys
from pathlib import Path

from tests.wal.rocksmq.queues import open_queue
from wal.rocks.layout import RocksOptions
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.queue import RocksMQ
from wal.runtime import unix_ms

TOPICS, GROUPS = ("t0", "t1"), ("g0", "g1")
OPTIONS = MqOptions(page_bytes=2000, retention_s=0)


def say(*words: object) -> None:
    """Print a line at once."""
    print(*words, flush=True)


async def produce(mq: RocksMQ, chance: random.Random) -> None:
    """Produce for ever."""
    while True:
        topic, payload = chance.choice(TOPICS), b"%d" % chance.getrandbits(64)
        ids = await mq.produce(topic, [payload] * chance.randint(1, 5))
        say("produced", topic, ids[0], ids[-1], payload.decode())


async def consume(mq: RocksMQ, chance: random.Random) -> None:
    """Consume for ever, acknowledge most of it, and give up what may go."""
    while True:
        topic, group = chance.choice(TOPICS), chance.choice(GROUPS)
        ids = [message.message_id for message in await mq.consume(topic, group, chance.randint(1, 20), wait_s=1)]
        say("consumed", topic, group, *ids)
        taken = [each for each in ids if chance.random() < 0.95]
        say("acking", topic, group, *taken)
        await mq.ack(topic, group, taken)
        say("acked", topic, group, *taken)
        await mq.retain()


async def work_until_killed(path: Path, seed: int, durability: str) -> None:
    """Print a line for each thing that is acknowledged, before the next is begun."""
    chance = random.Random(seed)
    rocks = RocksOptions(durability=durability, free_bytes_min=0)  # type: ignore[arg-type]
    _, mq = await open_queue(path, unix_ms, OPTIONS, rocks)
    for topic in TOPICS:
        await mq.create_topic(topic)
        for group in GROUPS:
            if not await mq.exist_consumer_group(topic, group):
                await mq.create_consumer_group(topic, group)
    tasks = [work(mq, chance) for work in (produce, consume) for _ in range(4)]
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(work_until_killed(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
