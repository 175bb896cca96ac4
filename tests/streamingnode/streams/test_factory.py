"""Tickers: what a tick says holds, also while others produce, and channels without messages move
on.
"""

import logging
from pathlib import Path

import pytest

from streamingnode.streams.factory import Ticker
from streamingnode.streams.messages import MsgPack
from tests.streamingnode.batching_cases import until
from tests.streamingnode.streams.messages_of import ends, insert
from tests.streamingnode.streams.streams_on import streams_in
from wal.errors import InvalidArgument
from wal.timetick import TickAllocator

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("everywhere")]


def ticks_from(first: int) -> TickAllocator:
    return TickAllocator(lambda: 0, lambda: 0, above=first - 1)


async def test_ticks_reach_every_channel_and_move_a_tick_stream_on(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b") as producer:
        async with (
            streams.tick_consumer("a", "b") as consumer,
            Ticker(producer, interval_s=0.01) as ticker,
        ):
            for _ in range(3):
                with ticker.stamp() as tick:
                    await producer.produce(MsgPack([insert(tick)]))
                found = await consumer.consume(timeout=60)
                while not found.messages:
                    found = await consumer.consume(timeout=60)
                assert found.begin_ts < tick <= found.end_ts
                assert ends(found.messages) == [tick]


async def test_no_tick_passes_a_message_that_is_stamped_and_not_produced(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ticker = Ticker(producer, ticks=ticks_from(100))
        assert await ticker.tick() == 100
        with ticker.stamp(3) as first, ticker.stamp() as second:
            assert (first, second) == (101, 104)
            assert await ticker.tick() == 100
            assert ticker.last_tick == 100
        assert await ticker.tick() == 105


@pytest.mark.parametrize("count", [0, -5])
async def test_no_ticks_are_refused_and_ticks_go_on_ascending(tmp_path: Path, count: int) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        ticker = Ticker(producer, ticks=ticks_from(100))
        assert await ticker.tick() == 100
        with pytest.raises(InvalidArgument), ticker.stamp(count):
            pass
        assert await ticker.tick() == 101


async def test_ticks_go_on_above_those_of_an_earlier_ticker_whose_clock_was_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a", "b", "raw") as producer:
        async with Ticker(producer, ticks=ticks_from(100)) as ticker:
            pass
        await streams.queue.produce("raw", [b"no batch"])
        async with Ticker(producer, ticks=ticks_from(1)) as later:
            with later.stamp() as tick:
                assert tick > ticker.last_tick >= 100
        assert "last_tick_unknown" in caplog.text
        assert [info.groups.keys() - {"g"} for info in (await streams.queue.info()).values()] == [
            set()
        ] * 3


async def test_leaving_a_ticker_writes_a_last_tick_but_not_after_an_error(tmp_path: Path) -> None:
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        async with Ticker(producer, interval_s=3600, ticks=ticks_from(1)) as ticker:
            await until(lambda: ticker.last_tick)
            assert ticker.last_tick == 1
        assert ticker.last_tick == 2
        with pytest.raises(RuntimeError):
            async with Ticker(producer, interval_s=3600, ticks=ticks_from(10)) as ticker:
                await until(lambda: ticker.last_tick)
                raise RuntimeError
        assert ticker.last_tick == 10


async def test_a_ticker_whose_tick_is_refused_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with streams_in(tmp_path) as streams, streams.producer("a") as producer:
        producer.force_enable_produce(False)
        async with Ticker(producer, interval_s=0) as ticker:
            await until(lambda: "tick_not_written" in caplog.text)
            producer.force_enable_produce(True)
            await until(lambda: ticker.last_tick)
