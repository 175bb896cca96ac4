"""The calls of `Node` that create, drop and describe collections and partitions."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo
from streamingnode.backend import Backend
from streamingnode.collections import Collection, Definition, check_text, collection_of
from wal.runtime import in_thread


class CollectionCalls:
    """The calls of an open node about collections; see `Node`, which inherits them."""

    _backend: Backend
    _run: Callable[..., Awaitable[Any]]
    _info: Callable[[str], CollectionInfo]
    _check_open: Callable[[], None]

    async def create_collection(
        self,
        name: str,
        schema: pa.Schema,
        *,
        primary_key: str,
        shards: int = 1,
        partitions: Sequence[str] = (),
        if_not_exists: bool = False,
        timeout: float | None = None,
    ) -> Collection:
        """Create a collection and return it once it is durable.

        Raises `AlreadyExists` for a name in use, unless `if_not_exists` is set and schema, primary
        key and shards are the same; `SchemaMismatch` for an unsupported type, and
        `InvalidArgument`.
        """
        self._check_open()
        definition = await in_thread(
            Definition(name, schema, primary_key, shards, partitions).checked
        )
        create = partial(self._backend.create_collection, definition, if_not_exists=if_not_exists)
        return collection_of(await self._run(create, "the collection", timeout))

    async def drop_collection(
        self, name: str, *, if_exists: bool = False, timeout: float | None = None
    ) -> None:
        """Drop a collection with all its rows, and end the open transactions on it. Raises
        `CollectionNotFound`.
        """
        check_text("collection", name)
        await self._run(
            partial(self._backend.drop_collection, name, if_exists=if_exists), "the drop", timeout
        )

    async def create_partition(
        self,
        collection: str,
        partition: str,
        *,
        if_not_exists: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Create a partition. Raises `AlreadyExists` unless `if_not_exists`, `CollectionNotFound`,
        `InvalidArgument`.
        """
        self._info(collection)
        create = partial(
            self._backend.create_partition, collection, partition, if_not_exists=if_not_exists
        )
        await self._run(create, "the partition", timeout)

    async def drop_partition(
        self,
        collection: str,
        partition: str,
        *,
        if_exists: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Drop a partition with its rows. Raises `PartitionNotFound`; the default partition cannot
        be dropped.
        """
        self._info(collection)
        check_text("partition", partition)
        drop = partial(self._backend.drop_partition, collection, partition, if_exists=if_exists)
        await self._run(drop, "the drop", timeout)

    def collections(self) -> tuple[Collection, ...]:
        """Return the collections that exist now, oldest first."""
        self._check_open()
        return tuple(collection_of(info) for info in self._backend.catalog.collections())

    def collection(self, name: str) -> Collection:
        """Return one collection. Raises `CollectionNotFound`."""
        return collection_of(self._info(name))
