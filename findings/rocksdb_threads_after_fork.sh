#!/bin/sh
# RocksDB keeps its threads when a database is closed, and a forked child has none of them. Linux only.
set -eu

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check rocksdict==0.3.29

cat <<'END'
RocksDB starts background threads, which flush and compact, with the first database of a process.
  They belong to the process and not to the database: they stay when that is closed. fork() copies
  the memory that says that they are there, and not the threads. A child that opens a database, or
  ends one that its parent has open, hands work to them and waits for ever, with the lock of the
  database's directory. Nothing is reported. So a child may not use RocksDB when its parent has,
  not even when the parent had closed every database before the fork.
  This script counts threads, and does not open a database in the child.
END

cat > "$work/show.py" <<'END'
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from rocksdict import Options, Rdict


def threads() -> int:
    """Return how many threads of RocksDB this process has."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("rocksdb") for name in names)


print(f"Python {platform.python_version()}, rocksdict {version('rocksdict')}", flush=True)
counts = [threads()]
database = Rdict(sys.argv[1], Options(raw_mode=True))
database[b"key"] = b"value"
counts.append(threads())
database.close()
del database
counts.append(threads())
reading, writing = os.pipe()
if not os.fork():
    os.write(writing, bytes([threads()]))
    os._exit(0)
counts.append(os.read(reading, 1)[0])
os.wait()
before, opened, closed, child = counts
print(f"threads of RocksDB: {before} at first, {opened} with a database open,")
print(f"  {closed} after it was closed, {child} in a child that is forked then")
if before or not opened or closed != opened or child:
    sys.exit("The behaviour has changed.")
END
"$work/venv/bin/python" "$work/show.py" "$work/database"
