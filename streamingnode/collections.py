"""Collections and partitions: what they are to callers, their definitions, and the changes of the catalog."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pyarrow as pa

from interceptors.errors import AlreadyExists, CollectionNotFound, PartitionNotFound
from interceptors.shard.catalog import DEFAULT_PARTITION, CollectionInfo, created_collection
from streamingnode.channel import Channel
from streamingnode.rows import SHARDS_MAX
from streamingnode.schema import check_schema, decode_schema, encode_schema
from streamingnode.writing.write import Writes, within
from wal.append import AppendGroup
from wal.errors import InvalidArgument, StreamingNodeError, shown
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    Header,
    MessageType,
)
from wal.message import MutableMessage

PARTITIONS_MAX = 1_024
"""Partitions of one collection; each has a growing segment on every shard that gets rows of it."""
FIRST_SCHEMA_VERSION = 1
NAME_CHARACTERS_MAX = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{NAME_CHARACTERS_MAX - 1}}}")


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as it is now; `id` and `created_tick` tell it from an earlier one of the same name."""

    id: int
    name: str
    schema: pa.Schema
    primary_key: str
    partitions: tuple[str, ...]
    vchannels: tuple[str, ...]
    created_tick: int


def collection_of(info: CollectionInfo) -> Collection:
    """Return what callers see of a collection in the catalog."""
    return Collection(
        id=info.id,
        name=info.name,
        schema=decode_schema(info.schema),
        primary_key=info.primary_key,
        partitions=tuple(each.name for each in info.partitions if not each.dropped_tick),
        vchannels=info.vchannels,
        created_tick=info.created_tick,
    )


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
    schema = check_schema(schema, primary_key=primary_key)
    is_list = isinstance(partitions, Sequence) and not isinstance(partitions, str)
    names = tuple(check_name("partition", partition) for partition in partitions[:PARTITIONS_MAX]) if is_list else ()
    if not is_list or len(names) >= PARTITIONS_MAX or len(set(names)) < len(names):
        raise InvalidArgument(
            f"partitions={shown(partitions)} — pass a list of up to {PARTITIONS_MAX - 1} different names"
        )
    return Definition(name, schema, primary_key, shards, names)


def check_name(kind: str, name: str) -> str:
    """Return `name` if a new "collection", "partition", "reader" or "producer" may carry it: in paths, URLs and tables.

    Raises `InvalidArgument`.
    """
    if isinstance(name, str) and name.startswith("_"):
        reason = "is reserved: names that start with '_' are the node's — rename it"
    elif not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        reason = (
            f"is not allowed — use 1 to {NAME_CHARACTERS_MAX} of a-z, 0-9, '.', '_' and '-', starting with a letter or "
            "digit, without '..'"
        )
    else:
        return name
    raise InvalidArgument(f"{kind} name {shown(name)} {reason}")


