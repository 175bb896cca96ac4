"""Bytes of a shard state in a checkpoint: MessagePack with a format number. Pure.

Fields are named, so a release may add one with a default; a change that older releases would read wrongly raises the number.
"""

import msgspec

from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.segment import GrowingSegment
from wal.errors import Corrupt, UnsupportedFormat

SNAPSHOT_FORMAT = 1


class ShardSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a shard state remembers, in an order that does not depend on its history."""

    format: int = SNAPSHOT_FORMAT
    position: int
    tick: int
    collections: tuple[CollectionInfo, ...]
    segments: tuple[GrowingSegment, ...]
    next_offsets: dict[str, int]
    next_id: int
    cut_number: int
    cut_tick: int
    changes_since_cut: int


class _Format(msgspec.Struct):
    format: int


def encode_snapshot(snapshot: ShardSnapshot) -> bytes:
    """Return the snapshot's bytes; equal states have equal bytes."""
    return msgspec.msgpack.encode(snapshot)


def decode_snapshot(data: bytes) -> ShardSnapshot:
    """Return the snapshot in `data`. Raises `UnsupportedFormat` for a newer release's, `Corrupt` for anything else."""
    try:
        version = msgspec.msgpack.decode(data, type=_Format).format
        if version != SNAPSHOT_FORMAT:
            raise UnsupportedFormat(
                f"the checkpoint's shard state has format {version}, this release reads {SNAPSHOT_FORMAT} — "
                "open the node with the release that wrote it"
            )
        return msgspec.msgpack.decode(data, type=ShardSnapshot)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the checkpoint's shard state does not decode: {error}") from error
