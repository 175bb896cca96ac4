"""The exact texts of RocksDB's errors, provoked, so that a release which words them differently is
noticed.
"""

import shutil
from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from wal.errors import (
    AlreadyOwned,
    Corrupt,
    OnShutdown,
    Overloaded,
    StorageFailed,
    StorageFull,
    StreamingNodeError,
)
from wal.rocks.database import classify_failure


def options(*, create: bool) -> Options:
    settings = Options(raw_mode=True)
    settings.create_if_missing(create)
    return settings


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "db"
    opened = Rdict(str(path), options(create=True))
    opened.put(b"k", b"v")
    opened.close()
    return path


def failure_of_open(path: Path) -> StreamingNodeError:
    with pytest.raises(Exception, match=r".") as failure:
        Rdict(str(path), options(create=False))
    return classify_failure(failure.value, path)


def test_a_database_that_is_open_already_is_owned(database: Path) -> None:
    opened = Rdict(str(database), options(create=False))
    assert isinstance(failure_of_open(database), AlreadyOwned)
    opened.close()


def test_a_closed_database_is_shut_down(database: Path) -> None:
    opened = Rdict(str(database), options(create=False))
    opened.close()
    with pytest.raises(Exception, match=r".") as failure:
        opened.get(b"k")
    assert isinstance(classify_failure(failure.value, database), OnShutdown)


@pytest.mark.parametrize("pattern", ["*.sst", "CURRENT", "MANIFEST-*"])
@pytest.mark.parametrize("damage", ["deleted", "emptied"])
def test_a_missing_or_empty_file_is_corrupt(database: Path, pattern: str, damage: str) -> None:
    [file] = database.glob(pattern)
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes(b"")
    error = failure_of_open(database)
    assert isinstance(error, Corrupt), error


def test_a_directory_that_is_no_database_is_corrupt(database: Path) -> None:
    shutil.rmtree(database)
    database.mkdir()
    assert isinstance(failure_of_open(database), Corrupt)


@pytest.mark.parametrize(
    "text, kind, advice",
    [
        (
            "IO error: No space left on device: While appending to file: x.log: No space left",
            StorageFull,
            "free space",
        ),
        (
            "IO error: While open a file for appending: x: Read-only file system",
            StorageFailed,
            "make it writable",
        ),
        (
            "IO error: While open a file for appending: x: Permission denied",
            StorageFailed,
            "make it writable",
        ),
        ("IO error: While fdatasync: x.log: Input/output error", StorageFailed, "check the disk"),
        (
            "IO error: While lock file: x/LOCK: Resource temporarily unavailable",
            AlreadyOwned,
            "stop that process",
        ),
        (
            "IO error: While open a file for random read: x/000009.sst: Too many open files",
            Overloaded,
            "ulimit -n",
        ),
        ("Corruption: block checksum mismatch: stored = 1, computed = 2", Corrupt, "damaged"),
    ],
)
def test_a_text_becomes_an_error_with_a_next_step(
    tmp_path: Path, text: str, kind: type[Exception], advice: str
) -> None:
    error = classify_failure(Exception(text), tmp_path)
    assert type(error) is kind
    assert advice in str(error)
