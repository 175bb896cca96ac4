"""The server of `bench_remote`: `python -m bench.remote_server DIRECTORY` opens the node there and
lets others connect.

Prints `ready` and how many seconds that took after the imports. Ends on SIGTERM, or at the end of
its input, so that it never outlives who started it.
"""

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
import threading
import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

from streamingnode.node import Node
from streamingnode.opening import open_node, run_async

READY = "ready"


def allow_files() -> None:
    """Let this process, and the servers that it starts, have as many connections as the system
    permits.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_served(directory: Path) -> AbstractAsyncContextManager[Node]:
    """Return what opens the node in a directory, with the settings it has by itself: it listens at
    `node.sock` there.
    """
    return open_node(directory)


async def _serve(directory: Path, began: float) -> None:
    async with open_served(directory):
        print(f"{READY} {time.perf_counter() - began:.6f}", flush=True)
        gc.collect()
        gc.freeze()  # as docs/guide.md says
        await _asked_to_stop()


async def _asked_to_stop() -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def watch_input() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        loop.call_soon_threadsafe(stop.set)

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    threading.Thread(target=watch_input, daemon=True).start()
    await stop.wait()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    run_async(partial(_serve, directory, time.perf_counter()))


if __name__ == "__main__":
    main()
