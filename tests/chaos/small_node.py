"""A node directory as small as one of each kind of file can be, always made by the same calls.

Two processes in turn, each killed by itself after its last acknowledgement: the second one's
recovery turns the first one's log into tables. In the state map are a checkpoint with the window of
a named producer, and a reader's position.
"""

import os
import signal
from pathlib import Path

import streamingnode as sn
from tests.chaos.operations import Row
from tests.chaos.rows import PRIMARY_KEY, REPLACED, SCHEMA, as_batch

NAMES = ("events", REPLACED)
SHORT_ROW = 0x2008
"""A number whose pad is short."""
NUMBERS_OF_A_PROCESS = 16


async def live(directory: Path, process: int, settings: dict[str, object]) -> None:
    """Open, write, cut, read, write once more, and die."""
    number = SHORT_ROW + process * NUMBERS_OF_A_PROCESS
    async with sn.open_node(directory, config=sn.load_config(arguments=settings)) as node:
        for name in NAMES:
            await node.create_collection(name, SCHEMA, primary_key=PRIMARY_KEY, if_not_exists=True)
        feed = await node.producer("feed")
        await feed.insert("events", as_batch([Row(number, number)]), sequence=number)
        await node.upsert(REPLACED, as_batch([Row(1, number)]))
        await node.flush()
        async with node.read(
            "events", name="billing", until=await node.consistent_tick()
        ) as messages:
            async for message in messages:
                await messages.ack(message)
        await node.insert("events", as_batch([Row(number + 1, number + 1)]))
        os.kill(os.getpid(), signal.SIGKILL)
