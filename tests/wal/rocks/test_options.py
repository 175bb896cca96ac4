"""What RocksDB is told: the settings that come from a file, and the others."""

from pathlib import Path

import pytest
from rocksdict import AccessType, DBRecoveryMode, Options, Rdict

from wal.rocks.options import RocksOptions, database_options, families


def told(path: Path, options: RocksOptions) -> set[str]:
    """Return the lines in which RocksDB writes down what it was opened with."""
    database = database_options(options, recovery=DBRecoveryMode.point_in_time(), create=True)
    whole = Rdict(str(path), database, column_families=families(options), access_type=AccessType.read_write())
    whole.close()
    [file] = path.glob("OPTIONS-*")
    return {line.strip() for line in file.read_text().splitlines()}


def test_the_file_changes_what_it_names_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = RocksOptions(memtable_bytes=8 << 20)
    with_file = told(tmp_path / "with", options)
    monkeypatch.setattr(Options, "load_latest", lambda _: (Options(raw_mode=True), {}))
    without = told(tmp_path / "without", options)
    assert with_file - without == {"avoid_flush_during_recovery=true"}
    assert without - with_file == {"avoid_flush_during_recovery=false"}
