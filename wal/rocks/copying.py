"""A copy of an open database that costs no copying: hard links to its tables, as of one moment. Reader thread."""

from pathlib import Path

from rocksdict import Checkpoint

from wal.rocks.engine import Engine


def link_database(engine: Engine, target: Path) -> None:
    """Make a database at `target`, on the same disk, with everything written so far; it does not change any more.

    Its tables are hard links, so a flipped bit of the original is in both: copy the bytes before calling it a backup.
    """
    # Flushing first lets the event loop run; what the checkpoint itself flushes while it does not is then next to nothing.
    engine.entries.flush()
    engine.database.flush()
    Checkpoint(engine.database).create_checkpoint(str(target))
