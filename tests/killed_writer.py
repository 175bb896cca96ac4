"""A process that writes to a node until it is killed, and says on standard output what was
acknowledged.

Single rows go to `log`; each transaction puts the same number into `left` and `right`, and one row
into `log`. Cuts come as fast as they can be made. A line is `row <n>` or `pair <n>` after the
acknowledgement, so what a line says was promised.
"""

import asyncio
import itertools
import sys

import pyarrow as pa

import streamingnode as sn

FIELDS: dict[str, pa.DataType] = {"n": pa.int64(), "pad": pa.string()}
SCHEMA = pa.schema(FIELDS)
PAD = "x" * 300


async def main(directory: str, first: int) -> None:
    async with sn.open_node(directory, cut_interval_s=None, retention_s=0) as node:
        for name in ("log", "left", "right"):
            await node.create_collection(
                name, SCHEMA, primary_key="n", shards=2, if_not_exists=True
            )
        numbers = itertools.count(first)
        print("open", flush=True)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(write_rows(node, numbers))
            for _ in range(3):
                tasks.create_task(write_pairs(node, numbers))
            tasks.create_task(cut(node))


async def write_rows(node: sn.Node, numbers: "itertools.count[int]") -> None:
    for n in numbers:
        await node.insert("log", [{"n": n, "pad": PAD}])
        print("row", n, flush=True)


async def write_pairs(node: sn.Node, numbers: "itertools.count[int]") -> None:
    for n in numbers:
        async with node.transaction() as txn:
            await txn.insert("left", [{"n": n, "pad": PAD}])
            await txn.insert("right", [{"n": n, "pad": PAD}])
        print("pair", n, flush=True)


async def cut(node: sn.Node) -> None:
    while True:
        await node.flush()
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
