"""A process that bridges a topic into a collection until it is killed, and says so when it
begins.
"""

import asyncio
import sys

import streamingnode as sn
from streamingnode import bridging


async def main(directory: str) -> None:
    bridging.MESSAGES_MAX = 3
    async with sn.open_node(directory, cut_interval_s=None) as node:
        print("open", flush=True)
        await sn.bridge(
            node, "t", "c", on_progress=lambda report: print(report.messages, flush=True)
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
