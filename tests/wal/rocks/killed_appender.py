"""A process that appends until it is killed, and says on stdout what was acknowledged. Run as a
script.
"""

import random
import sys
from pathlib import Path

import anyio

from tests.wal.log_contract import stamped_pack
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store

LOGS = ("p0", "p1")
ROUND_ENTRIES_MAX = 40


def payload(name: str, number: int, size: int) -> bytes:
    """Return bytes that say where they belong."""
    return f"{name}:{number}:".encode().ljust(size, b".")


async def append_until_killed(path: Path, seed: int, durability: str) -> None:
    """Append, truncate, set state and promise ticks; print a line for each thing that is
    acknowledged.
    """
    chance = random.Random(seed)
    options = RocksOptions(durability=durability, sync_interval_ms=5, free_bytes_min=0)  # type: ignore[arg-type]
    store = await open_rocks_store(path, options=options)
    logs = [await store.open_log(name) for name in LOGS]
    tick = max(store.promised_tick, *(log.last_tick for log in logs))
    print("open", store.term, store.promised_tick, flush=True)
    while True:
        tickets = []
        for _ in range(chance.randint(1, ROUND_ENTRIES_MAX)):
            log = chance.choice(logs)
            tick += 1
            size = chance.choice((20, 1000, 20_000))
            pack = stamped_pack(
                *[payload(log.name, log.next_position, size)] * chance.randint(1, 3), tick=tick
            )
            tickets.append((log, log.append(pack), len(pack.messages), tick))
        for log, ticket, count, ticked in tickets:
            await ticket.written
            print("appended", log.name, ticket.first_position + count - 1, ticked)
        sys.stdout.flush()
        tick += 5
        await store.promise_tick(tick)
        print("promised", tick, flush=True)
        if chance.random() < 0.2:
            await store.state.put({"k": str(tick).encode()})
            print("set", tick, flush=True)
        if chance.random() < 0.1:
            log = chance.choice(logs)
            await log.truncate(log.durable_position - 20)
            print("truncated", log.name, log.first_position, flush=True)


if __name__ == "__main__":
    anyio.run(append_until_killed, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
