"""What clients write in these tests, and what they were told of it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import msgspec
import pyarrow as pa

from streamingnode.errors import (
    Indeterminate,
    StreamingNodeError,
    Unreachable,
)
from streamingnode.node import Node
from streamingnode.writing.transaction import Transaction
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    Served,
    contents,
    rows,
)
from tests.streamingnode.remote.proxy import Passing, Way, until
from wal.frames import FrameKind
from wal.headers import MessageType

SMALL: dict[str, Any] = {"writes.pending_bytes_max": 64 << 10, "wal.group_bytes_max": 8 << 10}
"""So that a few KiB of rows fill the node's memory for them."""


SOON_S = 60.0
"""More than enough for what takes a few turns of the event loop, also on a machine that stands
still now and then.
"""


class Told:
    """What callers were told: keys acknowledged, those whose outcome was left open, and those that
    were refused.
    """

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.open: list[int] = []
        self.refused: list[int] = []

    async def write(self, call: Awaitable[object], *keys: int) -> None:
        """Write, and note what became of these keys."""
        try:
            await call
        except (Indeterminate, Unreachable, asyncio.CancelledError) as error:
            (self.refused if isinstance(error, Unreachable) else self.open).extend(keys)
        except StreamingNodeError:
            self.refused += keys
        else:
            self.acknowledged += keys

    def check(self, found: list[int]) -> None:
        """Check that what is acknowledged is there once, what is open at most once, and what was
        refused not at all.
        """
        times = Counter(found)
        assert not [key for key, count in times.items() if count > 1], "twice in the log"
        assert not set(self.acknowledged) - set(times), "acknowledged, and not in the log"
        assert set(times) <= {*self.acknowledged, *self.open}, "refused, and in the log"


async def reached(node: Node, *keys: int) -> None:
    """Return when these rows are in the log."""
    async with asyncio.timeout(60):
        # what it waits for is asked anew
        while not (await contents(node)).keys() >= set(keys):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def streamed(client: Node) -> Transaction:
    """Return an open transaction of six rows, of which most were sent already."""
    txn = client.transaction()
    for key in range(6):
        await txn.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    return txn


def without_answers_to_commits(served: Served) -> set[int]:
    """Have commits reach the node, and no answer to them the client; return their numbers as they
    come.
    """
    commits = set[int]()
    said = msgspec.msgpack.encode(MessageType.COMMIT_TXN)

    def passes(passing: Passing) -> bool:
        if (
            passing.way is Way.TO_NODE
            and passing.kind == FrameKind.CALL
            and said in passing.data[:100]
        ):
            commits.add(passing.number)
        is_answer = passing.kind in {FrameKind.REPLY, FrameKind.ERROR} and passing.number in commits
        return passing.way is Way.TO_NODE or not is_answer

    served.proxy.on_frame = passes
    return commits


def pass_all(_: Passing) -> bool:
    return True


async def write_all_kinds(client: Node, told: Told, first: int) -> None:
    """Write in each way that a client has, several at once."""

    async def in_transaction(key: int) -> None:
        async with client.transaction() as txn:
            await txn.insert("c", rows(key))
            await txn.upsert("c", rows(key + 1))

    producer = await client.producer(f"p{first}")

    async def in_named_transaction(key: int) -> None:
        async with producer.transaction(sequence=500) as txn:
            await txn.insert("c", rows(key))

    table = pa.Table.from_pylist(rows(*range(first + 20, first + 30)), schema=SCHEMA)
    calls: list[tuple[Awaitable[object], tuple[int, ...]]] = [
        *[(client.insert("c", rows(key)), (key,)) for key in range(first, first + 4)],
        (client.upsert("c", rows(first + 5)), (first + 5,)),
        (client.insert("c", table), tuple(range(first + 20, first + 30))),
        (in_transaction(first + 6), (first + 6, first + 7)),
        (producer.insert("c", rows(first + 10)), (first + 10,)),
        (producer.insert("c", rows(first + 11), sequence=300), (first + 11,)),
        (in_named_transaction(first + 12), (first + 12,)),
        (client.delete("c", [first + 9999]), ()),
    ]
    await asyncio.gather(*[told.write(call, *keys) for call, keys in calls])


async def filled(client: Node, served: Served, first: int, count: int) -> list["asyncio.Task[Any]"]:
    """Begin so many writes of 3 KiB, and return when as many as there is room for are at the
    node.
    """
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(client.insert("c", rows(key, item="x" * 3000)))
        for key in range(first, first + count)
    ]
    budget = parts_of(served.owner).pending.rows
    await until(
        lambda: budget.held_bytes + 3300 > budget.bytes_max or budget.held_bytes >= count * 3000
    )
    return tasks
