"""Publishes a cut, data files first and the manifest last, and cleans up after a crash. Blocks, so
it runs in threads.

Before, all files are complete and synced under temporary names. Afterwards the checkpoint is
stored. What each crash leaves behind, and what the next start does with it:

1. While a file is written, or before it is renamed: `*.tmp`. Removed; the log is read again from
   the last checkpoint.
2. Between the renames: data files that no manifest names. Removed; the log is read again.
3. Before the manifest's rename: as 2, and the manifest's `*.tmp`. Removed as in 2.
4. After that rename, before its directory is synced: after a power cut either the manifest or its
   `*.tmp`, never half of one. As 5 or 3.
5. Before the checkpoint: the cut, and a checkpoint one cut behind. The cut is adopted: its names
   are synced again, the log up to its tick is compared with it (`check_same_cut`), no file is
   written, and the checkpoint is stored.
6. Before truncation: the cut and its checkpoint. Truncation is repeated; it is idempotent.

A cut on disk is never written again, because a reader may hold it. A disk error in the running
process leaves the same as a crash at that place, and is handled the same way.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from zlib import crc32

import msgspec

from flusher.directory import (
    CUTS,
    TEMPORARY_SUFFIX,
    Cut,
    NodeDirectory,
    cut_numbers,
    file_paths,
    manifest_path,
    read_cut,
)
from flusher.manifest import (
    DATA,
    DELETES,
    MANIFEST_FORMAT,
    SEGMENTS,
    Checkpoint,
    CutManifest,
    DeleteFile,
    SegmentFile,
    VChannelEntry,
    collection_entries,
    encode_manifest,
    manifest_crc32c,
    named_for,
)
from interceptors.shard.state import ShardState
from wal.errors import Corrupt, StorageFailed
from wal.failpoint import failpoint
from wal.files import make_directory, sync_directory, write_file


def build_manifest(
    before: Checkpoint,
    tick: int,
    files: Iterable[SegmentFile | DeleteFile],
    state: ShardState,
    *,
    node_id: str,
    created_ms: int,
) -> CutManifest:
    """Return the manifest of the cut at `tick` that follows the checkpoint's; the state is as of
    its tick.
    """
    found = sorted(files, key=lambda file: file.path)
    return CutManifest(
        format=MANIFEST_FORMAT,
        node_id=node_id,
        number=before.cut_number + 1,
        tick=tick,
        previous_tick=before.tick,
        previous_crc32c=before.manifest_crc32c,
        created_ms=created_ms,
        collections=collection_entries(
            state.catalog.collections(dropped=True), since_tick=before.tick
        ),
        vchannels=tuple(
            VChannelEntry(name=name, complete_to=tick, next_offset=next_offset)
            for name, next_offset in sorted(state.next_offsets.items())
        ),
        segments=tuple(file for file in found if isinstance(file, SegmentFile)),
        deletes=tuple(file for file in found if isinstance(file, DeleteFile)),
    )


def publish_cut(directory: NodeDirectory, manifest: CutManifest) -> Cut:
    """Rename the files to their final names and write the manifest; durable on return.

    An `OSError` leaves the same as a crash at that place.
    """
    paths = file_paths(manifest)
    for path in paths:
        failpoint("flush.file_renaming")
        directory.rename(path + TEMPORARY_SUFFIX, path)
    failpoint("flush.files_renamed")
    directory.sync_parents(paths)
    failpoint("flush.file_names_synced")
    content = encode_manifest(manifest)
    path = manifest_path(manifest.number)
    with directory.create(path + TEMPORARY_SUFFIX) as file:
        file.write(content)
        failpoint("flush.manifest_written")
        directory.sync(file)
    failpoint("flush.manifest_synced")
    directory.rename(path + TEMPORARY_SUFFIX, path)
    failpoint("flush.manifest_renamed")
    directory.sync_parents([path])
    failpoint("flush.manifest_name_synced")
    return Cut(manifest, manifest_crc32c(content))


def cut_ahead(directory: NodeDirectory, checkpoint: Checkpoint) -> Cut | None:
    """Return the cut whose checkpoint a crash prevented, or None.

    The cut is durable when this returns. Raises `Corrupt` when the cuts on disk and the checkpoint
    do not belong together.
    """
    newest = max(cut_numbers(directory), default=0)
    known = checkpoint.cut_number
    if newest not in {known, known + 1}:
        raise Corrupt(
            f"the newest cut in {directory.root / CUTS} is {newest}, the checkpoint is at {known} "
            "— restore the cuts and the log from one backup"
        )
    if newest == 0:
        return None
    cut = read_cut(directory, newest)
    if newest > known:
        # The crash may have come before the names were durable.
        directory.sync_parents([manifest_path(newest), *file_paths(cut.manifest)])
        return cut
    if cut.crc32c != checkpoint.manifest_crc32c:
        raise Corrupt(
            f"cut {newest} is not the one the checkpoint knows — restore it from a backup"
        )
    return None


def check_same_cut(
    manifest: CutManifest, before: Checkpoint, tick: int, rows: Mapping[str, int]
) -> None:
    """Raise `Corrupt` unless a cut on disk agrees with the log; `rows` has the log's number of rows
    of each path.
    """
    found = {file.path: file.rows for file in manifest.files}
    if found != rows or (manifest.tick, manifest.previous_crc32c) != (tick, before.manifest_crc32c):
        raise Corrupt(
            f"cut {manifest.number} on disk is not the cut of the log at tick {tick} — "
            "the directory mixes files of different backups; restore all of it from one"
        )


def remove_orphans(
    directory: NodeDirectory, number: int, *, segment_ids: range, ahead: Cut | None
) -> None:
    """Remove the files that the node wrote for cut `number` and the cut does not name. Idempotent.

    Files of other origin stay. `segment_ids` are those assigned since the cut before. Call it only
    while no file is in progress. Raises `OSError`.
    """
    named = frozenset() if ahead is None else frozenset(file_paths(ahead.manifest))
    for path in [path for top in (*DATA, CUTS) for path in directory.files(top)]:
        if path not in named and _is_of_cut(path, number, segment_ids):
            failpoint("recovery.orphan_removing")
            directory.remove(path)


def _is_of_cut(path: str, number: int, segment_ids: range) -> bool:
    """Whether the path is that of a data file of cut `number`, finished or temporary, or of its
    temporary manifest.
    """
    if path == manifest_path(number) + TEMPORARY_SUFFIX:
        return True
    top, owner = named_for(path.removesuffix(TEMPORARY_SUFFIX)) or ("", 0)
    return owner in segment_ids if top == SEGMENTS else (top, owner) == (DELETES, number)


# --- the earliest cut that is kept ----------------------------------------------------------------
#
# Its number, in the log store's map, is raised durably before retention removes the cuts below it.
# That distinguishes a cut that retention removed from a lost one. Files that no cut names are
# removed only when no cut is lost.

CUTS_RECORD = "cuts/"
FIRST_CUT = 1


def kept_cuts_key(pchannel: str) -> str:
    """Return the key that a pchannel's number has in the log store's map."""
    return f"{CUTS_RECORD}{pchannel}"


def decode_first_kept(content: bytes | None) -> int:
    """Return the stored number; `FIRST_CUT` when nothing was ever removed. Raises `Corrupt`."""
    if content is None:
        return FIRST_CUT
    try:
        return msgspec.msgpack.decode(content, type=int)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the number of the earliest cut kept does not decode: {error}") from error


LEASES = "leases"
LEASE_BYTES_MAX = 64 << 10
UNREADABLE = 0
"""The collection of a lease that cannot be read: it keeps the files of all collections."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """How far one table has taken one node's cuts.

    A lease may lag behind its table, which only keeps files longer, and is never ahead of it.
    """

    table: str = ""
    node_id: str
    collection_id: int
    cut: int
    tick: int = 0


def lease_path(node: Path, table: Path) -> Path:
    """Return the path of a table's lease; tables of one name in two directories have one each."""
    return node / LEASES / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"


