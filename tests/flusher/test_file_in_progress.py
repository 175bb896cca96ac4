"""A file in progress: its rows keep their order through two threads, and none is left out
unnoticed.
"""

import threading
from pathlib import Path

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anyio import CapacityLimiter

from flusher.data_file import FileInProgress, ParquetFile, Rows
from flusher.directory import TEMPORARY_SUFFIX, NodeDirectory
from flusher.manifest import SegmentFile
from tests.flusher.stamped_log import message_rows

pytestmark = pytest.mark.anyio

SCHEMA = pa.schema([("id", pa.int64())])
ROWS = 10


def message(number: int) -> Rows:
    keys = list(range(number * ROWS, (number + 1) * ROWS))
    payload = pa.record_batch([pa.array(keys)], schema=SCHEMA).serialize().to_pybytes()
    return message_rows(payload, ROWS, number + 1, number * ROWS)


ONE_MESSAGE = len(message(0).batch.payload)


def file_of(root: Path, messages: int, *, threads: int = 2) -> FileInProgress:
    file = FileInProgress(
        NodeDirectory(root),
        SegmentFile,
        {
            "path": "segments/1/2.parquet",
            "collection_id": 1,
            "vchannel": "p0_1v0",
            "segment_id": 2,
            "partition_id": 1,
        },
        schema=SCHEMA,
        key="id",
        node_id="n",
        row_group_bytes=ONE_MESSAGE,
        limiter=CapacityLimiter(threads),
    )
    for number in range(messages):
        file.add(message(number))
    return file


async def test_a_spill_takes_one_row_group_and_leaves_the_rest_pending(tmp_path: Path) -> None:
    file = file_of(tmp_path, 3)
    await file.spill()
    assert file.pending_bytes == 2 * ONE_MESSAGE
    assert file.held_bytes == 2 * ONE_MESSAGE
    await file.discard()


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_rows_spilled_side_by_side_keep_their_order(tmp_path: Path, threads: int) -> None:
    file = file_of(tmp_path, 20, threads=threads)
    async with anyio.create_task_group() as spills:
        for _ in range(10):
            spills.start_soon(file.spill)
    await file.finish()
    written = pq.ParquetFile(tmp_path / (file.place["path"] + TEMPORARY_SUFFIX))
    assert written.num_row_groups == 20
    assert written.read()["id"].to_pylist() == list(range(20 * ROWS))
    assert file.held_bytes == 0


async def test_a_row_group_is_decoded_while_the_one_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = threading.Event()
    decoded = threading.Event()
    write = ParquetFile.write
    decode = FileInProgress._decode

    def write_until_the_next_is_decoded(self: ParquetFile, table: pa.Table) -> None:
        writing.set()
        assert decoded.wait(60)
        write(self, table)

    def decode_and_tell(self: FileInProgress, rows: list[Rows]) -> pa.Table:
        if writing.is_set():
            decoded.set()
        return decode(self, rows)

    monkeypatch.setattr(ParquetFile, "write", write_until_the_next_is_decoded)
    monkeypatch.setattr(FileInProgress, "_decode", decode_and_tell)
    file = file_of(tmp_path, 2)
    async with anyio.create_task_group() as spills:
        spills.start_soon(file.spill)
        await anyio.to_thread.run_sync(writing.wait)
        spills.start_soon(file.spill)
    assert decoded.is_set()
    await file.discard()


async def test_a_file_that_lost_rows_to_the_disk_is_never_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, 2)
    write = ParquetFile.write

    def fail(_self: ParquetFile, _table: pa.Table) -> None:
        raise OSError("no")

    monkeypatch.setattr(ParquetFile, "write", fail)
    with pytest.raises(OSError, match="no"):
        await file.spill()
    monkeypatch.setattr(ParquetFile, "write", write)
    with pytest.raises(OSError, match="earlier write"):
        await file.spill()
    with pytest.raises(OSError, match="earlier write"):
        await file.finish()
    assert file.described is None
    assert file.writing_bytes == 0
    await file.discard()


async def test_spilling_nothing_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    writing = threading.Event()
    write = ParquetFile.write
    ended: list[str] = []

    def wait(self: ParquetFile, table: pa.Table) -> None:
        writing.set()
        assert go.wait(60)
        write(self, table)
        ended.append("written")

    monkeypatch.setattr(ParquetFile, "write", wait)
    file = file_of(tmp_path, 1)

    async def spill_nothing() -> None:
        await file.spill()
        ended.append("returned")

    async with anyio.create_task_group() as spills:
        spills.start_soon(file.spill)
        await anyio.to_thread.run_sync(writing.wait)
        spills.start_soon(spill_nothing)
        await anyio.wait_all_tasks_blocked()
        go.set()
    assert ended == ["written", "returned"]
    await file.discard()


async def test_a_discarded_file_takes_no_more_rows_and_leaves_nothing(tmp_path: Path) -> None:
    file = file_of(tmp_path, 2)
    await file.spill()
    await file.discard()
    await file.spill()
    await file.finish()
    assert await anyio.to_thread.run_sync(NodeDirectory(tmp_path).files, "segments") == []
