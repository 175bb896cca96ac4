"""What RocksDB is told: the settings that come from a file, and the others."""

from pathlib import Path

import pytest
from rocksdict import AccessType, DBRecoveryMode, Options, Rdict

from wal.rocks.layout import RocksOptions, database_options, families, open_tables_max
from wal.rocks.store import open_rocks_store


def told(path: Path, options: RocksOptions) -> set[str]:
    """Return the lines in which RocksDB writes down what it was opened with."""
    database = database_options(options, recovery=DBRecoveryMode.point_in_time(), create=True)
    whole = Rdict(
        str(path), database, column_families=families(options), access_type=AccessType.read_write()
    )
    whole.close()
    [file] = path.glob("OPTIONS-*")
    return {line.strip() for line in file.read_text().splitlines()}


def test_the_file_changes_what_it_names_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RocksOptions(memtable_bytes=8 << 20)
    with_file = told(tmp_path / "with", options)
    monkeypatch.setattr(Options, "load_latest", lambda _: (Options(raw_mode=True), {}))
    without = told(tmp_path / "without", options)
    assert with_file - without == {
        "avoid_flush_during_recovery=true",
        "keep_log_file_num=4",
        "max_log_file_size=1048576",
        "stats_dump_period_sec=0",
        "stats_persist_period_sec=0",
    }
    assert len(without - with_file) == len(with_file - without)
    assert {"paranoid_checks=true", "max_background_jobs=2"} < with_file


def test_a_full_memtable_is_written_to_a_table_only_after_the_log_was_replayed(
    tmp_path: Path,
) -> None:
    options = RocksOptions(memtable_bytes=1 << 20)
    lines = told(tmp_path / "log", options)
    assert "write_buffer_size=4194304" in lines
    assert "max_total_wal_size=2097152" in lines


@pytest.mark.parametrize(
    "open_files, tables", [(None, 256), (1 << 20, 256), (1024, 256), (256, 64), (128, 32)]
)
def test_tables_take_a_share_of_what_the_process_may_open(
    open_files: int | None, tables: int
) -> None:
    assert open_tables_max(open_files) == tables


@pytest.mark.anyio
async def test_an_open_store_has_memtables_of_the_size_it_was_given(tmp_path: Path) -> None:
    for _ in "12":
        store = await open_rocks_store(tmp_path, options=RocksOptions(memtable_bytes=1 << 20))
        await store.close()
    newest = max((tmp_path / "log").glob("OPTIONS-*"))
    sizes = [
        line.strip() for line in newest.read_text().splitlines() if "write_buffer_size=" in line
    ]
    assert [size for size in sizes if not size.startswith("db_")] == [
        "write_buffer_size=1048576"
    ] * 2
