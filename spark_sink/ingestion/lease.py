"""The lease of a table on its node: which cut it has taken, so that the node may delete what lies before.

One file per table in `<node>/leases`, written only after the commit it speaks of is on disk, replaced whole. A lease may lag
behind its table, which only keeps files longer; it never runs ahead.
"""

from pathlib import Path
from zlib import crc32

import msgspec

from spark_sink.ingestion.durable import make_durable_directory, write_durably
from wal.synced_names import sync_directory


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one table has taken of one node."""

    table: str
    node_id: str
    collection_id: int
    cut: int
    tick: int


def lease_path(node: Path, table: Path) -> Path:
    """Return where the lease of a table lies; tables of one name in two places have a lease each."""
    return node / "leases" / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"


def write_lease(node: Path, lease: Lease) -> None:
    """Replace the table's lease; durable on return."""
    path = lease_path(node, Path(lease.table))
    make_durable_directory(path.parent)
    write_durably(path, msgspec.json.encode(lease) + b"\n")


def release(node: Path, table: Path) -> None:
    """Give up a table's lease: it takes no more cuts of this node."""
    path = lease_path(node, table)
    if path.exists():
        path.unlink()
        sync_directory(path.parent)
