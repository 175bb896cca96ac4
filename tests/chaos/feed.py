"""A named producer under kills: it writes by sequence, and begins again before the last one that is
in the log.

In: an open node. Out: journal records; each try of a sequence is an operation, with the rows that
belong to the sequence.
"""

import itertools
import os

import anyio

import streamingnode as sn
from streamingnode.writing.write import WriteResult
from tests.chaos.operations import Row, RowWrite
from tests.chaos.produced import row_number
from tests.chaos.rows import as_batch
from tests.chaos.workload import Recorder, until
from wal.errors import StreamingNodeError

REPEATED = 12
"""So many writes are asked for again, as by a feed that does not know what became of its last
ones.
"""
UNDER_WAY = 3
TRANSACTION_EVERY = 4
REFUSED_PAUSE_S = 0.02


async def feed(node: sn.Node, recorder: Recorder, index: int, end_s: float | None) -> None:
    """Write sequence after sequence, a few at a time and the first of them twice at once, until the
    end.
    """
    try:
        producer = await node.producer(f"feed-{index}")
    except StreamingNodeError:
        # fenced as it begins: the other callers say what becomes of the node
        return
    sequences = itertools.count(max(1, producer.last_sequence + 1 - REPEATED))
    for _ in until(end_s):
        failures = recorder.failures
        group = list(itertools.islice(sequences, UNDER_WAY))
        async with anyio.create_task_group() as tasks:
            for sequence in [*group, group[0]]:
                tasks.start_soon(_write, producer, recorder, index, sequence)
        await anyio.sleep(REFUSED_PAUSE_S if recorder.failures > failures else 0)


async def _write(producer: sn.Producer, recorder: Recorder, index: int, sequence: int) -> None:
    row = Row(row_number(index, sequence), row_number(index, sequence))
    process = f"{os.getpid()}-feed-{index}-{sequence}"
    if sequence % TRANSACTION_EVERY:
        write = RowWrite(collection="events", action="insert", rows=(row,))
        await recorder.record(
            process,
            "produced",
            [write],
            lambda: producer.insert("events", as_batch([row]), sequence=sequence),
        )
        return
    writes = [RowWrite(collection=name, action="insert", rows=(row,)) for name in ("left", "right")]

    async def call() -> WriteResult:
        async with producer.transaction(sequence=sequence) as txn:
            for write in writes:
                await txn.insert(write.collection, as_batch(write.rows))
        assert txn.result is not None, "left without an error, so committed"
        return txn.result

    await recorder.record(process, "produced transaction", writes, call)
