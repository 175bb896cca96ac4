"""What takes long is told with the steps it went through, and what is quick is not."""

import asyncio
import logging
from pathlib import Path

import pytest

from tests.wal.rocksmq.queues import opened
from wal.rocksmq import writes
from wal.rocksmq.messages import EntryCache

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("slow_s, told", [(-1.0, ["slow_produce", "slow_consume"]), (3600.0, [])])
async def test_only_slow_calls_are_logged_and_with_where_the_time_went(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    slow_s: float,
    told: list[str],
) -> None:
    monkeypatch.setattr(writes, "SLOW_S", slow_s)
    async with opened(tmp_path / "node") as mq:
        await mq.create_topic("t")
        await mq.create_consumer_group("t", "g")
        with caplog.at_level(logging.WARNING):
            # of one write, told once
            await asyncio.gather(*(mq.produce("t", [b"x"]) for _ in range(9)))
            mq._reader._cache = EntryCache()  # so that it is read
            await asyncio.gather(*(mq.consume("t", "g", 1) for _ in range(9)))
    lines = [line for line in caplog.messages if "slow_" in line]
    assert [line.split()[0].removeprefix("event=") for line in lines] == told
    assert all("topic=t" in line for line in lines)
    assert all(("written_ms=" if "produce" in line else "taken_ms=") in line for line in lines)
