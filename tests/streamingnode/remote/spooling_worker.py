"""A client with a spool: writes from several tasks, and says what became of each write."""

import sys

import anyio

import streamingnode as sn

TASKS = 6


async def main(url: str, directory: str, life: int) -> None:
    """Write until the process is killed; a line for each write that returned."""
    async with (
        sn.connect(url, spool=directory, give_up_s=0.2) as node,
        anyio.create_task_group() as tasks,
    ):

        async def write(task: int) -> None:
            key = life * 10**9 + task * 10**6
            while True:
                key += 1
                row = {"id": key, "item": "x" * (key % 50)}
                if key % 3 == 0:
                    await node.upsert("c", [row])
                elif key % 3 == 1:
                    await node.insert("c", [row])
                else:
                    async with node.transaction() as txn:
                        await txn.insert("c", [row])
                print(key, flush=True)

        for task in range(TASKS):
            tasks.start_soon(write, task)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
