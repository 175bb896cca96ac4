"""The data of streams: messages with begin and end ticks, packs, positions, the registry of types,
and their encoding. No I/O.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
from google.protobuf.message import DecodeError, Message

from streamingnode.streams import streams_pb2 as pb
from wal.errors import Corrupt, InvalidArgument, TooLarge, UnsupportedFormat, shown
from wal.headers import MessageType
from wal.rocksmq.messages import ProducerMessage, size_of
from wal.timetick import TICK_MAX

MESSAGE_BYTES_MAX = 4 << 20
"""Maximum size of the body of one message."""
BATCH_BYTES_TARGET = 256 << 10
"""A batch is one message of a queue. It ends with the message that exceeds this size or
`BATCH_MESSAGES_MAX`.
"""
BATCH_MESSAGES_MAX = 8192
CONTENT_TYPE = {"content-type": "streamingnode.streams.Batch"}
"""Properties that mark a queue's message as a batch."""


class MsgType(IntEnum):
    """Message types of streams only. Streams also carry the types of a node's log,
    `MessageType`.
    """

    INSERT = 400
    DELETE = 401
    SEARCH = 500
    SEARCH_RESULT = 1000
    SEGMENT_STATISTICS = 1100
    TIME_TICK = 1200
    TIME_SYNC = 1201

    def __str__(self) -> str:
        return self.name


StreamType = MsgType | MessageType
TYPES: Mapping[int, StreamType] = {
    int(each): each for kind in (MsgType, MessageType) for each in kind
}
"""The registry: each number means one type, and no message may carry another number."""
TICKS = (MsgType.TIME_TICK, MessageType.TIME_TICK)
"""Types that carry ticks: every message up to the end tick of such a message precedes it on its
channel.
"""
INSERTS = (MsgType.INSERT, MessageType.INSERT)
DELETES = (MsgType.DELETE, MessageType.DELETE)


class Template(NamedTuple):
    """How bodies of one message type are marshalled and unmarshalled. An exception from either
    becomes an error that names the type.
    """

    marshal: Callable[[Any], bytes]
    unmarshal: Callable[[bytes], Any]


AS_IT_IS = Template(lambda body: memoryview(body).tobytes(), bytes)


class TsMsg(msgspec.Struct, gc=False, eq=False):
    """One message, valid from `begin_ts` to `end_ts`: time ticks, or other numbers that ascend, up
    to `TICK_MAX`.

    `hash_keys` select the channel and are not transmitted. `id` is assigned by the producer, 0 for
    none: a pack of a tick stream contains one insert or delete of an id and `part` only once. A
    consumed message is unmarshalled when `body` is first read.
    """

    type: StreamType
    begin_ts: int
    end_ts: int
    content: Any
    """The body; with a `template`, its bytes."""
    hash_keys: Sequence[int] = ()
    id: int = 0
    part: int = 0
    """The index of the row in the message that repacking split."""
    template: Template | None = None

    @property
    def body(self) -> Any:
        """The body as unmarshalled by the type's template. Raises `Corrupt` for bytes that do not
        unmarshal.
        """
        if self.template is not None:
            try:
                self.content = self.template.unmarshal(self.content)
            except (DecodeError, msgspec.MsgspecError, ValueError, TypeError) as error:
                raise Corrupt(
                    f"a body of type {self.type} does not unmarshal: {error!r}"
                ) from error
            self.template = None
        return self.content

    def set_ts(self, begin_ts: int, end_ts: int | None = None) -> None:
        """Set the message's ticks; `end_ts` defaults to `begin_ts`."""
        self.begin_ts = begin_ts
        self.end_ts = begin_ts if end_ts is None else end_ts


class MsgPosition(msgspec.Struct, frozen=True):
    """A place in one channel, to `seek` to; encodes as JSON. A plain stream's position is after the
    last message that it returned.

    Positions of a tick stream are `inclusive`: reading continues with that message, without
    messages at or below `timestamp`.
    """

    channel: str
    message_id: int
    timestamp: int = 0
    inclusive: bool = False