class CatalogChanges:
    """The changes of one node's catalog; lives on its event loop. Timeouts and errors are those of `Node`.

    One message for each vchannel, all at one tick. What a caller was told of is durable: the catalog knows of changes that
    are still on their way to the disk, so whoever finds a change already made waits until it is durable too.
    """

    def __init__(self, channel: Channel, writes: Writes) -> None:
        self._channel = channel
        self._writes = writes

    async def create_collection(
        self, definition: Definition, *, if_not_exists: bool, timeout: float | None
    ) -> CollectionInfo:
        """Make a collection, or find one that will do, and return it as it was made or found. Raises `AlreadyExists`."""
        tried: list[AppendGroup] = []

        async def create() -> CollectionInfo:
            while True:  # once more for each time that others make it and drop it again meanwhile
                living = self._channel.catalog.collections()
                existing = next((info for info in living if info.name == definition.name), None)
                if existing is not None:
                    _check_same(existing, definition, if_not_exists=if_not_exists)
                    await self._settle(None)
                    return existing
                header = self._header(definition)
                tried.append(_on_each(header.vchannels, MessageType.CREATE_COLLECTION, header))
                try:
                    made = await self._channel.append(tried[-1])
                except AlreadyExists:
                    if not if_not_exists:
                        raise
                else:
                    return created_collection(header, made.time_tick)  # the catalog may have it no more

        return await within(timeout, create, "the collection", begun=lambda: any(group.begun for group in tried))

    async def drop_collection(self, name: str, *, if_exists: bool, timeout: float | None) -> None:
        """Drop a collection. Raises `CollectionNotFound`, unless `if_exists`."""
        async with self._done_already(CollectionNotFound if if_exists else (), timeout):
            info = self._writes.find(name)
            group = _on_each(info.vchannels, MessageType.DROP_COLLECTION, DropCollectionHeader(info.id))
            await self._writes.append_within(timeout, group, "the drop")

    async def create_partition(
        self, info: CollectionInfo, partition: str, *, if_not_exists: bool, timeout: float | None
    ) -> None:
        """Make a partition. Raises `AlreadyExists`, unless `if_not_exists`, and `InvalidArgument`."""
        live = [each.name for each in info.partitions if not each.dropped_tick]
        if not (if_not_exists and partition in live):  # as `_default` is, whose name nobody else may give
            check_name("partition", partition)
        async with self._done_already(AlreadyExists if if_not_exists else (), timeout):
            if partition in live:  # an append of it would take the lock before it is refused
                raise AlreadyExists(
                    f"partition {partition!r} of {info.name!r} exists — use it as it is, or choose another name"
                )
            if len(live) >= PARTITIONS_MAX:
                raise InvalidArgument(f"collection {info.name!r} has {PARTITIONS_MAX} partitions — drop one first")
            header = CreatePartitionHeader(info.id, self._channel.shards.allocate_id(), partition)
            group = _on_each(info.vchannels, MessageType.CREATE_PARTITION, header)
            await self._writes.append_within(timeout, group, "the partition")

    async def drop_partition(
        self, info: CollectionInfo, partition: str, *, if_exists: bool, timeout: float | None
    ) -> None:
        """Drop a partition. Raises `PartitionNotFound`, unless `if_exists`."""
        async with self._done_already(PartitionNotFound if if_exists else (), timeout):
            header = DropPartitionHeader(info.id, info.partition_by_name(partition).id)
            group = _on_each(info.vchannels, MessageType.DROP_PARTITION, header)
            await self._writes.append_within(timeout, group, "the drop")

    @asynccontextmanager
    async def _done_already(
        self, said_by: type[StreamingNodeError] | tuple[()], timeout: float | None
    ) -> AsyncIterator[None]:
        """Take an error that says that somebody made the change before, once that is durable."""
        try:
            yield
        except said_by:
            await self._settle(timeout)

    async def _settle(self, timeout: float | None) -> None:
        """Wait until what the catalog says is durable."""
        await within(timeout, self._channel.consistent_tick, "the look at the catalog", changes=False)

    def _header(self, definition: Definition) -> CreateCollectionHeader:
        allocate_id = self._channel.shards.allocate_id
        collection_id = allocate_id()
        return CreateCollectionHeader(
            collection_id=collection_id,
            name=definition.name,
            schema=encode_schema(definition.schema),
            schema_version=FIRST_SCHEMA_VERSION,
            primary_key=definition.primary_key,
            vchannels=tuple(f"{self._channel.log.name}_{collection_id}v{shard}" for shard in range(definition.shards)),
            partitions=tuple((allocate_id(), name) for name in (DEFAULT_PARTITION, *definition.partitions)),
        )


def _on_each(vchannels: Sequence[str], kind: MessageType, header: Header) -> AppendGroup:
    return AppendGroup([MutableMessage(kind, header, vchannel) for vchannel in vchannels])


def _check_same(existing: CollectionInfo, definition: Definition, *, if_not_exists: bool) -> None:
    """Raise `AlreadyExists` unless the existing collection will do."""
    name, shards = existing.name, len(existing.vchannels)
    if not if_not_exists:
        raise AlreadyExists(f"collection {name!r} exists — use it as it is, or choose another name")
    theirs, ours = decode_schema(existing.schema), definition.schema
    if not theirs.equals(ours) or existing.primary_key != definition.primary_key or shards != definition.shards:
        raise AlreadyExists(
            f"collection {name!r} exists, with its own schema, primary key {existing.primary_key!r} and {shards} shards — "
            "use these, or choose another name"
        )
