"""What streams carry: types, messages with ticks, positions and packs. Pure.

Types are those of the log (`wal.headers.MessageType`, below 400 or from 600 on) and those of streams alone (`MsgType`); no
number means two things. What moves rows, and what is a tick, is in both.
"""

import struct
from enum import IntEnum, unique
from typing import NamedTuple

import msgspec

from wal.errors import InvalidArgument, shown
from wal.headers import MessageType


@unique
class MsgType(IntEnum):
    """What a message of a stream is, beside the types of the log."""

    INSERT = 400
    DELETE = 401
    SEARCH = 500
    SEARCH_RESULT = 1000
    SEGMENT_STATISTICS = 1100
    TIME_TICK = 1200
    TIME_SYNC = 1201

    def __str__(self) -> str:
        return self.name


AnyType = MsgType | MessageType

_TYPES: dict[int, AnyType] = {each.value: each for kind in (MessageType, MsgType) for each in kind}
TICKS = frozenset({MsgType.TIME_TICK.value, MessageType.TIME_TICK.value})
"""Nothing with a tick at or below theirs comes after them in their channel."""
INSERTS = frozenset({MsgType.INSERT.value, MessageType.INSERT.value})
DELETES = frozenset({MsgType.DELETE.value, MessageType.DELETE.value})
DML = INSERTS | DELETES
"""Of those with the same id and part, a pack of ticks has one of each channel."""
UINT64_MAX = 2**64 - 1


def type_of(number: int) -> AnyType:
    """Return the type with a number. Raises `InvalidArgument`."""
    found = _TYPES.get(number)
    if found is None:
        raise InvalidArgument(f"{shown(number)} is no type of message — use one of MsgType or MessageType")
    return found


class TsMsg(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message with the ticks it covers, `begin_ts` to `end_ts`.

    `hash_keys` say which channel it goes to: of an insert one for each of its `rows`, which part there; `part` then numbers
    them. What `payload` and `rows` are is between who produces and who consumes.
    """

    id: int
    begin_ts: int
    end_ts: int
    type: AnyType
    hash_keys: tuple[int, ...] = ()
    payload: bytes = b""
    rows: tuple[bytes, ...] = ()
    part: int = 0

    def set_ts(self, ts: int) -> "TsMsg":
        """Return the message at one tick."""
        return msgspec.structs.replace(self, begin_ts=ts, end_ts=ts)


def tick(ts: int) -> TsMsg:
    """Return the message that says that nothing at or below `ts` follows it in its channel."""
    return TsMsg(id=ts, begin_ts=ts, end_ts=ts, type=MsgType.TIME_TICK)


class MsgPosition(msgspec.Struct, frozen=True, gc=False):
    """A message in a channel; `timestamp` is its tick, in a pack of ticks one that bounds the pack. Kept by who resumes."""

    channel: str
    message_id: bytes
    timestamp: int = 0


class MsgPack(msgspec.Struct, kw_only=True):
    """Messages handed on together. One that is to be produced needs `msgs` alone.

    A stream gives `positions`, one for each message, and of every channel it came from where the pack starts and ends.
    """

    msgs: list[TsMsg]
    begin_ts: int = 0
    end_ts: int = 0
    positions: list[MsgPosition] = []
    start_positions: list[MsgPosition] = []
    end_positions: list[MsgPosition] = []


_ID = struct.Struct(">QII")


class MessagePlace(NamedTuple):
    """What the bytes of a message id say: message of the queue, which of those in it, and of how many.

    Places sort as messages do. `of` 0 is all that the message of the queue holds.
    """

    queue_id: int
    at: int = 0
    of: int = 0

    @property
    def message_id(self) -> bytes:
        """Return it as bytes, which sort as messages do."""
        return _ID.pack(*self)

    @property
    def behind(self) -> "MessagePlace":
        """The place right behind it."""
        if self.at + 1 < self.of:
            return MessagePlace(self.queue_id, self.at + 1, self.of)
        return MessagePlace(self.queue_id + 1)


def place_of(position: MsgPosition) -> MessagePlace:
    """Return where a position is. Raises `InvalidArgument` for bytes that no stream gave."""
    if not isinstance(position.message_id, bytes) or len(position.message_id) != _ID.size:
        raise InvalidArgument(
            f"message id {shown(position.message_id)} of channel {shown(position.channel)} is none — "
            "pass a position as a pack gave it"
        )
    return MessagePlace(*_ID.unpack(position.message_id))


def check_message(message: TsMsg) -> None:
    """Raise `InvalidArgument` for a message that cannot be produced."""
    if not isinstance(message, TsMsg):
        raise InvalidArgument(f"{shown(message)} is no message — pass a TsMsg")
    type_of(message.type)
    for name, value in (("id", message.id), ("begin_ts", message.begin_ts), ("end_ts", message.end_ts)):
        if type(value) is not int or not 0 <= value <= UINT64_MAX:
            raise InvalidArgument(f"{name}={shown(value)} is not from 0 to {UINT64_MAX} — correct the message")
    if not all(type(each) is bytes for each in (message.payload, *message.rows)):
        raise InvalidArgument(f"payload and rows of message {message.id} are not all bytes — encode them")
    if message.begin_ts > message.end_ts:
        raise InvalidArgument(f"begin_ts={message.begin_ts} is above end_ts={message.end_ts} — swap them")