class MsgPack(msgspec.Struct):
    """Messages that are produced or consumed together. A consumed pack has positions; one of a tick
    stream holds all messages between its ticks.
    """

    messages: list[TsMsg]
    begin_ts: int = 0
    end_ts: int = 0
    start_positions: list[MsgPosition] = []
    end_positions: list[MsgPosition] = []


class Batch(NamedTuple):
    """Consecutive messages of one channel; `ticks` are the indexes of the ticks among them."""

    messages: list[TsMsg]
    begin_ts: int
    end_ts: int
    ticks: Sequence[int] = ()
    size_bytes: int = 0


class UnmarshalDispatcher:
    """Marshals and unmarshals the bodies of messages, by type."""

    def __init__(self, templates: Mapping[StreamType, Template]) -> None:
        self._templates = {int(type_): template for type_, template in templates.items()}

    def add_template(self, type_: StreamType, template: Template) -> None:
        """Use `template` for bodies of a type from now on."""
        self._templates[_known(type_)] = template

    def marshal(self, message: TsMsg) -> bytes:
        """Return the body of a message as bytes. Raises `InvalidArgument` for a body that its
        template refuses or that is too long.
        """
        if message.template is not None:  # from a stream, not yet unmarshalled
            return bytes(message.content)
        try:
            data = self._templates[_known(message.type)].marshal(message.content)
        except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
            raise InvalidArgument(
                f"a body of type {message.type} does not marshal: {error!r} — add_template() "
                "sets how to marshal it"
            ) from error
        if len(data) > MESSAGE_BYTES_MAX:
            raise TooLarge(
                f"a body of type {message.type} has {len(data)} bytes — at most "
                f"{MESSAGE_BYTES_MAX} are allowed"
            )
        return data

    def unmarshal(self, data: bytes, type_: StreamType) -> TsMsg:
        """Return a message with the body that `data` holds. Raises `UnsupportedFormat` for a type
        without a template.
        """
        return TsMsg(TYPES[_known(type_)], 0, 0, data, template=self._template(int(type_)))

    def encode(self, messages: Sequence[TsMsg]) -> list[bytes]:
        """Return messages of one channel as batches. Raises `InvalidArgument` for invalid ticks,
        and as `marshal`.
        """
        bodies = list(map(self.marshal, messages))
        size_bytes = 0
        start = 0
        batches = list[bytes]()
        for at, body in enumerate(bodies, 1):
            size_bytes += len(body)
            if (
                size_bytes >= BATCH_BYTES_TARGET
                or at - start >= BATCH_MESSAGES_MAX
                or at == len(bodies)
            ):
                batches.append(_columns_of(messages[start:at], bodies[start:at]))
                size_bytes = 0
                start = at
        return batches

    def decode(self, data: bytes, properties: Mapping[str, str]) -> Batch:
        """Return the messages of a batch. Raises `UnsupportedFormat` for types without a template,
        `Corrupt` for damage.
        """
        if properties.get("content-type") != CONTENT_TYPE["content-type"]:
            raise UnsupportedFormat(
                "a message is not a batch of a stream — read messages of other producers with "
                "`consume` of mq"
            )
        try:
            columns = pb.Batch.FromString(data)
        except DecodeError as error:
            raise Corrupt(f"a batch of a stream does not decode: {error}") from error
        numbers = list(columns.types)
        begins = list(columns.begin_ts)
        ends = list(columns.end_ts)
        ids = columns.ids or repeat(0, len(numbers))
        parts = columns.parts or repeat(0, len(numbers))
        templates = {number: self._template(number) for number in set(numbers)}
        ticks = (
            [at for at, each in enumerate(numbers) if each in TICKS]
            if templates.keys() & TICKS
            else ()
        )
        types = map(TYPES.__getitem__, numbers)
        of_types = map(templates.__getitem__, numbers)
        # No Python code runs for each message: a tick stream spends most of its time here.
        messages = list(
            map(TsMsg, types, begins, ends, columns.bodies, repeat(()), ids, parts, of_types)
        )
        if not messages or not len(messages) == len(numbers) == len(begins) == len(ends) == len(
            columns.bodies
        ):
            raise Corrupt("a batch of a stream has columns of different lengths")
        if max(begins) > TICK_MAX or max(ends) > TICK_MAX:
            raise Corrupt(f"a batch of a stream has a tick above {TICK_MAX}")
        return Batch(messages, min(begins), max(ends), ticks, len(data))

    def _template(self, number: int) -> Template:
        if number not in self._templates:
            raise UnsupportedFormat(
                f"no template reads type {TYPES.get(number, number)} — add_template() adds one"
            )
        return self._templates[number]


