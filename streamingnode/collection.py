"""Collections as callers see them. No I/O."""

from dataclasses import dataclass

import pyarrow as pa

from interceptors.shard.catalog import CollectionInfo
from streamingnode.rows.schema import decode_schema


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
