"""Sampling rounds on their way into the node: each round is one transaction over both collections."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import pyarrow as pa
import pyarrow.compute as pc

from streamingnode.demo.processes import LIVE_SCHEMA, SAMPLES_SCHEMA, sample_processes
from streamingnode.node import Node
from streamingnode.rows.schema import AnyArray


@dataclass(frozen=True, slots=True)
class Round:
    """One acknowledged sampling round: when, at which tick, which rows of `live`, and how long the commit took."""

    number: int
    at_s: float
    time_tick: int
    processes: pa.RecordBatch
    commit_s: float

    @property
    def rows(self) -> int:
        """How many processes were seen, which is also how many samples were appended."""
        return self.processes.num_rows


@dataclass(slots=True)
class Recording:
    """Everything the node acknowledged: what the tables are checked against. Rounds are in order, from number 1."""

    rounds: list[Round] = field(default_factory=list)
    samples: int = 0

    def live_at(self, tick: int) -> pa.Table:
        """Return what `live` is at a tick: the processes of the last round at or before it."""
        past = [recorded.processes for recorded in self.rounds if recorded.time_tick <= tick]
        return pa.Table.from_batches(past[-1:], schema=LIVE_SCHEMA)

    def all_samples(self) -> pa.Table:
        """Return every row that was appended to `samples`, in order."""
        table = pa.Table.from_batches([recorded.processes for recorded in self.rounds], schema=LIVE_SCHEMA)
        return _numbered(table, first=1)


async def create_demo_collections(node: Node) -> None:
    """Create `samples` and `live`."""
    await node.create_collection("samples", SAMPLES_SCHEMA, primary_key="sample")
    await node.create_collection("live", LIVE_SCHEMA, primary_key="pid")


async def record(
    node: Node, *, seconds: float, rounds_per_s: float, progress: Callable[[float, Recording], None]
) -> Recording:
    """Sample for `seconds`, `rounds_per_s` times a second, and return what was acknowledged.

    A round that takes longer than its share delays the next one; it is never skipped.
    """
    recording = Recording()
    started = time.monotonic()
    while (at_s := time.monotonic() - started) < seconds:
        number = len(recording.rounds) + 1
        processes = await anyio.to_thread.run_sync(sample_processes, number)
        await _append_round(node, recording, at_s, processes)
        progress(at_s, recording)
        await anyio.sleep(max(0.0, started + number / rounds_per_s - time.monotonic()))
    return recording


async def _append_round(node: Node, recording: Recording, at_s: float, processes: pa.RecordBatch) -> None:
    samples = _numbered(pa.Table.from_batches([processes]), first=recording.samples + 1)
    ended = _ended(recording.rounds[-1].processes, processes) if recording.rounds else processes["pid"].slice(0, 0)
    began = time.monotonic()
    async with node.transaction() as txn:
        if len(ended):
            await txn.delete("live", ended)
        await txn.upsert("live", processes)
        await txn.insert("samples", samples)
    assert txn.result is not None, "a transaction that left its block has a result"
    commit_s = time.monotonic() - began
    recording.rounds.append(Round(len(recording.rounds) + 1, at_s, txn.result.time_tick, processes, commit_s))
    recording.samples += processes.num_rows


def _ended(before: pa.RecordBatch, now: pa.RecordBatch) -> AnyArray:
    return pc.filter(before["pid"], pc.invert(pc.is_in(before["pid"], value_set=now["pid"])))


def _numbered(table: pa.Table, *, first: int) -> pa.Table:
    """Return rows of `live` as rows of `samples`, numbered from `first`."""
    numbers = pa.array(range(first, first + table.num_rows), pa.int64())
    return pa.table([numbers, *table.columns], schema=SAMPLES_SCHEMA)
