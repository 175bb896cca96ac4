"""Numbers of RocksDB's files, apart from those that an owner before may still give out. Blocks.

RocksDB names its files by one ascending number, and goes on from the highest it finds recorded or in use by a log. An owner
that no lock keeps out, stopped in the middle of a flush and going on later, gives out the same numbers: it would write into
tables of the new owner, and into its own log files' place. An empty log file with a number far above makes RocksDB begin
there. It holds nothing, so a crash that leaves it, or a power cut that takes it, changes nothing.
"""

import re
from pathlib import Path

NUMBERS_APART = 1_000
"""More files than an owner makes that is fenced at its next write: what its two background threads have begun, and a few."""

_NUMBERED = re.compile(r"(?:MANIFEST-|OPTIONS-)?(\d+)(?:\.(?:log|sst|blob|dbtmp))?")


def keep_numbers_apart(database: Path) -> None:
    """Make RocksDB's next open of a database number its files far above all that are there. Raises `OSError`."""
    numbers = [int(match[1]) for path in database.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    (database / f"{max(numbers, default=0) + NUMBERS_APART:06d}.log").touch()
