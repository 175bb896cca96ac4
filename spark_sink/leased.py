"""Opens the table that a lease names, and checks that it holds this node's own cuts of the
collection.

Snapshots and the data source read rows from there whose cuts the node has removed. The lease's path
is the only path outside the node's directory that is followed.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flusher.cuts import Lease, read_leases
from flusher.directory import CutLog
from spark_sink.errors import PackageMissing
from wal.errors import Corrupt, StorageFailed

if TYPE_CHECKING:
    from spark_sink.table import CommitNote, OpenTable


def leases_of(cuts: CutLog, collection_id: int) -> list[Lease]:
    """Return the leases of a collection's tables, newest cut first.

    Among leases at the same cut, one whose table exists comes first: its user can repair it.
    """
    found = read_leases(cuts.directory, node_id=cuts.node_id)
    leases = [lease for lease in found if lease.collection_id == collection_id]
    leases.sort(key=lambda lease: (lease.cut, Path(lease.table).exists()), reverse=True)
    return leases


def open_leased(lease: Lease) -> "OpenTable":
    """Return the table that a lease names.

    Raises `PackageMissing` without `deltalake`, `StorageFailed` when the table is missing,
    `Corrupt` when it cannot be opened.
    """
    if find_spec("deltalake") is None:
        raise PackageMissing("deltalake", "tables")
    from deltalake.exceptions import DeltaError

    from spark_sink.table import OpenTable

    path = Path(lease.table)
    try:
        table = OpenTable.load(path) if path.is_absolute() else None
    except (DeltaError, OSError) as error:
        raise Corrupt(f"table {lease.table} cannot be opened: {error} — restore it") from error
    if table is None:
        raise StorageFailed(
            f"rows up to cut {lease.cut} are in table {lease.table}, which is not there — "
            f"{put_back(lease)}"
        )
    return table


def check_own(cuts: CutLog, lease: Lease, note: "CommitNote") -> None:
    """Check that a version is the collection's state at this node's own cut. Raises `Corrupt`."""
    if not cuts.is_known(note.cut):
        cuts.look()
    is_of_collection = (note.node_id, note.collection_id) == (lease.node_id, lease.collection_id)
    if not is_of_collection or cuts.crc32c_of(note.cut) not in {None, note.crc32c}:
        raise Corrupt(
            f"table {lease.table} is of another node, collection or history at cut {note.cut} — "
            f"{put_back(lease)}"
        )


def put_back(lease: Lease) -> str:
    """Return the next step for a table that cannot be used."""
    return (
        "put it back, or run an ingest into the directory where it is now; if the table is lost, "
        f"remove the file in leases/ that names {lease.table}"
    )
