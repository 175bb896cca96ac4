"""What a cut hands to Spark: one manifest naming every file sealed since the last cut, and where files lie. No I/O here.

Two lines of text, the JSON document and its checksum, so that a person can read it and a program can tell a torn or edited
one; `docs/format.md` section "Cut manifest" is the reference.
"""

import base64
import re

import msgspec
import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo, PartitionInfo
from wal.codec import crc32c
from wal.errors import Corrupt, UnsupportedFormat

MANIFEST_FORMAT = 1

SEGMENTS, DELETES = "segments", "deletes"
"""Directories of data files; ids become paths, names never."""

_VCHANNEL = re.compile(r"[A-Za-z0-9_-]+_([0-9]+)v[0-9]+")


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows in offset order; `path` is the name the node gives it, relative to its directory; ranges are inclusive.

    `key_min` and `key_max` are None when the key type has no JSON form (everything but integers and strings).
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
    """The rows of one sealed segment: the collection's columns, then `_tick`, `_offset`, `_vchannel`."""

    segment_id: int
    partition_id: int


class DeleteFile(DataFile, frozen=True, kw_only=True):
    """The deletes of one vchannel in one cut: the key column, then `_tick`, `_offset`, `_vchannel`.

    A delete removes every row of its key whose `_offset` is smaller than the delete's.
    """


class PartitionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a collection; `dropped_tick` is 0 while it lives."""

    partition_id: int
    name: str
    dropped_tick: int = 0


class CollectionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A collection that lived at some time since the last cut; `schema` is the Arrow IPC schema in base64."""

    collection_id: int
    name: str
    schema: str
    schema_version: int
    primary_key: str
    partitions: tuple[PartitionEntry, ...]
    vchannels: tuple[str, ...]
    created_tick: int
    dropped_tick: int = 0


class VChannelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """How far one live vchannel is complete: every row at or below `complete_to` is in a file of this or an earlier cut."""

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


class _Header(msgspec.Struct):
    format: int


def encode_manifest(manifest: CutManifest) -> bytes:
    """Return the manifest's file content."""
    document = msgspec.json.encode(manifest)
    return document + b"\ncrc32c:%08x\n" % crc32c(document)


def manifest_crc32c(content: bytes) -> int:
    """Return the checksum by which the next manifest names this one."""
    return crc32c(content.partition(b"\n")[0])


def decode_manifest(content: bytes, *, name: str) -> CutManifest:
    """Return the manifest in `content`; `name` is only for errors.

    Raises `Corrupt` when the checksum or the document does not hold, or a path is not the one that the node gives such a
    file; `UnsupportedFormat` when a newer release wrote it.
    """
    document, _, trailer = content.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32c(document):
        raise Corrupt(f"cut manifest {name} fails its checksum — restore it from a backup")
    try:
        version = msgspec.json.decode(document, type=_Header).format
        if version != MANIFEST_FORMAT:
            raise UnsupportedFormat(f"cut manifest {name} has format {version}, this release reads {MANIFEST_FORMAT}")
        manifest = msgspec.json.decode(document, type=CutManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"cut manifest {name} is no manifest: {error}") from error
    _check_paths(manifest, name)
    return manifest


def segment_path(collection_id: int, segment_id: int) -> str:
    """Return the path of a segment's file, relative to the node directory."""
    return f"{SEGMENTS}/{collection_id}/{segment_id}.parquet"


def delete_path(collection_id: int, cut_number: int, vchannel: str) -> str:
    """Return the path of the file that holds the deletes of one vchannel in one cut, relative to the node directory."""
    return f"{DELETES}/{collection_id}/{cut_number:010d}-{vchannel}.parquet"


def is_vchannel(name: str, collection_id: int) -> bool:
    """Whether a shard of this collection may have that name."""
    found = _VCHANNEL.fullmatch(name)
    return found is not None and int(found[1]) == collection_id


def manifest_name(number: int) -> str:
    """Return the file name of cut `number`; names sort in cut order."""
    return f"{number:016d}.json"


def _check_paths(manifest: CutManifest, name: str) -> None:
    """Check that no file lies where this node puts none: what a manifest names is read, copied and in the end removed."""
    paths = [(file.path, segment_path(file.collection_id, file.segment_id)) for file in manifest.segments]
    for file in manifest.deletes:
        paths.append((file.path, delete_path(file.collection_id, manifest.number, file.vchannel)))
        if not is_vchannel(file.vchannel, file.collection_id):
            raise Corrupt(f"cut manifest {name} names deletes of {file.vchannel!r}, which is no vchannel of theirs")
    for found, path in paths:
        if found != path:
            raise Corrupt(f"cut manifest {name} names {found!r} where this node has {path} — restore it from a backup")


# --- collections ------------------------------------------------------------------------------------------------------


def collection_entries(infos: tuple[CollectionInfo, ...], *, since_tick: int) -> tuple[CollectionEntry, ...]:
    """Return what lived at some time after `since_tick`, collections and partitions alike, in the order of their ids."""

    def lived(dropped_tick: int) -> bool:
        return not 0 < dropped_tick <= since_tick

    return tuple(
        CollectionEntry(
            collection_id=info.id,
            name=info.name,
            schema=base64.b64encode(info.schema).decode(),
            schema_version=info.schema_version,
            primary_key=info.primary_key,
            partitions=tuple(
                PartitionEntry(partition_id=each.id, name=each.name, dropped_tick=each.dropped_tick)
                for each in info.partitions
                if lived(each.dropped_tick)
            ),
            vchannels=info.vchannels,
            created_tick=info.created_tick,
            dropped_tick=info.dropped_tick,
        )
        for info in infos
        if lived(info.dropped_tick)
    )


def arrow_schema(info: CollectionInfo) -> pa.Schema:
    """Return the Arrow schema of a collection. Raises `Corrupt` when it is none."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(info.schema))
    except (pa.ArrowException, OSError) as error:
        raise Corrupt(f"the schema of collection {info.name} does not decode: {error}") from error


def collection_info(entry: CollectionEntry) -> CollectionInfo:
    """Return a collection as the shard state had it when the manifest was made."""
    return CollectionInfo(
        id=entry.collection_id,
        name=entry.name,
        schema=base64.b64decode(entry.schema),
        schema_version=entry.schema_version,
        primary_key=entry.primary_key,
        vchannels=entry.vchannels,
        partitions=tuple(
            PartitionInfo(each.partition_id, each.name, entry.created_tick, each.dropped_tick)
            for each in entry.partitions
        ),
        created_tick=entry.created_tick,
        dropped_tick=entry.dropped_tick,
    )
