"""Which channel of a producer each message goes to, by its hash keys. No I/O."""

from collections.abc import Callable, Mapping, Sequence

from streamingnode.streams import streams_pb2 as pb
from streamingnode.streams.messages import DELETES, INSERTS, MsgPack, MsgType, TsMsg
from wal.errors import InvalidArgument, shown

RepackFunc = Callable[[Sequence[TsMsg], Sequence[Sequence[int]]], Mapping[int, MsgPack]]
"""Takes messages and the hash keys of each, and returns a pack for each bucket; see `repack`."""


def repack(messages: Sequence[TsMsg], buckets: int, repack_func: RepackFunc | None = None) -> dict[int, list[TsMsg]]:
    """Return the messages of each bucket, 0 to `buckets` - 1, in the order they had.

    Without a `repack_func` the rule follows from the type of the first message. A custom one is given the keys themselves,
    and a bucket that it returns counts as a key does, modulo `buckets`. Raises `InvalidArgument` for messages that do not
    fit the rule: nothing of them was produced.
    """
    keys = [message.hash_keys for message in messages]
    if not all(isinstance(of_one, Sequence) and all(type(key) is int for key in of_one) for of_one in keys):
        raise InvalidArgument("hash_keys are whole numbers — give a list of them")
    if repack_func is None:
        first = messages[0].type
        rule = insert_repack if first is MsgType.INSERT else delete_repack if first in DELETES else default_repack
        packs: Mapping[int, MsgPack] = rule(messages, [[key % buckets for key in of_one] for of_one in keys])
    else:
        packs = repack_func(messages, keys)
    found: dict[int, list[TsMsg]] = {}
    for bucket, pack in packs.items():
        if type(bucket) is not int:
            raise InvalidArgument(f"a RepackFunc returned the bucket {shown(bucket)} — return whole numbers")
        if pack.messages:
            found.setdefault(bucket % buckets, []).extend(pack.messages)
    return found


def insert_repack(messages: Sequence[TsMsg], hash_keys: Sequence[Sequence[int]]) -> dict[int, MsgPack]:
    """Give each row to the bucket of its key, as a message of its own with the row's tick."""
    packs: dict[int, MsgPack] = {}
    for message, keys in zip(messages, hash_keys, strict=True):
        _check_type(message, INSERTS)
        body = message.body
        if not isinstance(body, pb.InsertRequest):
            raise InvalidArgument("only rows of an InsertRequest are told apart — use set_repack_func()")
        _check_aligned(message, keys, body.timestamps, rows=len(body.rows), row_ids=len(body.row_ids))
        timestamps = body.timestamps or [message.end_ts] * len(keys)
        columns = zip(keys, body.row_ids, timestamps, body.rows, strict=True)
        for part, (key, row_id, tick, row) in enumerate(columns, message.part):
            request = pb.InsertRequest(collection=body.collection, partition=body.partition, row_ids=[row_id])
            request.timestamps.append(tick)
            request.rows.append(row)
            single = TsMsg(message.type, tick, tick, request, (key,), message.id, part)
            packs.setdefault(key, MsgPack([])).messages.append(single)
    return packs


def delete_repack(messages: Sequence[TsMsg], hash_keys: Sequence[Sequence[int]]) -> dict[int, MsgPack]:
    """Give each delete, whole, to the bucket of its first key; it has a hash key for each primary key."""
    for message, keys in zip(messages, hash_keys, strict=True):
        _check_type(message, DELETES)
        if message.type is MsgType.DELETE and isinstance(body := message.body, pb.DeleteRequest):
            _check_aligned(message, keys, body.timestamps, primary_keys=len(body.primary_keys))
    return default_repack(messages, hash_keys)


def default_repack(messages: Sequence[TsMsg], hash_keys: Sequence[Sequence[int]]) -> dict[int, MsgPack]:
    """Give each message to the bucket of its first key."""
    packs: dict[int, MsgPack] = {}
    for message, keys in zip(messages, hash_keys, strict=True):
        if not keys:
            raise InvalidArgument(f"a message of type {message.type} has no hash_keys — give it at least one")
        packs.setdefault(keys[0], MsgPack([])).messages.append(message)
    return packs


def _check_type(message: TsMsg, allowed: Sequence[object]) -> None:
    if message.type not in allowed:
        raise InvalidArgument(f"{message.type} is in a pack that begins with {allowed[0]} — produce it in another one")


def _check_aligned(message: TsMsg, keys: Sequence[int], timestamps: Sequence[int], **lengths: int) -> None:
    if set(lengths.values()) != {len(keys)} or not keys or len(timestamps) not in {0, len(keys)}:
        told = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise InvalidArgument(
            f"{message.type} has {len(keys)} hash_keys, {told}, {len(timestamps)} timestamps — give one of each for a row"
        )
