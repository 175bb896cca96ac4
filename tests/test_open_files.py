"""A node in a process that may open few files: cuts of more segments than that, and what it says
when none is left.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, resource, sys
from contextlib import suppress
from pathlib import Path
import anyio, pyarrow as pa
import streamingnode as sn
from tests.parts_of import parts_of

path, open_files, collections, shards = Path(sys.argv[1]), *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
SCHEMA = pa.schema([("id", pa.int64()), ("item", pa.string())])
SETTINGS = {
    "cut_interval_s": None,
    "flush.row_group_bytes": 4096,
    "flush.buffered_bytes_max": 1 << 16,
}
NAMES = [f"c{number}" for number in range(collections)]

def rows(start, count):
    items = [f"item {n % 97}" for n in range(count)]
    return pa.table({"id": range(start, start + count), "item": items})
"""

MANY_SEGMENTS = """
async def main():
    count = 40 * shards  # a shard that gets none of 40 keys in shards would take a segment less
    async with sn.open_node(path, **SETTINGS) as node:
        for name in NAMES:
            await node.create_collection(name, SCHEMA, primary_key="id", shards=shards)
        for start in range(2):
            for name in NAMES:
                await node.insert(name, rows(start * count, count))
        await node.delete(NAMES[0], list(range(count)))
        cut = await node.flush()
        assert len(cut.segments) == len(NAMES) * shards, len(cut.segments)
        assert sum(segment.rows for segment in cut.segments) == len(NAMES) * 2 * count
        for name in NAMES:
            kept = await node.snapshot(name)
            expected = count if name == NAMES[0] else 2 * count
            assert kept.num_rows == expected, (name, kept.num_rows)
        assert (await node.verify()).findings == []
        await node.backup(path.with_name("backup"))
        assert parts_of(node).measure().flusher.faults == 0
    async with sn.open_node(path, **SETTINGS) as node:
        await node.insert(NAMES[0], rows(0, count))
        assert len((await node.flush()).segments) == shards

anyio.run(main)
"""

NONE_LEFT = """
async def main():
    async with sn.open_node(path, **SETTINGS) as node:
        await node.create_collection("c0", SCHEMA, primary_key="id", shards=shards)
        await node.insert("c0", rows(0, 100))
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(2):
            try:
                await node.flush()
            except sn.StreamingNodeError as error:
                assert error.code == "OVERLOADED" and error.retryable == "yes", error
                assert "no file descriptor is left" in str(error), error
                assert str(open_files) in str(error), error
            else:
                raise AssertionError("a cut was made without a descriptor")
        while parts_of(node).measure().flusher.short_of != "file descriptors":
            await anyio.sleep(0.01)
        assert parts_of(node).measure().flusher.state.value == "backing off"
        for descriptor in taken:
            os.close(descriptor)
        assert len((await node.flush()).segments) == shards
        assert (await node.snapshot("c0")).num_rows == 100

anyio.run(main)
"""


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", PRELUDE + program, *map(str, arguments)]
    # a flush that hangs fails here
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stderr


def test_a_cut_of_more_files_than_the_process_may_open_is_made_read_and_backed_up(
    tmp_path: Path,
) -> None:
    assert "flush_failed" not in run(MANY_SEGMENTS, tmp_path / "node", 64, 1, 60)


@pytest.mark.long
def test_a_cut_of_1120_segments_is_made_with_256_descriptors(tmp_path: Path) -> None:
    assert "flush_failed" not in run(MANY_SEGMENTS, tmp_path / "node", 256, 70, 16)


def test_a_flush_without_descriptors_says_so_and_succeeds_once_there_are_some(
    tmp_path: Path,
) -> None:
    assert "no file descriptor is left" in run(NONE_LEFT, tmp_path / "node", 96, 1, 4)
