"""A growing segment: the place where the rows of one partition of one vchannel collect until it is sealed. Pure."""

from typing import NamedTuple

import msgspec

from interceptors.shard.stats import SegmentStats
from wal.headers import CreateSegmentHeader


class SegmentKey(NamedTuple):
    """Whose rows a segment takes."""

    vchannel: str
    collection_id: int
    partition_id: int


class GrowingSegment(msgspec.Struct, array_like=True):
    """One growing segment; rows enter it at ticks above `created_tick` only."""

    segment_id: int
    vchannel: str
    collection_id: int
    partition_id: int
    schema_version: int
    created_tick: int
    stats: SegmentStats

    @property
    def key(self) -> SegmentKey:
        """Whose rows the segment takes."""
        return SegmentKey(self.vchannel, self.collection_id, self.partition_id)


def segment_of(header: CreateSegmentHeader, vchannel: str, tick: int) -> GrowingSegment:
    """Return the empty segment that a CREATE_SEGMENT at `tick` opens."""
    return GrowingSegment(
        segment_id=header.segment_id,
        vchannel=vchannel,
        collection_id=header.collection_id,
        partition_id=header.partition_id,
        schema_version=header.schema_version,
        created_tick=tick,
        stats=SegmentStats(header.bytes_max, header.rows_max),
    )
