"""Cuts as callers ask for them: everything acknowledged before the call is in files when it returns."""

import msgspec

from flusher.flusher import Flusher
from streamingnode.channel import Channel
from wal.files import disk_errors_typed


class FlushedSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment that a cut sealed; `path` is relative to the node directory."""

    segment_id: int
    collection_id: int
    partition_id: int
    rows: int
    bytes: int
    path: str


class FlushResult(msgspec.Struct, frozen=True, kw_only=True):
    """A cut: everything up to `tick` is in files. `segments` are those sealed since the cut before it.

    `crc32c` is the checksum of its manifest: whoever holds it, as tables do, tells the cut from one of another history.
    """

    number: int
    tick: int
    crc32c: int = 0
    segments: tuple[FlushedSegment, ...] = ()


async def flush(channel: Channel, flusher: Flusher) -> FlushResult:
    """Make a cut, or find the newest one when there is nothing to cut. Raises as `Node.flush` does."""
    number = await channel.request_cut()
    if not number:
        return FlushResult(number=0, tick=0)
    with disk_errors_typed(flusher.cuts.node):
        cut = await flusher.wait_for_cut(number)
    segments = tuple(
        FlushedSegment(
            segment_id=segment.segment_id,
            collection_id=segment.collection_id,
            partition_id=segment.partition_id,
            rows=segment.rows,
            bytes=segment.bytes,
            path=segment.path,
        )
        for segment in cut.manifest.segments
    )
    return FlushResult(number=cut.number, tick=cut.tick, crc32c=cut.crc32c, segments=segments)
