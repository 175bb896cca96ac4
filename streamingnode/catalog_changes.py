"""Makes and drops collections and partitions, each by one append group; what a caller was told of is durable.

In: checked definitions and names. Out: the catalog with the change. The catalog knows of changes that are still on their way
to the disk, made by this caller or another, so whoever finds a change already made waits until it is durable too.
"""

from collections.abc import Awaitable, Callable

from interceptors.errors import AlreadyExists, CollectionNotFound, PartitionNotFound
from interceptors.shard.catalog import CollectionInfo, created_collection
from streamingnode import ddl
from streamingnode.ddl import Definition
from streamingnode.services import NodeServices
from streamingnode.writing.deadline import read_within, within
from streamingnode.writing.write_target import pchannel_of
from wal.append import AppendGroup, AppendResult
from wal.errors import StreamingNodeError

InfoOf = Callable[[str], CollectionInfo]
"""Return the live collection of a name. Raises `CollectionNotFound`, or `OnShutdown` when the node is closed."""
AppendWithin = Callable[[str, AppendGroup, str, float | None], Awaitable[AppendResult]]
"""Append a group to a pchannel within a timeout; the text says what it is, in errors."""


class CatalogChanges:
    """The changes of one node's catalog; lives on its event loop. Timeouts and errors are those of `Node`."""

    def __init__(self, services: NodeServices, info_of: InfoOf, append: AppendWithin) -> None:
        self._services = services
        self._info_of = info_of
        self._append = append

    async def create_collection(
        self, definition: Definition, *, if_not_exists: bool, timeout: float | None
    ) -> CollectionInfo:
        """Make a collection, or find one that will do, and return it as it was made or found. Raises `AlreadyExists`."""
        tried: list[AppendGroup] = []

        async def create() -> CollectionInfo:
            while True:  # once more for each time that others make it and drop it again meanwhile
                existing = self._find(definition.name)
                if existing is not None:
                    ddl.same_definition(existing, definition, if_not_exists=if_not_exists)
                    await self._settle(None)
                    return existing
                try:
                    return await self._create(definition, tried)
                except AlreadyExists:
                    if not if_not_exists:
                        raise

        return await within(timeout, create, "the collection", begun=lambda: any(group.begun for group in tried))

    async def _create(self, definition: Definition, tried: list[AppendGroup]) -> CollectionInfo:
        pchannel = next(iter(self._services.appends))
        header = ddl.new_collection(definition, pchannel, lambda: self._services.allocate_id(pchannel))
        group = ddl.create_collection_group(header)
        tried.append(group)
        result = await self._append(pchannel, group, "the collection", None)
        return created_collection(header, result.time_tick)  # the catalog may have it no more

    async def drop_collection(self, name: str, *, if_exists: bool, timeout: float | None) -> None:
        """Drop a collection. Raises `CollectionNotFound`, unless `if_exists`."""
        if if_exists and self._find(name) is None:
            await self._settle(timeout)
            return
        info = self._info_of(name)
        done_already = (CollectionNotFound,) if if_exists else ()
        await self._change(info, ddl.drop_collection_group(info), "the drop", timeout, done_already)

    async def create_partition(
        self, info: CollectionInfo, partition: str, *, if_not_exists: bool, timeout: float | None
    ) -> None:
        """Make a partition. Raises `AlreadyExists`, unless `if_not_exists`."""
        if if_not_exists and ddl.has_partition(info, partition):
            await self._settle(timeout)
            return
        pchannel = pchannel_of(info.vchannels[0])
        group = ddl.create_partition_group(info, partition, lambda: self._services.allocate_id(pchannel))
        done_already = (AlreadyExists,) if if_not_exists else ()
        await self._change(info, group, "the partition", timeout, done_already)

    async def drop_partition(
        self, info: CollectionInfo, partition: str, *, if_exists: bool, timeout: float | None
    ) -> None:
        """Drop a partition. Raises `PartitionNotFound`, unless `if_exists`."""
        if if_exists and not ddl.has_partition(info, partition):
            await self._settle(timeout)
            return
        done_already = (PartitionNotFound,) if if_exists else ()
        await self._change(info, ddl.drop_partition_group(info, partition), "the drop", timeout, done_already)

    async def _change(
        self,
        info: CollectionInfo,
        group: AppendGroup,
        what: str,
        timeout: float | None,
        done_already: tuple[type[StreamingNodeError], ...],
    ) -> None:
        """Append a change; an error of `done_already` says that somebody made it meanwhile, which will do."""
        try:
            await self._append(pchannel_of(info.vchannels[0]), group, what, timeout)
        except done_already:
            await self._settle(timeout)

    async def _settle(self, timeout: float | None) -> None:
        """Wait until what the catalog says is durable."""
        pchannels = list(self._services.appends)
        await read_within(timeout, lambda: self._services.consistent_tick(pchannels), "the look at the catalog")

    def _find(self, name: str) -> CollectionInfo | None:
        return next((info for info in self._services.catalog.collections() if info.name == name), None)
