"""Messages as bytes: a dispatcher has one template for each type of message, a factory makes dispatchers. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
from google.protobuf.message import DecodeError

from streamingnode.streams import tsmsg_pb2 as pb
from streamingnode.streams.messages import AnyType, MsgType, TsMsg, check_message, type_of
from wal.errors import Corrupt, InvalidArgument, TooLarge, shown
from wal.headers import MessageType

MESSAGE_BYTES_MAX = 8 << 20
"""Of one message, encoded."""
TOGETHER_BYTES = 128 << 10
"""Messages of one call to one channel travel together up to about this."""
TOGETHER_MAX = 4096
"""And up to this number."""


_Fields = tuple[int, int, int, int, tuple[int, ...], bytes, tuple[bytes, ...], int]
"""Those of a `TsMsg`, in order."""


class Template(Protocol):
    """How messages of a type are bytes."""

    def marshal(self, message: TsMsg) -> bytes:
        """Return a message as bytes."""

    def unmarshal(self, data: bytes) -> TsMsg:
        """Return the message. Raises `Corrupt`."""


class ProtoTemplate:
    """Protocol buffers, for what is kept: the `TsMsg` of `tsmsg.proto`."""

    def marshal(self, message: TsMsg) -> bytes:
        """See `Template.marshal`."""
        try:
            return pb.TsMsg(**msgspec.structs.asdict(message)).SerializeToString()
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"message {message.id} cannot be encoded: {error} — correct its fields") from error

    def unmarshal(self, data: bytes) -> TsMsg:
        """See `Template.unmarshal`."""
        try:
            found = pb.TsMsg.FromString(data)
        except DecodeError as error:
            raise Corrupt(f"{len(data)} bytes are no message: {error}") from error
        values = (found.id, found.begin_ts, found.end_ts, found.type, found.hash_keys, found.payload, found.rows)
        return _message(*values, found.part)


class InMemoryTemplate:
    """MessagePack, for streams that end with their process: what it writes may change with a release."""

    def __init__(self) -> None:
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Fields)

    def marshal(self, message: TsMsg) -> bytes:
        """See `Template.marshal`."""
        try:
            return self._encoder.encode(msgspec.structs.astuple(message))
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"message {message.id} cannot be encoded: {error} — correct its fields") from error

    def unmarshal(self, data: bytes) -> TsMsg:
        """See `Template.unmarshal`."""
        try:
            return _message(*self._decoder.decode(data))
        except msgspec.DecodeError as error:
            raise Corrupt(f"{len(data)} bytes are no message: {error}") from error


def _message(*fields: Any) -> TsMsg:
    values = dict(zip(TsMsg.__struct_fields__, fields, strict=True))
    try:
        kind = type_of(values["type"])
    except InvalidArgument as error:
        raise Corrupt(error.happened) from error
    return TsMsg(**values | {"type": kind, "hash_keys": tuple(values["hash_keys"]), "rows": tuple(values["rows"])})


class UnmarshalDispatcher:
    """Templates by type of message. A type without one is an error on both ways."""

    def __init__(self, templates: dict[AnyType, Template]) -> None:
        self._templates = {key.value: template for key, template in templates.items()}

    def add_template(self, kind: AnyType, template: Template) -> None:
        """Have messages of a type be what `template` makes of them, from now on."""
        self._templates[type_of(kind).value] = template

    def marshal(self, message: TsMsg) -> bytes:
        """Return a message as bytes. Raises `InvalidArgument`, `TooLarge`."""
        check_message(message)
        data = self._template(message.type).marshal(message)
        if len(data) > MESSAGE_BYTES_MAX:
            raise TooLarge(f"message {message.id} has {len(data)} bytes — keep it within {MESSAGE_BYTES_MAX}")
        return data

    def unmarshal(self, data: bytes, kind: AnyType | int) -> TsMsg:
        """Return the message of a type that these bytes are. Raises `InvalidArgument` for the type, `Corrupt`."""
        found = self._template(kind).unmarshal(data)
        if found.type != kind:
            raise Corrupt(f"the bytes are a message of type {found.type}, not {type_of(kind)}")
        return found

    def pack(self, messages: Iterable[TsMsg]) -> list[tuple[bytes, int]]:
        """Return messages as messages of the queue, in order, each with how many it holds. Raises as `marshal` does."""
        packed: list[tuple[bytes, int]] = []
        frames: list[pb.Frame] = []
        size_bytes = 0
        for message in messages:
            body = self.marshal(message)
            if frames and (size_bytes + len(body) > TOGETHER_BYTES or len(frames) == TOGETHER_MAX):
                packed.append((pb.Frames(frames=frames).SerializeToString(), len(frames)))
                frames, size_bytes = [], 0
            frames.append(pb.Frame(type=message.type, body=body))
            size_bytes += len(body)
        if frames:
            packed.append((pb.Frames(frames=frames).SerializeToString(), len(frames)))
        return packed

    def unpack(self, payload: bytes) -> Sequence[TsMsg]:
        """Return the messages of a message of the queue. Raises `Corrupt`."""
        try:
            frames = pb.Frames.FromString(payload).frames
            if not frames:
                raise Corrupt(f"{shown(payload)} holds no message")
            return [self.unmarshal(frame.body, frame.type) for frame in frames]
        except (DecodeError, InvalidArgument) as error:
            raise Corrupt(f"{len(payload)} bytes hold no messages: {error}") from error

    def _template(self, kind: AnyType | int) -> Template:
        found = self._templates.get(int(kind))
        if found is None:
            raise InvalidArgument(f"there is no template for type {shown(int(kind))} — add one with add_template")
        return found


DispatcherFactory = Callable[[], UnmarshalDispatcher]
"""Makes dispatchers in which every type has the default template: each stream has one of its own."""


def proto_dispatcher() -> UnmarshalDispatcher:
    """Return a dispatcher of protocol buffers, for what is kept."""
    return UnmarshalDispatcher(dict.fromkeys([*MsgType, *MessageType], ProtoTemplate()))


def in_memory_dispatcher() -> UnmarshalDispatcher:
    """Return a dispatcher for streams that end with their process."""
    return UnmarshalDispatcher(dict.fromkeys([*MsgType, *MessageType], InMemoryTemplate()))
