"""Opening a database without owning it, and without leaving a trace in its directory. Blocks.

RocksDB writes nothing when it opens read-only. rocksdict does: it makes the directory if there is none, and writes its own
settings file anew each time. A look must neither break what the next opening would have finished nor mend what a second
look should find.
"""

from pathlib import Path

from rocksdict import AccessType, DBRecoveryMode, Rdict

from wal.errors import Corrupt
from wal.rocks.database import classify_failure
from wal.rocks.layout import RocksOptions, database_options, families
from wal.rocks.recovery import check_framing

SETTINGS_NAME = "rocksdict-config.json"


def open_read_only(path: Path, recovery: DBRecoveryMode) -> Rdict:
    """Open a database without changing it.

    Raises `Corrupt` when there is none, and what `classify_failure` makes of RocksDB's errors.
    """
    if not (path / "CURRENT").is_file():
        raise Corrupt(f"{path} holds no database — run: streamingnode verify {path.parent}")
    check_framing(path)
    options = RocksOptions()
    settings = database_options(options, recovery=recovery)
    try:
        before = read_settings(path)
        try:
            return Rdict(str(path), settings, column_families=families(options), access_type=AccessType.read_only())
        finally:
            _put_back(path, before)
    except Exception as error:
        raise classify_failure(error, path) from error


def open_past_damage(path: Path) -> Rdict:
    """Open a damaged database with as much of its log as RocksDB reads: what is behind damage too, if it gets there.

    Raises as `open_read_only`.
    """
    try:
        return open_read_only(path, DBRecoveryMode.skip_any_corrupted_record())
    except Corrupt:
        return open_read_only(path, DBRecoveryMode.point_in_time())


def read_settings(path: Path) -> bytes | None:
    """Return rocksdict's settings file of a database as it is, None when there is none. Raises `OSError`."""
    try:
        return (path / SETTINGS_NAME).read_bytes()
    except FileNotFoundError:
        return None


def _put_back(path: Path, before: bytes | None) -> None:
    if read_settings(path) == before:
        return
    if before is None:
        (path / SETTINGS_NAME).unlink()
    else:
        (path / SETTINGS_NAME).write_bytes(before)
