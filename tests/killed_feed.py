"""A process that copies a source into a node by offset, until it is killed: each offset is the
sequence of its write.

It begins some offsets before the last one in the log, as a feed does that does not know what became
of its last writes, and keeps several under way. A line on standard output is `<offset> <tick>`
after the acknowledgement, `end` after the last one.
"""

import asyncio
import sys

import pyarrow as pa

import streamingnode as sn

FIELDS: dict[str, pa.DataType] = {"n": pa.int64()}
SCHEMA = pa.schema(FIELDS)
REPEATED = 20
UNDER_WAY = 4


async def main(directory: str, offsets: int) -> None:
    async with sn.open_node(directory, cut_interval_s=None, retention_s=0) as node:
        await node.create_collection("copy", SCHEMA, primary_key="n", shards=2, if_not_exists=True)
        feed = await node.producer("feed")
        first = max(1, feed.last_sequence + 1 - REPEATED)
        for start in range(first, offsets + 1, UNDER_WAY):
            async with asyncio.TaskGroup() as tasks:
                for offset in range(start, min(start + UNDER_WAY, offsets + 1)):
                    tasks.create_task(copy(feed, offset))
            if start % 16 < UNDER_WAY:
                await node.flush()
    print("end", flush=True)


async def copy(feed: sn.Producer, offset: int) -> None:
    if offset % 5:
        result = await feed.insert("copy", [{"n": offset}], sequence=offset)
    else:
        async with feed.transaction(sequence=offset) as txn:
            await txn.insert("copy", [{"n": offset}])
        assert txn.result is not None
        result = txn.result
    print(offset, result.time_tick, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
