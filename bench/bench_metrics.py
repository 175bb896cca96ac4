"""Durable appends of a node whose metrics are read every second, against one that nobody asks, in
turn.
"""

import asyncio
import sys
from contextlib import suppress
from functools import partial

from bench.baseline import Load, Measured, measure_warm, scratch
from bench.measurement import Measurement, median
from bench.report import Settings, main, note
from bench.rows import create, inserts_of
from streamingnode.opening import open_node, run_async

OUTSTANDING = 64
AIM = 0.97
PAUSE_S = 1.0
"""Between two scrapes; monitors ask every 15 s."""
HOST = "127.0.0.1"
PORT = 9464


def run(settings: Settings) -> list[Measurement]:
    """Return rows per second with and without a scrape each second."""
    note("metrics")
    return [run_async(partial(_measure, settings))]


async def _measure(settings: Settings) -> Measurement:
    load = Load(outstanding=OUTSTANDING, batch=1, seconds=settings.seconds)
    scraped = []
    alone = []
    for _ in range(settings.repeats):
        alone.append(await _appends(load, settings, scraping=False))
        scraped.append(await _appends(load, settings, scraping=True))
    return Measurement(
        name="metrics",
        case=f"{OUTSTANDING} x 1, a scrape each second",
        value=median([measured.rows_per_s for measured in scraped]),
        unit="rows/s",
        baseline=median([measured.rows_per_s for measured in alone]),
        aim=AIM,
    )


async def _appends(load: Load, settings: Settings, *, scraping: bool) -> Measured:
    with scratch(settings.directory) as path:
        async with open_node(path, http=f"{HOST}:{PORT}" if scraping else None) as node:
            collection = await create(node, "rows")
            asking = asyncio.ensure_future(_scrape()) if scraping else None
            try:
                return await measure_warm(load, inserts_of(node, collection, load.batch))
            finally:
                if asking is not None:
                    asking.cancel()
                    with suppress(asyncio.CancelledError):
                        await asking


async def _scrape() -> None:
    while True:
        reader, writer = await asyncio.open_connection(HOST, PORT)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200"), "it is read as it is"
        writer.close()
        await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main("appends while metrics are read, against appends alone", run))
