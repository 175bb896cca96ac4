"""Definitions of collections and partitions made into append groups: one message per vchannel, all at one tick. No I/O."""

import reprlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa

from interceptors.errors import AlreadyExists
from interceptors.shard.catalog import CollectionInfo
from streamingnode.names import DEFAULT_PARTITION, check_name
from streamingnode.rows.routing import SHARDS_MAX
from streamingnode.rows.schema import check_schema, decode_schema, encode_schema
from wal.append import AppendGroup
from wal.errors import InvalidArgument
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    Header,
)
from wal.message import MutableMessage
from wal.message_type import MessageType

PARTITIONS_MAX = 1_024
"""Partitions of one collection; each has a growing segment on every shard that gets rows of it."""
FIRST_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Definition:
    """What a new collection is to be; checked."""

    name: str
    schema: pa.Schema
    primary_key: str
    shards: int
    partitions: tuple[str, ...]


def check_definition(
    name: str, schema: pa.Schema, *, primary_key: str, shards: int, partitions: Sequence[str]
) -> Definition:
    """Return the definition. Raises `InvalidArgument` or `SchemaMismatch`."""
    check_name("collection", name)
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= SHARDS_MAX:
        raise InvalidArgument(f"shards is {shards!r} — choose 1 to {SHARDS_MAX}")
    return Definition(
        name, check_schema(schema, primary_key=primary_key), primary_key, shards, _check_partitions(partitions)
    )


def _check_partitions(partitions: Sequence[str]) -> tuple[str, ...]:
    if isinstance(partitions, str) or not isinstance(partitions, Sequence) or len(partitions) >= PARTITIONS_MAX:
        raise _wrong_partitions(partitions)
    names = tuple(check_name("partition", partition) for partition in partitions)
    if len(set(names)) < len(names):
        raise _wrong_partitions(partitions)
    return names


def _wrong_partitions(partitions: object) -> InvalidArgument:
    count = (
        f" ({len(partitions)} of them)"
        if isinstance(partitions, Collection) and not isinstance(partitions, str)
        else ""
    )
    shown = reprlib.repr(partitions)  # the first few: thousands of names would make a text that nobody reads
    return InvalidArgument(f"partitions={shown}{count} — pass a list of up to {PARTITIONS_MAX - 1} different names")


def same_definition(existing: CollectionInfo, definition: Definition, *, if_not_exists: bool) -> CollectionInfo:
    """Return the existing collection if it will do. Raises `AlreadyExists`."""
    name = existing.name
    if not if_not_exists:
        raise AlreadyExists(f"collection {name!r} exists — use it as it is, or choose another name")
    if not decode_schema(existing.schema).equals(definition.schema):
        raise AlreadyExists(f"collection {name!r} exists with another schema — use its schema, or choose another name")
    if existing.primary_key != definition.primary_key or len(existing.vchannels) != definition.shards:
        raise AlreadyExists(
            f"collection {name!r} exists with primary key {existing.primary_key!r} and {len(existing.vchannels)} shards — "
            "use these, or choose another name"
        )
    return existing


def new_collection(definition: Definition, pchannel: str, allocate_id: Callable[[], int]) -> CreateCollectionHeader:
    """Return what creates a collection on `pchannel`, with new ids."""
    collection_id = allocate_id()
    return CreateCollectionHeader(
        collection_id=collection_id,
        name=definition.name,
        schema=encode_schema(definition.schema),
        schema_version=FIRST_SCHEMA_VERSION,
        primary_key=definition.primary_key,
        vchannels=tuple(f"{pchannel}_{collection_id}v{shard}" for shard in range(definition.shards)),
        partitions=tuple((allocate_id(), name) for name in (DEFAULT_PARTITION, *definition.partitions)),
    )


def create_collection_group(header: CreateCollectionHeader) -> AppendGroup:
    """Return the group that creates a collection."""
    return _on_each(header.vchannels, MessageType.CREATE_COLLECTION, header)


def drop_collection_group(info: CollectionInfo) -> AppendGroup:
    """Return the group that drops a collection."""
    return _on_each(info.vchannels, MessageType.DROP_COLLECTION, DropCollectionHeader(info.id))


def create_partition_group(info: CollectionInfo, partition: str, allocate_id: Callable[[], int]) -> AppendGroup:
    """Return the group that creates a partition. Raises `AlreadyExists` or `InvalidArgument`."""
    check_name("partition", partition)
    if has_partition(info, partition):
        raise AlreadyExists(
            f"partition {partition!r} of {info.name!r} exists — use it as it is, or choose another name"
        )
    if sum(not each.dropped_tick for each in info.partitions) >= PARTITIONS_MAX:
        raise InvalidArgument(f"collection {info.name!r} has {PARTITIONS_MAX} partitions — drop one first")
    header = CreatePartitionHeader(info.id, allocate_id(), partition)
    return _on_each(info.vchannels, MessageType.CREATE_PARTITION, header)


def drop_partition_group(info: CollectionInfo, partition: str) -> AppendGroup:
    """Return the group that drops a partition. Raises `PartitionNotFound`."""
    header = DropPartitionHeader(info.id, info.partition_by_name(partition).id)
    return _on_each(info.vchannels, MessageType.DROP_PARTITION, header)


def has_partition(info: CollectionInfo, partition: str) -> bool:
    """Whether the collection has a live partition of this name."""
    return any(each.name == partition and not each.dropped_tick for each in info.partitions)


def _on_each(vchannels: Sequence[str], kind: MessageType, header: Header) -> AppendGroup:
    return AppendGroup([MutableMessage(kind, header, vchannel) for vchannel in vchannels])
