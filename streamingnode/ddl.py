"""The changes of a node's catalog: each is one message for each vchannel, all at one tick."""

from collections.abc import Callable, Sequence

from interceptors.errors import CollectionNotFound, PartitionNotFound
from interceptors.shard.catalog import DEFAULT_PARTITION, CollectionInfo, created_collection
from streamingnode.channel import Channel
from streamingnode.collections import Definition, check_name
from streamingnode.schema import decode_schema, encode_schema
from wal.append import AppendGroup
from wal.errors import AlreadyExists, StreamingNodeError
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    DropCollectionHeader,
    DropPartitionHeader,
    Header,
    MessageType,
)
from wal.message import MutableMessage
from wal.position import ProducerStamp

FIRST_SCHEMA_VERSION = 1


class CatalogChanges:
    """The changes of one node's catalog; lives on its event loop. Errors are those of `Node`.

    Each change is one message for each vchannel, all at one tick. The catalog already has changes
    that are not durable yet, so a call that finds its change made waits until it is durable. A
    repeated call with the same `stamp` returns the result of the first.
    """

    channel: Channel
    """The node's channel; the subclass sets it."""

    async def create_collection(
        self, definition: Definition, *, if_not_exists: bool, stamp: ProducerStamp | None = None
    ) -> CollectionInfo:
        """Create a collection, or with `if_not_exists` find one of the same definition, and return
        it. Raises `AlreadyExists`.
        """
        if stamp is not None and (made := await self.channel.outcome(stamp)) is not None:
            return next(
                info
                for info in self.channel.catalog.collections(dropped=True)
                if (info.name, info.created_tick) == (definition.name, made.time_tick)
            )
        while True:  # again each time that another call created it and dropped it meanwhile
            catalog = self.channel.catalog  # a reopened log has a new catalog
            existing = next(
                (info for info in catalog.collections() if info.name == definition.name), None
            )
            if existing is not None and if_not_exists:
                _check_same(existing, definition)
                await self.channel.consistent_tick()
                return existing
            header = self._header(definition)
            catalog.check_create_collection(header)
            try:
                made = await self.channel.append(
                    _on_each(header.vchannels, MessageType.CREATE_COLLECTION, header, stamp)
                )
            except AlreadyExists:
                if not if_not_exists:
                    raise
            else:
                return created_collection(header, made.time_tick)  # it may be dropped by now

    async def drop_collection(
        self, name: str, *, if_exists: bool, stamp: ProducerStamp | None = None
    ) -> None:
        """Drop a collection. Raises `CollectionNotFound`, unless `if_exists`."""

        def drop() -> AppendGroup:
            info = self.channel.catalog.collection_by_name(name)
            return _on_each(
                info.vchannels, MessageType.DROP_COLLECTION, DropCollectionHeader(info.id), stamp
            )

        await self._change(drop, stamp, CollectionNotFound if if_exists else ())

    async def create_partition(
        self,
        collection: str,
        partition: str,
        *,
        if_not_exists: bool,
        stamp: ProducerStamp | None = None,
    ) -> None:
        """Create a partition. Raises `AlreadyExists`, unless `if_not_exists`, and
        `InvalidArgument`.
        """

        def create() -> AppendGroup:
            info = self.channel.catalog.collection_by_name(collection)
            # the default partition always exists, and its name is reserved
            if not (if_not_exists and partition == DEFAULT_PARTITION):
                check_name("partition", partition)
            header = CreatePartitionHeader(
                info.id, self.channel.term.shards.allocate_id(), partition
            )
            # an append would take the lock before it is refused
            self.channel.catalog.check_create_partition(header)
            return _on_each(info.vchannels, MessageType.CREATE_PARTITION, header, stamp)

        await self._change(create, stamp, AlreadyExists if if_not_exists else ())

    async def drop_partition(
        self,
        collection: str,
        partition: str,
        *,
        if_exists: bool,
        stamp: ProducerStamp | None = None,
    ) -> None:
        """Drop a partition. Raises `PartitionNotFound`, unless `if_exists`."""

        def drop() -> AppendGroup:
            info = self.channel.catalog.collection_by_name(collection)
            header = DropPartitionHeader(info.id, info.partition_by_name(partition).id)
            return _on_each(info.vchannels, MessageType.DROP_PARTITION, header, stamp)

        await self._change(drop, stamp, PartitionNotFound if if_exists else ())

    async def _change(
        self,
        make: Callable[[], AppendGroup],
        stamp: ProducerStamp | None,
        passes: type[StreamingNodeError] | tuple[()],
    ) -> None:
        """Append a change, unless an earlier attempt did.

        An error that `passes` means that the change was made before; this returns once that is
        durable.
        """
        if stamp is not None and await self.channel.outcome(stamp) is not None:
            return
        try:
            await self.channel.append(make())
        except passes:
            await self.channel.consistent_tick()

    def _header(self, definition: Definition) -> CreateCollectionHeader:
        allocate_id = self.channel.term.shards.allocate_id
        collection_id = allocate_id()
        return CreateCollectionHeader(
            collection_id=collection_id,
            name=definition.name,
            schema=encode_schema(definition.schema),
            schema_version=FIRST_SCHEMA_VERSION,
            primary_key=definition.primary_key,
            vchannels=tuple(
                f"{self.channel.log.name}_{collection_id}v{shard}"
                for shard in range(definition.shards)
            ),
            partitions=tuple(
                (allocate_id(), name) for name in (DEFAULT_PARTITION, *definition.partitions)
            ),
        )


def _on_each(
    vchannels: Sequence[str], kind: MessageType, header: Header, stamp: ProducerStamp | None
) -> AppendGroup:
    return AppendGroup(
        [MutableMessage(kind, header, vchannel) for vchannel in vchannels], producer=stamp
    )


def _check_same(existing: CollectionInfo, definition: Definition) -> None:
    """Raise `AlreadyExists` unless the existing collection has the same definition."""
    name = existing.name
    shards = len(existing.vchannels)
    theirs = decode_schema(existing.schema)
    ours = definition.schema
    if (
        not theirs.equals(ours)
        or existing.primary_key != definition.primary_key
        or shards != definition.shards
    ):
        raise AlreadyExists(
            f"collection {name!r} exists, with its own schema, primary key "
            f"{existing.primary_key!r} and {shards} shards — "
            "use these, or choose another name"
        )
