"""Files of two owners of one directory never have one name."""

from pathlib import Path

import pytest

from tests.wal.log_contract import stamped_group
from wal.rocks.file_numbers import NUMBERS_APART, keep_numbers_apart
from wal.rocks.options import DATABASE_NAME, RocksOptions
from wal.rocks.store import open_rocks_store

pytestmark = pytest.mark.anyio


def numbers(directory: Path) -> set[int]:
    return {int(path.stem) for path in (directory / DATABASE_NAME).iterdir() if path.suffix in {".sst", ".log"}}


async def test_each_owner_numbers_its_files_far_above_those_of_the_one_before(tmp_path: Path) -> None:
    highest = 0
    for opening in range(3):
        store = await open_rocks_store(tmp_path / "node", options=RocksOptions(free_bytes_min=0))
        log = await store.open_log("p0")
        await log.append(stamped_group(b"row", tick=log.last_tick + 1)).durable
        assert max(numbers(tmp_path / "node")) >= highest + (NUMBERS_APART if opening else 0)
        highest = max(numbers(tmp_path / "node"))
        assert len(await log.read(log.first_position, bytes_max=1 << 20)) == opening + 1
        await store.close()


def test_the_next_number_is_above_every_kind_of_numbered_file_and_other_names_do_not_count(tmp_path: Path) -> None:
    for name in (
        "000007.log",
        "MANIFEST-000031",
        "OPTIONS-000029",
        "000012.sst",
        "LOG.old.1795241283621242",
        "CURRENT",
    ):
        (tmp_path / name).touch()
    keep_numbers_apart(tmp_path)
    assert (tmp_path / f"{31 + NUMBERS_APART:06d}.log").stat().st_size == 0
