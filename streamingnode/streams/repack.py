"""Assigns messages to a producer's channels by their hash keys. No I/O."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from streamingnode.streams import streams_pb2 as pb
from streamingnode.streams.messages import (
    DELETES,
    INSERTS,
    MsgPack,
    MsgType,
    TsMsg,
    tick_refused,
)
from wal.errors import InvalidArgument, shown

RepackFunc = Callable[[Sequence[TsMsg], Sequence[Sequence[int]]], Mapping[int, MsgPack]]
"""Takes messages and the hash keys of each, and returns a pack for each bucket; buckets are taken
modulo the number of channels, as keys are.
"""


def repack(
    messages: Sequence[TsMsg], buckets: int, repack_func: RepackFunc | None = None
) -> dict[int, list[TsMsg]]:
    """Return the messages by bucket, 0 to `buckets` - 1, in their order; a key is taken modulo
    `buckets`.

    Without a `repack_func` the type of the first message decides: each row of an insert becomes a
    message of its own, with the row's tick, in the bucket of its key; every other message goes
    whole to the bucket of its first key. Raises `InvalidArgument` for inserts or deletes without a
    key for each row or mixed with other types, and for a message without a key.
    """
    keys = [message.hash_keys for message in messages]
    if not all(
        isinstance(of_one, Sequence) and all(type(key) is int for key in of_one) for of_one in keys
    ):
        raise InvalidArgument("hash_keys are whole numbers — pass a list of them")
    if repack_func is not None:
        return _by_bucket(repack_func(messages, keys), buckets)
    found: dict[int, list[TsMsg]] = {}
    first = messages[0].type
    kinds = next((kinds for kinds in (INSERTS, DELETES) if first in kinds), None)
    for message in messages:
        if kinds is not None and message.type not in kinds:
            raise InvalidArgument(
                f"{message.type} is in a pack that begins with {first} — produce it in another one"
            )
        if message.type is MsgType.DELETE and isinstance(body := message.body, pb.DeleteRequest):
            _check_aligned(message, body.timestamps, primary_keys=len(body.primary_keys))
        for part in _rows_of(message) if first is MsgType.INSERT else (message,):
            if not part.hash_keys:
                raise InvalidArgument(
                    f"a message of type {part.type} has no hash_keys — set at least one"
                )
            found.setdefault(part.hash_keys[0] % buckets, []).append(part)
    return found


def _by_bucket(packs: Mapping[int, MsgPack], buckets: int) -> dict[int, list[TsMsg]]:
    found: dict[int, list[TsMsg]] = {}
    for bucket, pack in packs.items():
        if type(bucket) is not int:
            raise InvalidArgument(
                f"a RepackFunc returned the bucket {shown(bucket)} — return whole numbers"
            )
        if pack.messages:
            found.setdefault(bucket % buckets, []).extend(pack.messages)
    return found


def _rows_of(message: TsMsg) -> Iterator[TsMsg]:
    body = message.body
    keys = message.hash_keys
    if not isinstance(body, pb.InsertRequest):
        raise InvalidArgument(
            "only an InsertRequest can be split into rows — use set_repack_func()"
        )
    _check_aligned(message, body.timestamps, rows=len(body.rows), row_ids=len(body.row_ids))
    ticks = body.timestamps or [message.end_ts] * len(keys)
    columns = zip(keys, body.row_ids, ticks, body.rows, strict=True)
    for part, (key, row_id, tick, row) in enumerate(columns, message.part):
        request = pb.InsertRequest(
            collection=body.collection, partition=body.partition, row_ids=[row_id], rows=[row]
        )
        try:
            request.timestamps.append(tick)
        except (TypeError, ValueError):  # the message's own tick, not yet checked
            raise tick_refused(tick, tick) from None
        yield TsMsg(message.type, tick, tick, request, (key,), message.id, part)


def _check_aligned(message: TsMsg, ticks: Sequence[int], **lengths: int) -> None:
    keys = len(message.hash_keys)
    if set(lengths.values()) != {keys} or not keys or len(ticks) not in {0, keys}:
        found = ", ".join(
            f"{count} {name}" for name, count in (lengths | {"timestamps": len(ticks)}).items()
        )
        raise InvalidArgument(
            f"{message.type} has {keys} hash_keys, {found} — pass one of each for each row"
        )
