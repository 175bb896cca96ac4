"""Both sides of a benchmark get the same: bytes that do not compress, settings, and time to warm
up.
"""

import asyncio
import socket
import zlib
from pathlib import Path

import anyio
import pytest
from rocksdict import Rdict

from bench import baseline
from bench.baseline import Load, measure_plain_scan, measure_warm, open_database
from bench.bench_checks import without_checks
from bench.redis_streams import connected, entry_command, lacking, serving
from bench.registry import BENCHMARKS
from bench.report import Settings
from bench.rows import create, record_batch
from streamingnode.opening import open_node


def test_the_database_of_the_limit_compresses_nothing_as_that_of_a_node(tmp_path: Path) -> None:
    database = open_database(tmp_path / "database")
    for position in range(64):
        database.put(position.to_bytes(8, "big"), bytes(1 << 14))
    database.flush()
    database.close()
    assert sum(path.stat().st_size for path in (tmp_path / "database").glob("*.sst")) > 64 << 14


def test_values_of_the_scan_and_rows_of_the_node_do_not_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    scan = baseline.plain_scan

    def watched(database: Rdict) -> list[tuple[bytes, bytes]]:
        found = list(scan(database))
        seen.extend(value for _, value in found)
        return found

    monkeypatch.setattr(baseline, "plain_scan", watched)
    assert measure_plain_scan(tmp_path, rows=20, row_bytes=1024, batch=10) > 0
    assert [len(value) for value in seen] == [10_240, 10_240]
    for data in (*seen, record_batch(0, 10)["value"].buffers()[2]):
        assert data is not None
        assert len(zlib.compress(data)) >= len(data)


def test_the_first_appends_warm_up_and_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "WARM_UP_S", 0.0)
    calls: list[int] = []

    async def append() -> None:
        calls.append(len(calls))
        await anyio.lowlevel.checkpoint()

    async def measure() -> None:
        await measure_warm(Load(outstanding=3, batch=1, seconds=0.0), append)

    anyio.run(measure)
    assert len(calls) == 6  # each task once to warm up, and once to be measured


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_the_peer_is_served_from_a_relative_directory_and_from_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in (Path("relative"), tmp_path / ("long" * 30)):
        directory.mkdir()

        async def append_one(directory: Path = directory) -> None:
            with serving(directory) as place:
                async with connected(place) as connection:
                    await connection.append(entry_command(b"rows", b"1", b"value"), 1)

        anyio.run(append_one)
        assert any(directory.rglob("*.aof"))


def test_the_scan_of_a_log_is_measured_beside_its_baseline(tmp_path: Path) -> None:
    settings = Settings(directory=tmp_path, seconds=0.1, repeats=1, scale=0.002)
    for measured in BENCHMARKS["scan"](settings):
        assert measured.value > 0
        assert measured.baseline > 0


def test_a_node_without_its_checks_opens_and_takes_rows(tmp_path: Path) -> None:
    async def insert() -> int:
        async with open_node(tmp_path / "node") as node:
            await node.insert(await create(node, "rows"), record_batch(0, 10))
            return (await node.snapshot("rows")).num_rows

    with without_checks():
        assert anyio.run(insert) == 10


def test_a_server_that_has_its_socket_and_does_not_listen_yet_is_waited_for(tmp_path: Path) -> None:
    async def connect() -> None:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(tmp_path / "socket"))
            async with asyncio.TaskGroup() as tasks:
                connecting = tasks.create_task(connected(tmp_path / "socket").__aenter__())
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not connecting.done()
                bound.listen()
            await connecting.result().close()

    asyncio.run(connect())
