"""Makes a cut visible, data files first, the manifest last, and sorts out what a crash left.
Blocks, so it runs in threads.

The files are complete and synced under temporary names before, and the checkpoint follows. What
each crash leaves behind, and what the next start makes of it:

1. While a file is written, or before it is renamed: `*.tmp`. Removed; the log is read again from
   the last checkpoint.
2. Between the renames: data files no manifest names. Removed, and read again.
3. Before the manifest's rename: as 2, and the manifest's `*.tmp`. The same.
4. After that rename, before its directory is synced: after a power cut either the manifest or its
   `*.tmp`, never half of one. As 3, or as 5.
5. Before the checkpoint: the cut, and a checkpoint one cut behind. The cut is adopted: its names
   are synced once more, the log up to its tick is read again and compared with it
   (`check_same_cut`), no file is written, the checkpoint follows.
6. Before truncation: everything. Truncation is tried again, and is idempotent.

A cut on disk is never written again: a reader may hold it. A disk error in the running process
leaves what a crash at the same place leaves, and is treated the same.
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
    """Give the files their names and write the manifest; durable on return. An `OSError` is as a
    crash at that place.
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
    """Return the cut that was published when a crash kept its checkpoint from following; None when
    there is none.

    It is durable when this returns. Raises `Corrupt` when the cuts on disk and the checkpoint do
    not belong together.
    """
    newest = max(cut_numbers(directory), default=0)
    known = checkpoint.cut_number
    if newest not in {known, known + 1}:
        raise Corrupt(
            f"the newest cut in {directory.root / CUTS} is {newest}, the checkpoint is at {known} "
            "— "
            "restore the cuts and the log from one backup"
        )
    if newest == 0:
        return None
    cut = read_cut(directory, newest)
    if newest > known:
        # The names are there, but what kept the checkpoint back may have come before they were
        # durable.
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
    """Raise `Corrupt` unless a cut on disk is the one the log tells; `rows` counts what the log has
    for each path.
    """
    found = {file.path: file.rows for file in manifest.files}
    if found != rows or (manifest.tick, manifest.previous_crc32c) != (tick, before.manifest_crc32c):
        raise Corrupt(
            f"cut {manifest.number} on disk is not the cut the log tells at tick {tick} — "
            "the directory mixes files of different backups; restore all of it from one"
        )


def remove_orphans(
    directory: NodeDirectory, number: int, *, segment_ids: range, ahead: Cut | None
) -> None:
    """Remove what was written for cut `number` and is not named by it, nothing that anybody else
    put there. Idempotent.

    `segment_ids` are those given since the cut before it. Only while no file is in progress. Raises
    `OSError`.
    """
    named = frozenset() if ahead is None else frozenset(file_paths(ahead.manifest))
    for path in [path for top in (*DATA, CUTS) for path in directory.files(top)]:
        if path not in named and _is_of_cut(path, number, segment_ids):
            failpoint("recovery.orphan_removing")
            directory.remove(path)


def _is_of_cut(path: str, number: int, segment_ids: range) -> bool:
    """Whether the node gives this path to a file of cut `number`, or to one in the making; not to
    its manifest.
    """
    if path == manifest_path(number) + TEMPORARY_SUFFIX:
        return True
    top, owner = named_for(path.removesuffix(TEMPORARY_SUFFIX)) or ("", 0)
    return owner in segment_ids if top == SEGMENTS else (top, owner) == (DELETES, number)


# --- the earliest cut that is kept ----------------------------------------------------------------
#
# Its number, in the log store's map, goes up durably before retention removes the cuts below it. So
# a cut that retention took is told from one that is lost; whatever no cut names any more is only
# removed when none is lost.

CUTS_RECORD = "cuts/"
FIRST_CUT = 1


def kept_cuts_key(pchannel: str) -> str:
    """Return the key that a pchannel's number has in the log store's map."""
    return f"{CUTS_RECORD}{pchannel}"


def decode_first_kept(content: bytes | None) -> int:
    """Return a stored number, that of the first cut when nothing was ever removed. Raises `Corrupt`
    for other bytes.
    """
    if content is None:
        return FIRST_CUT
    try:
        return msgspec.msgpack.decode(content, type=int)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the number of the earliest cut kept does not decode: {error}") from error


LEASES = "leases"
LEASE_BYTES_MAX = 64 << 10
UNREADABLE = 0
"""The collection of a lease that cannot be read: all of them, so it holds everything."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one table has taken of one node; it may lag behind the table, which keeps files longer,
    and is never ahead.
    """

    table: str = ""
    node_id: str
    collection_id: int
    cut: int
    tick: int = 0


def lease_path(node: Path, table: Path) -> Path:
    """Return where the lease of a table lies; tables of one name in two places have a lease
    each.
    """
    return node / LEASES / f"{table.name}-{crc32(str(table.resolve().parent).encode()):08x}.json"


def lease_files(directory: NodeDirectory) -> Iterator[tuple[str, Lease | str]]:
    """Yield the path of each lease file, and its lease, or why it holds none."""
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
                pass  # an ingest gives up the lease of a dropped collection's table
            except (msgspec.DecodeError, UnicodeDecodeError, Corrupt) as error:
                yield path, str(error)


def read_leases(directory: NodeDirectory, *, node_id: str) -> list[Lease]:
    """Return the leases of tables fed from this node, and one of `UNREADABLE` in place of each that
    does not decode.
    """
    leases = (
        found
        if isinstance(found, Lease)
        else Lease(table=path, node_id=node_id, collection_id=UNREADABLE, cut=0)
        for path, found in lease_files(directory)
    )
    return [lease for lease in leases if lease.node_id == node_id]


def write_lease(node: Path, lease: Lease) -> None:
    """Replace the table's lease, whole; durable on return. The group may read it where it may read
    the directory.
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
    """Give up a table's lease: it takes no more cuts of this node."""
    path = lease_path(node, table)
    with suppress(FileNotFoundError):
        path.unlink()
        sync_directory(path.parent)


def check_writable(node: Path) -> None:
    """Raise `StorageFailed` where no lease could be written: a table would be ahead of a node that
    keeps files for ever.
    """
    place = node / LEASES if (node / LEASES).is_dir() else node
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageFailed(
            f"an ingest writes its lease into {place}, which this user may not — run it as the "
            "node's user, "
            f"or let a group of both write to {node / LEASES}"
        )
