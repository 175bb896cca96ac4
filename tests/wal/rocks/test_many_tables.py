"""A log of many tables in a process that may open few files."""

import subprocess
import sys
from pathlib import Path

OPEN_FILES = 128
"""What the process may open: fewer than RocksDB would have tables open of itself."""
TABLES = 600

PROGRAM = """
import resource, sys
from pathlib import Path
import anyio
from tests.wal.log_contract import stamped_pack
from wal.rocks.layout import RocksOptions
from wal.rocks.store import open_rocks_store

path, open_files, tables = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
options = RocksOptions(memtable_bytes=1 << 16, durability="os", free_bytes_min=0)

def count() -> int:
    return len(list(path.glob("log/*.sst")))

async def main() -> None:
    written = 0
    store = await open_rocks_store(path, options=options)
    log = await store.open_log("p0")
    while count() < tables:
        for _ in range(50):
            await log.append(stamped_pack(b"x" * 30_000)).written
        written += 50
    await store.state.put({"k": b"v"})
    await store.close()
    store = await open_rocks_store(path, options=options)
    log = await store.open_log("p0")
    found, position = 0, log.first_position
    while position < log.next_position:
        entries = await log.read(position, bytes_max=1 << 20)
        found += len(entries)
        position = entries[-1].last_position + 1
    await store.close()
    assert found == written, (found, written)

anyio.run(main)
"""


def test_a_log_of_more_tables_than_the_process_may_open_is_written_opened_and_read(
    tmp_path: Path,
) -> None:
    arguments = [str(tmp_path / "node"), str(OPEN_FILES), str(TABLES)]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
