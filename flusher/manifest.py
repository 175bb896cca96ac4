"""The two records of a cut: a manifest that names every file sealed since the last cut, and a
checkpoint for the restart. Pure.

A manifest is two lines of text, the JSON document and its checksum: a person can read it, and a
program detects a torn or edited one. `docs/format.md` is the reference.
"""

import re

import msgspec
import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo, PartitionInfo
from interceptors.shard.state import ShardState
from wal.codec import crc32c, decode_versioned
from wal.errors import Corrupt
from wal.position import FIRST_POSITION
from wal.timetick import physical_ms

MANIFEST_FORMAT = 1

DATA = SEGMENTS, DELETES = "segments", "deletes"
"""Directories of data files. Paths are made of ids, never of names."""

_SEGMENT_NAME = re.compile(r"segments/([1-9][0-9]*)/([1-9][0-9]*)\.parquet")
_DELETES_NAME = re.compile(r"deletes/([1-9][0-9]*)/([0-9]{10,})-[A-Za-z0-9_-]+_\1v[0-9]+\.parquet")

TICK = "_tick"
OFFSET = "_offset"
VCHANNEL = "_vchannel"
"""Columns of every data file, after those of its messages."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows in offset order. `path` is relative to the node directory; ranges are
    inclusive.

    `key_min` and `key_max` are None when the key type has no JSON form (everything but integers and
    strings).
    """

    path: str
    bytes: int
    crc32c: int
    rows: int
    collection_id: int
    vchannel: str
    tick_min: int
    tick_max: int
    offset_min: int
    offset_max: int
    key_min: int | str | None
    key_max: int | str | None


class SegmentFile(DataFile, frozen=True, kw_only=True):
    """The rows of one sealed segment: the collection's columns, then `_tick`, `_offset`,
    `_vchannel`.
    """

    segment_id: int
    partition_id: int


class DeleteFile(DataFile, frozen=True, kw_only=True):
    """The deletes of one vchannel in one cut: the key column, then `_tick`, `_offset`, `_vchannel`.

    A delete removes every row of its key whose `_offset` is smaller than the delete's.
    """


class PartitionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a collection; `dropped_tick` is 0 until it is dropped."""

    partition_id: int
    name: str
    dropped_tick: int = 0


class CollectionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A collection that existed at some time since the last cut. `schema` is the Arrow IPC schema,
    base64 in JSON.
    """

    collection_id: int
    name: str
    schema: bytes
    schema_version: int
    primary_key: str
    partitions: tuple[PartitionEntry, ...]
    vchannels: tuple[str, ...]
    created_tick: int
    dropped_tick: int = 0


class VChannelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How far one live vchannel is complete: every row at or below `complete_to` is in a file of
    this or an earlier cut.
    """

    name: str
    complete_to: int
    next_offset: int


class CutManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One cut: the tick it fences, and the files sealed since the cut before it."""

    format: int
    node_id: str
    number: int
    tick: int
    previous_tick: int
    previous_crc32c: int
    created_ms: int
    collections: tuple[CollectionEntry, ...]
    vchannels: tuple[VChannelEntry, ...]
    segments: tuple[SegmentFile, ...]
    deletes: tuple[DeleteFile, ...]

    @property
    def files(self) -> tuple[SegmentFile | DeleteFile, ...]:
        """All files the cut names."""
        return (*self.segments, *self.deletes)


def with_checksum(document: bytes) -> bytes:
    """Return a JSON document followed by a line with its checksum."""
    return document + b"\ncrc32c:%08x\n" % crc32c(document)


def checked_document(content: bytes, name: str, *, step: str = "restore it from a backup") -> bytes:
    """Return the document without its checksum line. Raises `Corrupt` when they do not agree."""
    document, _, trailer = content.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32c(document):
        raise Corrupt(f"{name} fails its checksum — {step}")
    return document


def encode_manifest(manifest: CutManifest) -> bytes:
    """Return the manifest's file content."""
    return with_checksum(msgspec.json.encode(manifest))


def manifest_crc32c(content: bytes) -> int:
    """Return the checksum of this manifest, which the next manifest carries."""
    return crc32c(content.partition(b"\n")[0])


def decode_manifest(content: bytes, *, name: str) -> CutManifest:
    """Return the manifest in `content`; `name` is only for errors. Raises `Corrupt`,
    `UnsupportedFormat`.
    """
    what = f"cut manifest {name}"
    document = checked_document(content, what)
    manifest = decode_versioned(
        document, CutManifest, MANIFEST_FORMAT, what, decode=msgspec.json.decode
    )
    for file in manifest.files:
        if isinstance(file, SegmentFile):
            path = segment_path(file.collection_id, file.segment_id)
        else:
            path = delete_path(file.collection_id, manifest.number, file.vchannel)
        # Files of a manifest are read, copied and removed, so a path must be one that this node
        # gives.
        if file.path != path or named_for(path) is None:
            raise Corrupt(
                f"{what} names {file.path!r}, where this node has no such file — restore it from a "
                "backup"
            )
    return manifest


def segment_path(collection_id: int, segment_id: int) -> str:
    """Return the path of a segment's file, relative to the node directory."""
    return f"{SEGMENTS}/{collection_id}/{segment_id}.parquet"


def delete_path(collection_id: int, cut_number: int, vchannel: str) -> str:
    """Return the path of the file that holds the deletes of one vchannel in one cut, relative to
    the node directory.
    """
    return f"{DELETES}/{collection_id}/{cut_number:010d}-{vchannel}.parquet"


