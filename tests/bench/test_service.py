"""The service that is measured keeps what it answered, and the load takes nothing but a 204 for an
answer.
"""

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from bench import bench_service
from bench.bench_service import lacking, put_load_on, serving
from bench.http_load import ITEMS, run_load
from bench.registry import BENCHMARKS
from bench.report import Settings
from streamingnode.opening import open_node, run_async

needs_service = pytest.mark.skipif(bool(lacking()), reason=lacking())
CONNECTIONS = 4


async def _rows_of_node(directory: Path) -> tuple[int, int]:
    async with open_node(directory / "node") as node:
        return (await node.snapshot("orders")).num_rows, (await node.snapshot("stock")).num_rows


def _rows_of_sqlite(directory: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(directory / "rows.db")) as connection:
        query = "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM stock)"
        orders, stock = connection.execute(query).fetchone()
    return orders, stock


@needs_service
@pytest.mark.parametrize("store", ["node", "sqlite3"])
def test_every_order_that_was_answered_is_in_both_tables_of_its_store(
    store: str, tmp_path: Path
) -> None:
    with serving(store, tmp_path) as port:
        loaded = put_load_on(port, CONNECTIONS, 0.1)
    rows = (
        run_async(partial(_rows_of_node, tmp_path))
        if store == "node"
        else _rows_of_sqlite(tmp_path)
    )
    # each connection once to warm up, and once to be measured
    assert loaded.sent >= 2 * CONNECTIONS
    assert rows == (loaded.sent, min(loaded.sent, ITEMS))


@needs_service
def test_the_service_is_measured_beside_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_service, "CONNECTIONS", (2,))
    found = BENCHMARKS["service"](Settings(directory=tmp_path, seconds=0.1, repeats=1, scale=1.0))
    assert [measured.aim for measured in found] == [bench_service.AIM, 0.0, 0.0]
    for measured in found:
        assert measured.value > 0
        assert measured.baseline > 0
    assert not list(tmp_path.iterdir())


@needs_service
def test_a_service_whose_store_does_not_open_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ConnectionError, match="the service with sqlite3 did not start"),
        serving("sqlite3", tmp_path / "missing"),
    ):
        pass


def test_a_load_whose_requests_are_refused_measures_nothing() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def load() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            await run_load(server.sockets[0].getsockname()[1], CONNECTIONS, 0.1)

    with pytest.raises(ExceptionGroup) as refused:
        asyncio.run(load())
    assert refused.group_contains(ConnectionError, match="500 Internal Server Error")
