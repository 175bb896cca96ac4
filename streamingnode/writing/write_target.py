"""What a write must know about a collection, worked out once and kept until the collection changes.

In: `CollectionInfo` from the catalog. Out: a `WriteTarget` with the decoded schema, the checks of its rows, and where the
messages go. No I/O.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from interceptors.errors import PartitionNotFound
from interceptors.shard.catalog import CollectionInfo
from streamingnode.names import DEFAULT_PARTITION, not_text
from streamingnode.rows.row_shape import RowShape, key_shape, row_shape
from streamingnode.rows.schema import decode_schema
from wal.append import Append

CACHED_MAX = 1_024
"""Targets kept; one is rebuilt in about 50 us."""


@dataclass(frozen=True, slots=True, eq=False)
class WriteTarget:
    """One collection as writes see it; `append` is that of its pchannel, `consistent_tick` that of the node."""

    info: CollectionInfo
    append: Append
    consistent_tick: Callable[[], Awaitable[int]]
    rows: RowShape
    keys: RowShape
    key_index: int
    partitions: Mapping[str, int]

    def partition_id(self, partition: str | None) -> int:
        """Return the id of a live partition, the default one for None. Raises `PartitionNotFound` or `InvalidArgument`."""
        if partition is not None and not isinstance(partition, str):
            raise not_text("partition", partition)
        found = self.partitions.get(DEFAULT_PARTITION if partition is None else partition)
        if found is None:
            raise PartitionNotFound(
                f"collection {self.info.name!r} has no partition {partition!r}, only "
                f"{', '.join(sorted(self.partitions)[:20])} — create it first, or choose one that is there"
            )
        return found


class WriteTargets:
    """The targets of the collections written lately; lives on the event loop."""

    def __init__(self, appends: Mapping[str, Append], consistent_tick: Callable[[], Awaitable[int]]) -> None:
        self._appends = appends
        self._consistent_tick = consistent_tick
        self._targets: dict[str, WriteTarget] = {}

    def target(self, info: CollectionInfo) -> WriteTarget:
        """Return the target of a live collection."""
        target = self._targets.get(info.name)
        if target is not None and target.info is info:
            return target
        if len(self._targets) >= CACHED_MAX:
            self._targets.clear()
        target = self._targets[info.name] = _target_of(info, self._appends, self._consistent_tick)
        return target


def pchannel_of(vchannel: str) -> str:
    """Return the pchannel that a vchannel, `<pchannel>_<collection id>v<shard>`, lives on."""
    return vchannel.rpartition("_")[0]


def _target_of(
    info: CollectionInfo, appends: Mapping[str, Append], consistent_tick: Callable[[], Awaitable[int]]
) -> WriteTarget:
    shape = row_shape(decode_schema(info.schema), primary_key=info.primary_key)
    return WriteTarget(
        info=info,
        append=appends[pchannel_of(info.vchannels[0])],
        consistent_tick=consistent_tick,
        rows=shape,
        keys=key_shape(shape),
        key_index=shape.schema.get_field_index(info.primary_key),
        partitions={each.name: each.id for each in info.partitions if not each.dropped_tick},
    )
