"""A process that uses topics until it is killed, and says on stdout what it was told; and the judge
of what it said.

Run as a script it is the process.
"""

import asyncio
import random
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.wal.rocksmq.queues import open_queue, opened
from wal.errors import Indeterminate, LogReopening, StorageFailed, StorageFull
from wal.rocks.layout import RocksOptions
from wal.rocksmq.contract import MqOptions
from wal.rocksmq.queue import RocksMQ
from wal.runtime import unix_ms

T = TypeVar("T")

TOPICS = ("t0", "t1")
GROUPS = ("g0", "g1")
ROOT = Path(__file__).parents[2]
OPTIONS = MqOptions(page_bytes=2000, retention_s=0)
FULL_PAUSE_S = 0.02


def say(*words: object) -> None:
    """Print a line at once."""
    print(*words, flush=True)


async def tried(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call again for as long as the disk is full."""
    while True:
        try:
            return await call()
        except (StorageFull, StorageFailed, LogReopening, Indeterminate):
            await asyncio.sleep(FULL_PAUSE_S)


async def produce(mq: RocksMQ, chance: random.Random) -> None:
    """Produce for ever."""
    while True:
        topic = chance.choice(TOPICS)
        payload = b"%d" % chance.getrandbits(64)
        ids = await tried(partial(mq.produce, topic, [payload] * chance.randint(1, 5)))
        say("produced", topic, ids[0], ids[-1], payload.decode())


async def consume(mq: RocksMQ, chance: random.Random) -> None:
    """Consume for ever, acknowledge most of it, and give up what may go."""
    while True:
        topic = chance.choice(TOPICS)
        group = chance.choice(GROUPS)
        ids = [
            message.message_id
            for message in await mq.consume(topic, group, chance.randint(1, 20), wait_s=1)
        ]
        say("consumed", topic, group, *ids)
        taken = [each for each in ids if chance.random() < 0.95]
        say("acking", topic, group, *taken)
        await tried(partial(mq.ack, topic, group, taken))
        say("acked", topic, group, *taken)
        await tried(mq.retain)


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


class Told:
    """What processes of one directory said, and whether the next one, or a last look, fits to
    it.
    """

    def __init__(self, directory: Path, durability: str) -> None:
        self.findings: list[str] = []
        self.lines = 0
        """That the last process said."""
        self.produced: dict[str, dict[int, bytes]] = {topic: {} for topic in TOPICS}
        self.begun = defaultdict[tuple[str, str], set[int]](set)
        self.acked = defaultdict[tuple[str, str], set[int]](set)
        self._directory = directory
        self._durability = durability

    def run_until_killed(
        self, seed: int, kill: Callable[["subprocess.Popen[str]", Callable[[int], None]], None]
    ) -> None:
        """Run the process, and take in what it says until `kill` ends it, which may wait for so
        many lines.
        """
        command = [sys.executable, "-m", "tests.chaos.topic_life", str(self._directory), str(seed)]
        self.lines = 0
        began = threading.Condition()

        def wait_lines(lines: int) -> None:
            with began:
                began.wait_for(
                    lambda: self.lines >= lines or process.poll() is not None, timeout=60
                )

        with subprocess.Popen(
            [*command, self._durability], stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            killer = threading.Thread(target=kill, args=(process, wait_lines))
            killer.start()
            for line in process.stdout:  # to the end: what was said just before the kill counts too
                if line.endswith("\n"):
                    self.hear(*line.split())
                with began:
                    self.lines += 1
                    began.notify_all()
            killer.join()
        if process.returncode >= 0:
            self.findings.append(f"the process ended by itself, with {process.returncode}")

    def hear(self, what: str, topic: str, *about: str) -> None:
        """Take in one line."""
        if what == "produced":
            first, last, payload = about
            new = dict.fromkeys(range(int(first), int(last) + 1), payload.encode())
            if given := new.keys() & self.produced[topic].keys():
                self.findings.append(f"ids given twice in {topic}: {sorted(given)}")
            self.produced[topic] |= new
            return
        group = (topic, about[0])
        ids = set(map(int, about[1:]))
        if what == "consumed" and (again := ids & self.acked[group]):
            self.findings.append(f"acknowledged and delivered again to {group}: {sorted(again)}")
        elif what != "consumed":
            (self.begun if what == "acking" else self.acked)[group] |= ids

    async def look(self) -> None:
        """Open the topics, and compare what every group still gets with what was said."""
        async with opened(self._directory) as mq:
            for topic, group in sorted(self.begun):
                produced = self.produced[topic]
                left = {
                    each.message_id: each.payload for each in await mq.consume(topic, group, 10**6)
                }
                found = {
                    "acknowledged and delivered again": left.keys() & self.acked[topic, group],
                    "lost": produced.keys() - left.keys() - self.begun[topic, group],
                    "changed": {
                        each
                        for each, payload in produced.items()
                        if left.get(each, payload) != payload
                    },
                }
                self.findings += [
                    f"{what}, {topic} {group}: {sorted(ids)[:9]}"
                    for what, ids in found.items()
                    if ids
                ]


if __name__ == "__main__":
    asyncio.run(work_until_killed(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
