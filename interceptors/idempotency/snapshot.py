"""Bytes of a window in a checkpoint: MessagePack with a format number. Pure.

The picture is in docs/format.md, section "Checkpoint". Message ids are stored as positions; the log says of which kind.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from wal.append import AppendResult
from wal.errors import Corrupt, UnsupportedFormat
from wal.message_id import MessageId

WINDOW_FORMAT = 1


class KnownProducer(NamedTuple):
    """One producer as of a tick: results by sequence; others at or below `floor` are forgotten."""

    producer_id: int
    epoch: int
    floor: int
    results: Mapping[int, AppendResult]


class KnownWindow(NamedTuple):
    """All producers as of `tick`."""

    tick: int
    producers: tuple[KnownProducer, ...]


class StoredResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One result; `row_offsets` are (vchannel, first, count)."""

    sequence: int
    first_position: int
    count: int
    time_tick: int
    last_confirmed: int
    txn_id: int
    row_offsets: tuple[tuple[str, int, int], ...]


class StoredProducer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One producer and its results."""

    producer_id: int
    epoch: int
    floor: int
    results: tuple[StoredResult, ...]


class StoredWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the checkpoint."""

    format: int = WINDOW_FORMAT
    tick: int
    producers: tuple[StoredProducer, ...]


class _Format(msgspec.Struct):
    format: int


def encode_window(window: KnownWindow) -> bytes:
    """Return the window's bytes; some 2 us for each result, so in a thread when there are many."""
    producers = tuple(
        StoredProducer(
            known.producer_id,
            known.epoch,
            known.floor,
            tuple(_stored(sequence, result) for sequence, result in known.results.items()),
        )
        for known in window.producers
    )
    return msgspec.msgpack.encode(StoredWindow(tick=window.tick, producers=producers))


def decode_window(data: bytes, kind: type[MessageId]) -> KnownWindow:
    """Return the window in `data`; `kind` is that of its log's ids.

    Raises `UnsupportedFormat` for a newer release's, `Corrupt` for anything else.
    """
    try:
        version = msgspec.msgpack.decode(data, type=_Format).format
        if version != WINDOW_FORMAT:
            raise UnsupportedFormat(
                f"the checkpoint's producers have format {version}, this release reads {WINDOW_FORMAT} — "
                "open the node with the release that wrote it"
            )
        stored = msgspec.msgpack.decode(data, type=StoredWindow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the checkpoint's producers do not decode: {error}") from error
    return KnownWindow(
        stored.tick,
        tuple(
            KnownProducer(each.producer_id, each.epoch, each.floor, {r.sequence: _known(r, kind) for r in each.results})
            for each in stored.producers
        ),
    )


def _stored(sequence: int, result: AppendResult) -> StoredResult:
    return StoredResult(
        sequence,
        result.first_message_id.position,
        result.count,
        result.time_tick,
        result.last_confirmed.position,
        result.txn_id,
        tuple((vchannel, first, count) for vchannel, (first, count) in result.row_offsets.items()),
    )


def _known(stored: StoredResult, kind: type[MessageId]) -> AppendResult:
    return AppendResult(
        first_message_id=kind(stored.first_position),
        count=stored.count,
        time_tick=stored.time_tick,
        last_confirmed=kind(stored.last_confirmed),
        txn_id=stored.txn_id,
        row_offsets={vchannel: (first, count) for vchannel, first, count in stored.row_offsets},
    )
