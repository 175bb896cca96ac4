"""The lease of a table on its node: which cut it has taken, so that the node may delete what lies before.

One file per table in `<node>/leases`, written only after the commit it speaks of is on disk, replaced whole. A lease may lag
behind its table, which only keeps files longer; it never runs ahead.
"""

import os
from pathlib import Path
from zlib import crc32

import msgspec

from wal.errors import StorageFailed
from wal.files import make_directory, sync_directory, write_durably

LEASES = "leases"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one table has taken of one node."""

    table: str
    node_id: str
    collection_id: int
    cut: int
    tick: int


def lease_path(node: Path, table: Path) -> Path:
    """Return where the lease of a table lies; tables of one name in two places have a lease each."""
    return node / LEASES / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"


def write_lease(node: Path, lease: Lease) -> None:
    """Replace the table's lease; durable on return."""
    path = lease_path(node, Path(lease.table))
    make_directory(path.parent)
    write_durably(path, msgspec.json.encode(lease) + b"\n")


def check_writable(node: Path) -> None:
    """Raise `StorageFailed` where no lease could be written: a table would be ahead of a node that keeps files for ever."""
    place = node / LEASES if (node / LEASES).is_dir() else node
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageFailed(
            f"an ingest writes its lease into {place}, which this user may not — run it as the node's user, "
            f"or let a group of both write to {node / LEASES}"
        )


def release(node: Path, table: Path) -> None:
    """Give up a table's lease: it takes no more cuts of this node."""
    path = lease_path(node, table)
    if path.exists():
        path.unlink()
        sync_directory(path.parent)
