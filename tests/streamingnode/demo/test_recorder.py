"""Sampling rounds: what is recorded is what the node acknowledged, and `live` is one round after each of them."""

import pyarrow as pa
import pytest

from streamingnode.demo.processes import LIVE_SCHEMA, sample_processes
from streamingnode.demo.recorder import Recording, create_demo_collections, record
from streamingnode.opening import open_node

pytestmark = [pytest.mark.anyio]


def _processes(number: int, *pids: int) -> pa.RecordBatch:
    rows = [
        {
            "pid": pid,
            "name": f"p{pid}",
            "status": "running",
            "threads": 1,
            "cpu_seconds": 0.5,
            "rss_bytes": pid,
            "round": number,
        }
        for pid in pids
    ]
    return pa.RecordBatch.from_pylist(rows, schema=LIVE_SCHEMA)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[pa.RecordBatch]:
    """Processes come and go; 2 ends and its number is used again."""
    looks = [_processes(1, 1, 2), _processes(2, 1, 3), _processes(3), _processes(4, 2, 4)]
    monkeypatch.setattr("streamingnode.demo.recorder.sample_processes", lambda number: looks[number - 1])
    return looks


async def test_live_is_the_last_round_and_samples_are_all(rounds: list[pa.RecordBatch]) -> None:
    class Enough(Exception):
        pass

    kept = Recording()

    def stop_after_all(_at_s: float, recording: Recording) -> None:
        kept.rounds, kept.samples = recording.rounds, recording.samples
        if len(recording.rounds) == len(rounds):
            raise Enough

    async with open_node(None) as node:
        await create_demo_collections(node)
        with pytest.raises(Enough):
            await record(node, seconds=60, rounds_per_s=1_000, progress=stop_after_all)
        for recorded in kept.rounds:
            live = await node.snapshot("live", as_of=recorded.time_tick)
            assert live.select(LIVE_SCHEMA.names).sort_by("pid").equals(kept.live_at(recorded.time_tick))
        samples = (await node.snapshot("samples")).sort_by("sample")
        assert samples.select(kept.all_samples().column_names).equals(kept.all_samples())
    assert kept.samples == sum(look.num_rows for look in rounds)
    assert kept.live_at(kept.rounds[0].time_tick - 1).num_rows == 0


def test_look_at_this_machine_sees_this_process() -> None:
    import os

    rows = {row["pid"]: row for row in sample_processes(7).to_pylist()}
    mine = rows[os.getpid()]
    assert mine["round"] == 7
    assert mine["rss_bytes"] > 1 << 20
    assert len(rows) > 1
