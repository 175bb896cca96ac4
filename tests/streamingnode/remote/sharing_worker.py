"""One of several processes that share a node: writes from several tasks and says what became of
each write.
"""

import asyncio
import sys

import anyio
import pyarrow as pa

import streamingnode as sn

TASKS = 8
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("worker", pa.int64())])


async def main(directory: str, worker: int) -> None:
    """Write until the process is killed or its input ends; a line for each write that returned."""
    async with sn.open_node(directory, share=True) as node:
        await node.create_collection("rows", SCHEMA, primary_key="id", if_not_exists=True)

        async def write(task: int) -> None:
            key = worker * 10**9 + task * 10**6
            while True:
                key += 1
                row = {"id": key, "worker": worker}
                if key % 3 == 0:
                    await node.upsert("rows", [row])
                elif key % 3 == 1:
                    await node.insert("rows", [row])
                else:
                    async with node.transaction() as txn:
                        await txn.insert("rows", [row])
                print(key, flush=True)

        writing = [asyncio.ensure_future(write(task)) for task in range(TASKS)]
        stop = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
        await asyncio.wait([stop, *writing], return_when=asyncio.FIRST_COMPLETED)
        for each in writing:
            each.cancel()
        await asyncio.wait(writing)
        errors = [each.exception() for each in writing if not each.cancelled()]
        print("ended", *errors, flush=True)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
