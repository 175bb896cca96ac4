"""A collection's rows at one tick: from its cuts and, after the newest of them, from the log.

Cuts go on being made, and given up, meanwhile: who is overtaken begins again from the newer checkpoint.
"""

import anyio.to_thread
import pyarrow as pa

from flusher.checkpoint import Checkpoint
from flusher.cuts.cut_log import CutLog
from flusher.flusher import Flusher
from flusher.snapshot import SnapshotSource, read_snapshot
from interceptors.shard.catalog import CollectionInfo
from scanner.deliver_policy import DeliverPolicy
from streamingnode.channel import Channel
from wal.errors import CollectionNotFound, InvalidArgument, Truncated
from wal.message import AnyMessage
from wal.message_id import message_id_kind


async def take_snapshot(channel: Channel, flusher: Flusher, info: CollectionInfo, as_of: int | None) -> pa.Table:
    """Return a collection's rows as of a tick, now for None. Raises as `Node.snapshot` does."""
    while True:
        checkpoint = flusher.checkpoint
        try:
            return await _snapshot_after(checkpoint, channel, flusher.cuts, info, as_of)
        except Truncated:
            if flusher.checkpoint is checkpoint:
                await flusher.check_cuts()
                raise  # else a cut, and what was given up behind it, overtook this


async def _snapshot_after(
    checkpoint: Checkpoint, channel: Channel, cuts: CutLog, info: CollectionInfo, as_of: int | None
) -> pa.Table:
    now = await channel.consistent_tick()  # above the checkpoint, so what its cuts know had happened by then
    if as_of is not None and as_of > now:
        raise InvalidArgument(f"as_of={as_of} is yet to come, it is {now} now — leave it out for the state as of now")
    tick = now if as_of is None else as_of
    tail = await _read_tail(channel, info, checkpoint, until=tick)
    if all(live.id != info.id for live in channel.shards.catalog.collections()):
        raise CollectionNotFound(f"collection {info.name!r} was dropped meanwhile — create it again, or read another")
    source = SnapshotSource(cuts=cuts, collection=info, last_cut=checkpoint.cut_number, tail=tail, as_of=tick)
    return await anyio.to_thread.run_sync(read_snapshot, source)


async def _read_tail(channel: Channel, info: CollectionInfo, checkpoint: Checkpoint, *, until: int) -> list[AnyMessage]:
    """Return the collection's messages above a checkpoint and up to a tick."""
    messages: list[AnyMessage] = []
    # A position before the first cut too, not "all there is": by now there may be a cut, and log given up behind it.
    policy = DeliverPolicy.start_from(message_id_kind(channel.log.wal_name)(checkpoint.start_position))
    vchannels, confirmed_tick = frozenset(info.vchannels), checkpoint.tick
    async with channel.scanners.open(policy, vchannels=vchannels, after_tick=confirmed_tick) as scanner:
        while confirmed_tick < until:
            batch = await scanner.next_batch()
            messages += (message for message in batch.messages if message.time_tick <= until)
            confirmed_tick = batch.confirmed_tick
    return messages