def tick_refused(begin_ts: object, end_ts: object) -> InvalidArgument:
    """Return the error for a message with invalid ticks."""
    return InvalidArgument(
        f"a message has invalid ticks {shown(begin_ts)} to {shown(end_ts)}: ticks are whole "
        f"numbers from 0 to {TICK_MAX}, and begin_ts is at most end_ts — correct them with set_ts()"
    )


def _columns_of(messages: Sequence[TsMsg], bodies: Sequence[bytes]) -> bytes:
    begins = [each.begin_ts for each in messages]
    ends = [each.end_ts for each in messages]
    try:
        if any(map(operator.gt, begins, ends)) or min(begins) < 0 or max(ends) > TICK_MAX:
            ticks = zip(begins, ends, strict=True)
            wrong = next(pair for pair in ticks if not 0 <= pair[0] <= pair[1] <= TICK_MAX)
            raise tick_refused(*wrong)
        columns = pb.Batch(
            begin_ts=begins, end_ts=ends, bodies=bodies, types=[each.type for each in messages]
        )
        if any(each.id or each.part for each in messages):
            columns.ids.extend([each.id for each in messages])
            columns.parts.extend([each.part for each in messages])
        return columns.SerializeToString()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"a message is invalid: {error} — correct its id, or its ticks with set_ts()"
        ) from error


def _known(type_: StreamType) -> int:
    if not isinstance(type_, int) or int(type_) not in TYPES:
        raise InvalidArgument(
            f"{shown(type_)} is not a message type — use one of MsgType or MessageType"
        )
    return int(type_)


def _protobuf(kind: type[Message]) -> Template:
    def marshal(body: Message) -> bytes:
        if type(body) is not kind:
            raise TypeError(f"{type(body).__name__} is not a {kind.__name__}")
        return body.SerializeToString()

    return Template(marshal, kind.FromString)


def new_proto_dispatcher() -> UnmarshalDispatcher:
    """Return a dispatcher for the messages of streams.proto, the usual case."""
    kinds: dict[StreamType, type[Message]] = {
        MsgType.INSERT: pb.InsertRequest,
        MsgType.DELETE: pb.DeleteRequest,
        MsgType.SEARCH: pb.SearchRequest,
        MsgType.SEARCH_RESULT: pb.SearchResult,
        MsgType.SEGMENT_STATISTICS: pb.SegmentStatistics,
        MsgType.TIME_TICK: pb.TimeTick,
        MsgType.TIME_SYNC: pb.TimeSync,
    }
    logged = dict.fromkeys(
        (each for each in MessageType if each is not MessageType.TXN), pb.StreamingMessage
    )
    return UnmarshalDispatcher({type_: _protobuf(kind) for type_, kind in (kinds | logged).items()})


def new_memory_dispatcher() -> UnmarshalDispatcher:
    """Return a dispatcher for bodies that are bytes of any format, such as Arrow or msgpack, passed
    unchanged.
    """
    return UnmarshalDispatcher(dict.fromkeys(TYPES.values(), AS_IT_IS))


def parts_within(
    messages: Iterable[ProducerMessage], bytes_max: int
) -> Iterator[list[ProducerMessage]]:
    """Yield lists of messages in order, each of at most `bytes_max`; a longer message is alone in
    its list.
    """
    part = list[ProducerMessage]()
    part_bytes = 0
    for message in messages:
        part_bytes += (size_bytes := size_of(message))
        if part and part_bytes > bytes_max:
            yield part
            part = []
            part_bytes = size_bytes
        part.append(message)
    if part:
        yield part
