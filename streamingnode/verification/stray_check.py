"""What lies in a node directory besides what the node put there: left-overs, files of others, leases. Blocks.

Nothing here is damage but a lease that is ahead of the node: its table has taken cuts the node never made, so the node is an
older copy of what fed it.
"""

import re
from pathlib import Path

import msgspec

from flusher.cut_log import CUTS, cut_numbers
from flusher.directory import NodeDirectory
from flusher.retention import LEASE_BYTES_MAX, SET_ASIDE_SUFFIX
from spark_sink.commit import Lease, lease_path
from streamingnode.verification.creation_check import UNFINISHED_NAME, is_unfinished_creation
from streamingnode.verification.cut_walk import named_paths
from streamingnode.verification.finding import Kind, Report, Severity
from wal.errors import Corrupt
from wal.files import LOCK_NAME
from wal.rocks.floor import FLOOR_NAME
from wal.rocks.layout import DATABASE_NAME
from wal.rocks.opening import BACKUP_RECORD_NAME

DATA, LEASES = ("segments", "deletes"), "leases"
TEMPORARY = ".tmp"
_KNOWN = frozenset({LOCK_NAME, FLOOR_NAME, DATABASE_NAME, CUTS, *DATA, LEASES, BACKUP_RECORD_NAME})
_SOCKET_OR_RESERVE = re.compile(r"node\.[a-z]+|reserve|scrub\.json")
"""Files a running or an earlier owner keeps beside its data; `scrub.json` is from owners that verified by themselves."""
_MANIFEST = re.compile(r"\d{16}\.json")

_STARTS = "nothing to do: the node removes it when it starts, if it wrote it"
_INGEST = "run `streamingnode ingest` for each table, which writes it again; then remove what is left over"
_MOVE = "move it away"


def check_strays(directory: Path, report: Report, *, running: bool = False) -> None:
    """Look for what nothing names. Of a running node only what it cannot be about to name.

    While the cuts are damaged, as `report` has it, nobody knows what they named.
    """
    for path in sorted(directory.iterdir()):
        if path.name in _KNOWN or _SOCKET_OR_RESERVE.fullmatch(path.name):
            continue
        if path.name.endswith(TEMPORARY) and running:
            continue
        if path.name == UNFINISHED_NAME and is_unfinished_creation(directory):
            continue  # which is a finding of its own
        if path.name.endswith(TEMPORARY):
            report.warn(Kind.ORPHAN, path.name, "temporary, and never finished", _MOVE)
        else:
            report.warn(Kind.FOREIGN, path.name, "is none of a node's", _MOVE)
    for path in sorted((directory / CUTS).glob("*")):
        if not _MANIFEST.fullmatch(path.name) and not (running and path.name.endswith((TEMPORARY, SET_ASIDE_SUFFIX))):
            _stray(directory, path, report)
    cuts_damaged = any(found.severity is Severity.DAMAGE and found.place.startswith(CUTS) for found in report.findings)
    if not running and not cuts_damaged:
        _check_data(directory, report)


def check_leases(directory: Path, node_id: str, report: Report) -> None:
    """Look at what tables say they have taken."""
    for path in sorted((directory / LEASES).glob("*")):
        place = f"{LEASES}/{path.name}"
        if path.suffix != ".json":
            _stray(directory, path, report)
            continue
        report.count("leases")
        try:
            lease = msgspec.json.decode(NodeDirectory(directory).read(place, bytes_max=LEASE_BYTES_MAX), type=Lease)
        except FileNotFoundError:
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, Corrupt) as error:
            detail = f"does not decode, and holds all retention until it does: {error}"
            report.warn(Kind.CHECKSUM, place, detail, _INGEST)
            continue
        _check_lease(lease, place, node_id, directory, report)


def _check_lease(lease: Lease, place: str, node_id: str, directory: Path, report: Report) -> None:
    newest = max(cut_numbers(directory), default=0)  # listed after the lease was read, which may be of a cut just made
    if lease_path(directory, Path(lease.table)).name != Path(place).name:
        report.warn(Kind.MIXED, place, f"is of table {lease.table}: it was swapped or copied", _INGEST)
    if node_id and lease.node_id != node_id:
        report.warn(Kind.FOREIGN, place, f"is of node {lease.node_id}; it holds nothing here", _MOVE)
    elif lease.cut > newest:
        detail = (
            f"table {lease.table} has taken cut {lease.cut}, the node's newest is {newest}: the node is an older copy"
        )
        report.damage(Kind.AHEAD, place, detail, "restore a newer backup, or move the table away and ingest again")


def _check_data(directory: Path, report: Report) -> None:
    named = named_paths(directory)
    for top in DATA:
        for path in sorted((directory / top).rglob("*")):
            if not path.is_file():
                continue
            place = path.relative_to(directory).as_posix()
            if path.suffix != ".parquet":
                _stray(directory, path, report)
            elif named is not None and place not in named:
                report.warn(Kind.ORPHAN, place, "no cut names it: a crash before its cut, or somebody else's", _STARTS)


def _stray(directory: Path, path: Path, report: Report) -> None:
    place = path.relative_to(directory).as_posix()
    if path.name.endswith(TEMPORARY):
        report.warn(Kind.ORPHAN, place, "a temporary file that was never finished", _STARTS)
    elif path.name.endswith(SET_ASIDE_SUFFIX):
        report.warn(Kind.ORPHAN, place, "retention was removing this cut and its files", _STARTS)
    else:
        report.warn(Kind.FOREIGN, place, "is none of a node's", _MOVE)
