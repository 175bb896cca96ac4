"""Which channel a message goes to: rules by hash keys, for inserts, deletes and all else. Pure.

The bucket of a key is the key modulo the number of channels. The type of the first message chooses the rule for all.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from streamingnode.streams.messages import DELETES, INSERTS, MsgPack, TsMsg
from wal.errors import InvalidArgument, shown

HashKeys = Sequence[Sequence[int]]
"""Of each message its keys; whoever calls a rule of their own gives them as they are in the messages."""
RepackFunc = Callable[[Sequence[TsMsg], HashKeys], Mapping[int, MsgPack]]
"""Returns the pack of each bucket that gets one."""


def repack(messages: Sequence[TsMsg], buckets: int, rule: RepackFunc | None = None) -> dict[int, list[TsMsg]]:
    """Return the messages of each bucket, order kept; by `rule`, or by the type of the first one.

    Raises `InvalidArgument` for a key that is missing or no integer, an insert without a key for each row, other messages
    among inserts or deletes, and a bucket of `rule` that there is not. Then nothing is to be produced.
    """
    if not messages:
        return {}
    if rule is not None:
        return _checked(rule(messages, [message.hash_keys for message in messages]), buckets)
    found: dict[int, list[TsMsg]] = {}
    first = messages[0].type
    kinds = next((kinds for kinds in (INSERTS, DELETES) if first in kinds), None)
    for message in messages:
        if kinds is not None and message.type not in kinds:
            raise InvalidArgument(
                f"message {message.id} is {message.type} among messages of type {first} — produce them apart"
            )
        if kinds is INSERTS:
            for bucket, row in _rows(message, buckets):
                found.setdefault(bucket, []).append(row)
        else:
            found.setdefault(_bucket(message, 0, buckets), []).append(message)
    return found


def _rows(message: TsMsg, buckets: int) -> list[tuple[int, TsMsg]]:
    """Return each row of an insert as a message of its own, with its bucket."""
    if len(message.rows) != len(message.hash_keys) or not message.rows:
        raise InvalidArgument(
            f"insert {message.id} has {len(message.rows)} rows and {len(message.hash_keys)} hash keys — "
            "give one key for each row, and at least one"
        )
    if len(message.rows) == 1:  # it may be a part already
        return [(_bucket(message, 0, buckets), message)]
    replace = msgspec.structs.replace
    return [
        (_bucket(message, at, buckets), replace(message, rows=(row,), hash_keys=(message.hash_keys[at],), part=at))
        for at, row in enumerate(message.rows)
    ]


def _bucket(message: TsMsg, at: int, buckets: int) -> int:
    if at >= len(message.hash_keys):
        raise InvalidArgument(f"message {message.id} has no hash key — give one, or broadcast it")
    key = message.hash_keys[at]
    if type(key) is not int:
        raise InvalidArgument(f"hash key {shown(key)} of message {message.id} is no integer — correct it")
    return key % buckets


def _checked(packs: Mapping[int, MsgPack], buckets: int) -> dict[int, list[TsMsg]]:
    for bucket in packs:
        if type(bucket) is not int or not 0 <= bucket < buckets:
            raise InvalidArgument(f"the repack function names bucket {shown(bucket)} — name one below {buckets}")
    return {bucket: list(pack.msgs) for bucket, pack in packs.items() if pack.msgs}