def named_for(path: str) -> tuple[str, int] | None:
    """Return (`SEGMENTS`, segment id) or (`DELETES`, cut number) of a data file's path; None for
    other paths.
    """
    found = _SEGMENT_NAME.fullmatch(path) or _DELETES_NAME.fullmatch(path)
    return found and (path.partition("/")[0], int(found[2]))


def collection_entries(
    infos: tuple[CollectionInfo, ...], *, since_tick: int
) -> tuple[CollectionEntry, ...]:
    """Return the collections and partitions that existed after `since_tick`, in the order of their
    ids.
    """
    earlier = range(1, since_tick + 1)  # drops that an earlier cut has
    return tuple(_entry(info, earlier) for info in infos if info.dropped_tick not in earlier)


def _entry(info: CollectionInfo, earlier: range) -> CollectionEntry:
    kept = [each for each in info.partitions if each.dropped_tick not in earlier]
    partitions = tuple(
        PartitionEntry(partition_id=p.id, name=p.name, dropped_tick=p.dropped_tick) for p in kept
    )
    fields = msgspec.structs.asdict(info) | {"partitions": partitions}
    return CollectionEntry(collection_id=fields.pop("id"), **fields)


def arrow_schema(info: CollectionInfo | CollectionEntry) -> pa.Schema:
    """Return the Arrow schema of a collection. Raises `Corrupt` when it does not decode."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(info.schema))
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"the schema of collection {info.name} does not decode: {error}") from error


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a file: those of the messages, then `_tick`, `_offset`, `_vchannel`."""
    system = [
        pa.field(TICK, pa.int64()),
        pa.field(OFFSET, pa.int64()),
        pa.field(VCHANNEL, pa.string()),
    ]
    return pa.schema([*schema, *system])


def collection_info(entry: CollectionEntry) -> CollectionInfo:
    """Return the collection as it was in the shard state when the manifest was made."""
    born = entry.created_tick
    partitions = tuple(
        PartitionInfo(p.partition_id, p.name, born, p.dropped_tick) for p in entry.partitions
    )
    fields = msgspec.structs.asdict(entry) | {"partitions": partitions}
    return CollectionInfo(id=fields.pop("collection_id"), **fields)


CHECKPOINT_FORMAT = 2

HISTORY_STEPS = 256
"""The minimum retention divided by this is the history's resolution: 5.6 minutes for a day."""


class CutPosition(msgspec.Struct, frozen=True, array_like=True):
    """A cut's tick, the position where a reader resumes after it, and the latest time at which it
    was made, in Unix ms.
    """

    tick: int
    position: int
    made_ms: int

    def age_ms(self, now_ms: int) -> int:
        """Return the least age that the cut can have, in ms.

        The tick has the time, unless it is ahead of the clock. Then `made_ms` counts, and when that
        is ahead as well, the age is 0.
        """
        tick_ms = physical_ms(self.tick)
        if tick_ms > now_ms:
            return max(0, now_ms - self.made_ms)
        return now_ms - tick_ms


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything at or below `tick` is in files, `shard_state` and `producers`; the rest is read
    from `position`.

    The cut's manifest and all its files are on disk before the checkpoint. `position` is the
    last-confirmed position of the cut, so it may precede entries at or below `tick`. Number 0 and
    position 0 mean that there is no cut yet. `history` has earlier cuts, for retention.
    """

    format: int = CHECKPOINT_FORMAT
    cut_number: int = 0
    tick: int = 0
    position: int = 0
    manifest_crc32c: int = 0
    history: tuple[CutPosition, ...] = ()
    shard_state: bytes | None = None
    producers: bytes | None = None

    @property
    def start_position(self) -> int:
        """Where a reader of entries that are not in files starts; a truncated log refuses it."""
        return self.position or FIRST_POSITION

    def state(self) -> ShardState:
        """Return the state of the shards as of its tick."""
        return ShardState() if self.shard_state is None else ShardState.restore(self.shard_state)


NO_CHECKPOINT = Checkpoint()


def checkpoint_key(pchannel: str) -> str:
    """Return the key a pchannel's checkpoint has in the log store's map."""
    return f"checkpoint/{pchannel}"


def decode_checkpoint(content: bytes | None) -> Checkpoint:
    """Return a stored checkpoint; `NO_CHECKPOINT` when there is none. Raises `Corrupt`,
    `UnsupportedFormat`.
    """
    if content is None:
        return NO_CHECKPOINT
    return decode_versioned(content, Checkpoint, CHECKPOINT_FORMAT, "the checkpoint")


def extend_history(
    history: tuple[CutPosition, ...], step: CutPosition, *, now_ms: int, retention_ms: int
) -> tuple[CutPosition, ...]:
    """Return the history with a new cut, thinned to its resolution, without cuts that are too old.

    Of the cuts older than the retention the newest stays: it is the bound of truncation. Of three
    neighbours the outer two are at least one step of the resolution apart, so at most about twice
    `HISTORY_STEPS` cuts are kept.
    """
    grain_ms = retention_ms // HISTORY_STEPS
    # A cut is not younger than a later one, whatever the clock said then.
    kept = [msgspec.structs.replace(cut, made_ms=min(cut.made_ms, step.made_ms)) for cut in history]
    if len(kept) > 1 and kept[-2].age_ms(now_ms) - step.age_ms(now_ms) < grain_ms:
        kept.pop()
    kept.append(step)
    newest_expired = max(
        (index for index, cut in enumerate(kept) if cut.age_ms(now_ms) >= retention_ms), default=0
    )
    return tuple(kept[newest_expired:])
