"""Collections and partitions of one log: which exist, which were dropped, and where rows may be
written. Pure.

A DDL message is checked before the append, and takes effect once the log has it, at its tick. A
dropped collection stays known until `forget_below`, because cuts name it and readers of older
entries need its schema.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from interceptors.errors import (
    CollectionNotFound,
    PartitionNotFound,
    SchemaMismatch,
    before_creation,
)
from wal.errors import AlreadyExists, InvalidArgument
from wal.headers import (
    CreateCollectionHeader,
    CreatePartitionHeader,
    DropCollectionHeader,
    DropPartitionHeader,
)

DEFAULT_PARTITION = "_default"
"""The partition that every collection has from its creation; it takes rows that name no partition,
and cannot be dropped.
"""
# The most partitions of a collection: each has a growing segment on every shard with rows of it.
PARTITIONS_MAX = 1_024


class PartitionInfo(msgspec.Struct, frozen=True, array_like=True):
    """One partition of a collection; `dropped_tick` is 0 while it is live."""

    id: int
    name: str
    created_tick: int
    dropped_tick: int = 0


class CollectionInfo(msgspec.Struct, frozen=True, array_like=True):
    """One collection; `schema` is an Arrow IPC schema message, `dropped_tick` is 0 while it is
    live.

    `partitions` includes the dropped ones that are still remembered.
    """

    id: int
    name: str
    schema: bytes
    schema_version: int
    primary_key: str
    vchannels: tuple[str, ...]
    partitions: tuple[PartitionInfo, ...]
    created_tick: int
    dropped_tick: int = 0

    def check_created(self, tick: int) -> None:
        """Raise `Truncated` for a tick before the collection was created: it had no state then."""
        if tick < self.created_tick:
            raise before_creation(self.name, tick, self.created_tick)

    def partition_by_name(self, name: str) -> PartitionInfo:
        """Return the live partition of this name. Raises `PartitionNotFound`."""
        for partition in self.partitions:
            if partition.name == name and not partition.dropped_tick:
                return partition
        raise PartitionNotFound(
            f"collection {self.name!r} has no partition {name!r} — choose one that `streamingnode "
            "partition ls` lists; a new one has to be created first"
        )

    def partition(self, partition_id: int) -> PartitionInfo:
        """Return the live partition of this id. Raises `PartitionNotFound`."""
        for partition in self.partitions:
            if partition.id == partition_id and not partition.dropped_tick:
                return partition
        raise PartitionNotFound(
            f"collection {self.name!r} has no partition {partition_id} — it was dropped"
        )


def created_collection(header: CreateCollectionHeader, tick: int) -> CollectionInfo:
    """Return the collection that a message with this header at `tick` creates."""
    return CollectionInfo(
        id=header.collection_id,
        name=header.name,
        schema=header.schema,
        schema_version=header.schema_version,
        primary_key=header.primary_key,
        vchannels=header.vchannels,
        partitions=tuple(PartitionInfo(number, name, tick) for number, name in header.partitions),
        created_tick=tick,
    )


class Catalog:
    """The collections of one log by id and name; live ones and, until forgotten, dropped ones."""

    def __init__(self, collections: Iterable[CollectionInfo] = ()) -> None:
        self._collections: dict[int, CollectionInfo] = {}
        self._ids: dict[str, int] = {}
        """By name: the live collection's id."""
        self.version = 0
        """The number of changes so far."""
        self._writable: dict[tuple[str, int], tuple[int, int]] = {}
        """By vchannel and partition id: the collection's id and schema version, so that one lookup
        admits an insert.
        """
        for info in collections:
            self._put(info)

    def collections(self, *, dropped: bool = False) -> tuple[CollectionInfo, ...]:
        """Return the live collections in the order of their ids; with `dropped`, also the
        remembered dropped ones.
        """
        return tuple(
            info
            for _, info in sorted(self._collections.items())
            if dropped or not info.dropped_tick
        )

    def collection(self, collection_id: int) -> CollectionInfo:
        """Return the collection of this id, live or dropped. Raises `CollectionNotFound`."""
        info = self._collections.get(collection_id)
        if info is None:
            raise CollectionNotFound(
                f"no collection has the id {collection_id} — it was dropped long ago, or never "
                "existed"
            )
        return info

    def live(self, collection_id: int) -> CollectionInfo:
        """Return the live collection of this id. Raises `CollectionNotFound`."""
        info = self._collections.get(collection_id)
        if info is None or info.dropped_tick:
            raise CollectionNotFound(
                f"no live collection has the id {collection_id} — it was dropped, or never existed"
            )
        return info

    def collection_by_name(self, name: str) -> CollectionInfo:
        """Return the live collection of this name. Raises `CollectionNotFound`."""
        collection_id = self._ids.get(name)
        if collection_id is None:
            raise CollectionNotFound(
                f"no collection is named {name!r} — choose one that `streamingnode collection ls` "
                "lists; a new one has to be created first"
            )
        return self._collections[collection_id]

    def is_writable(self, vchannel: str, partition_id: int) -> bool:
        """Whether rows of this partition may be written to this vchannel."""
        return (vchannel, partition_id) in self._writable

    # --- checks: may this be appended? ------------------------------------------------------------

    def check_insert(
        self, vchannel: str, collection_id: int, partition_id: int, schema_version: int
    ) -> None:
        """Raise `CollectionNotFound`, `PartitionNotFound` or `SchemaMismatch` unless rows may be
        inserted.
        """
        if self._writable.get((vchannel, partition_id)) == (collection_id, schema_version):
            return
        info = self.live(collection_id)
        info.partition(partition_id)
        assert vchannel in info.vchannels, "rows go to vchannels of their collection"
        raise SchemaMismatch(
            f"rows of schema version {schema_version} do not fit collection {info.name!r}, "
            f"which is at version {info.schema_version} — read its schema again"
        )

    def check_delete(self, vchannel: str, collection_id: int) -> None:
        """Raise `CollectionNotFound` unless keys may be deleted."""
        info = self.live(collection_id)
        assert vchannel in info.vchannels, "keys go to vchannels of their collection"

    def check_create_collection(self, header: CreateCollectionHeader) -> None:
        """Raise `AlreadyExists` unless the collection may be created."""
        if header.name in self._ids:
            raise AlreadyExists(
                f"collection {header.name!r} exists — use it as it is, or choose another name"
            )
        assert header.collection_id not in self._collections, "a collection gets a new id"
        assert DEFAULT_PARTITION in [name for _, name in header.partitions], (
            "every collection has the default partition"
        )

    def check_create_partition(self, header: CreatePartitionHeader) -> CollectionInfo:
        """Return the collection of a partition that may be created.

        Raises `CollectionNotFound`, `AlreadyExists`, or `InvalidArgument` at `PARTITIONS_MAX`.
        """
        info = self.live(header.collection_id)
        live = [each.name for each in info.partitions if not each.dropped_tick]
        if header.name in live:
            raise AlreadyExists(
                f"partition {header.name!r} of {info.name!r} exists — use it, or choose another "
                "name"
            )
        if len(live) >= PARTITIONS_MAX:
            raise InvalidArgument(
                f"collection {info.name!r} has {PARTITIONS_MAX} partitions — drop one first"
            )
        assert all(header.partition_id != each.id for each in info.partitions), (
            "a partition gets a new id"
        )
        return info

    def check_drop_partition(self, header: DropPartitionHeader) -> CollectionInfo:
        """Return the collection of a partition that may be dropped.

        Raises `CollectionNotFound`, `PartitionNotFound`, or `InvalidArgument` for the default
        partition.
        """
        info = self.live(header.collection_id)
        if info.partition(header.partition_id).name == DEFAULT_PARTITION:
            raise InvalidArgument(
                f"partition {DEFAULT_PARTITION!r} cannot be dropped — drop the collection instead"
            )
        return info

    # --- taking effect ----------------------------------------------------------------------------

    def create_collection(self, header: CreateCollectionHeader, tick: int) -> bool:
        """Add a collection; return False if it exists: its message comes once for each vchannel."""
        if header.collection_id in self._collections:
            return False
        self._put(created_collection(header, tick))
        return True

    def drop_collection(self, header: DropCollectionHeader, tick: int) -> CollectionInfo | None:
        """Mark a collection as dropped and return it; return None if it is not live."""
        info = self._collections.get(header.collection_id)
        if info is None or info.dropped_tick:
            return None
        del self._ids[info.name]
        self._put(replace(info, dropped_tick=tick))
        return info

    def create_partition(self, header: CreatePartitionHeader, tick: int) -> None:
        """Add a partition; skip one that exists, or whose collection is not live."""
        info = self._collections.get(header.collection_id)
        if (
            info is None
            or info.dropped_tick
            or any(each.id == header.partition_id for each in info.partitions)
        ):
            return
        added = PartitionInfo(header.partition_id, header.name, tick)
        self._put(replace(info, partitions=(*info.partitions, added)), (added,))

    def drop_partition(self, header: DropPartitionHeader, tick: int) -> bool:
        """Mark a partition as dropped; return False if it is not live."""
        info = self._collections.get(header.collection_id)
        if info is None or not self.is_writable(info.vchannels[0], header.partition_id):
            return False
        gone = header.partition_id
        partitions = tuple(
            replace(each, dropped_tick=tick) if each.id == gone else each
            for each in info.partitions
        )
        self._put(
            replace(info, partitions=partitions), [each for each in partitions if each.id == gone]
        )
        return True

    def forget_below(self, tick: int) -> None:
        """Remove collections and partitions that were dropped before `tick`.

        The caller ensures that no reader and no cut still needs them.
        """
        for info in list(self._collections.values()):
            if 0 < info.dropped_tick < tick:
                del self._collections[info.id]
                continue
            kept = tuple(each for each in info.partitions if not 0 < each.dropped_tick < tick)
            if len(kept) < len(info.partitions):
                self._collections[info.id] = replace(info, partitions=kept)

    def _put(self, info: CollectionInfo, changed: Iterable[PartitionInfo] | None = None) -> None:
        """Store a collection; `changed` are its changed partitions, None means all."""
        self.version += 1
        self._collections[info.id] = info
        if not info.dropped_tick:
            self._ids[info.name] = info.id
        for vchannel in info.vchannels:
            for partition in info.partitions if changed is None else changed:
                if info.dropped_tick or partition.dropped_tick:
                    self._writable.pop((vchannel, partition.id), None)
                else:
                    self._writable[vchannel, partition.id] = (info.id, info.schema_version)