def lease_files(directory: NodeDirectory) -> Iterator[tuple[str, Lease | str]]:
    """Yield the path of each lease file with its lease, or with the reason why it has none."""
    for path in directory.files(LEASES):
        if path.endswith(".json"):
            try:
                yield (
                    path,
                    msgspec.json.decode(
                        directory.read(path, bytes_max=LEASE_BYTES_MAX), type=Lease
                    ),
                )
            except FileNotFoundError:
                pass  # an ingest removes the lease of a dropped collection's table
            except (msgspec.DecodeError, UnicodeDecodeError, Corrupt) as error:
                yield path, str(error)


def read_leases(directory: NodeDirectory, *, node_id: str) -> list[Lease]:
    """Return the leases of this node's tables; a lease that does not decode has the collection
    `UNREADABLE`.
    """
    leases = (
        found
        if isinstance(found, Lease)
        else Lease(table=path, node_id=node_id, collection_id=UNREADABLE, cut=0)
        for path, found in lease_files(directory)
    )
    return [lease for lease in leases if lease.node_id == node_id]


def write_lease(node: Path, lease: Lease) -> None:
    """Replace the table's lease atomically; durable on return.

    The group may read the file where it may read the directory.
    """
    path = lease_path(node, Path(lease.table))
    make_directory(path.parent)
    building = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    write_file(
        building,
        msgspec.json.encode(lease) + b"\n",
        for_group=bool(path.parent.stat().st_mode & 0o040),
    )
    failpoint("ingest.lease_written")
    building.replace(path)
    failpoint("ingest.lease_renamed")
    sync_directory(path.parent)


def release(node: Path, table: Path) -> None:
    """Remove a table's lease: the table takes no more cuts of this node."""
    path = lease_path(node, table)
    with suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def check_writable(node: Path) -> None:
    """Raise `StorageFailed` where no lease can be written.

    Without the lease the node would keep the table's files for ever.
    """
    place = node / LEASES if (node / LEASES).is_dir() else node
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageFailed(
            f"an ingest writes its lease into {place}, which this user may not — run it as the "
            f"node's user, or let a group of both write to {node / LEASES}"
        )
