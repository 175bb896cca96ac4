from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TsMsg(_message.Message):
    __slots__ = ("id", "begin_ts", "end_ts", "type", "hash_keys", "payload", "rows", "part")
    ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TS_FIELD_NUMBER: _ClassVar[int]
    END_TS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    HASH_KEYS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    id: int
    begin_ts: int
    end_ts: int
    type: int
    hash_keys: _containers.RepeatedScalarFieldContainer[int]
    payload: bytes
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    part: int
    def __init__(self, id: _Optional[int] = ..., begin_ts: _Optional[int] = ..., end_ts: _Optional[int] = ..., type: _Optional[int] = ..., hash_keys: _Optional[_Iterable[int]] = ..., payload: _Optional[bytes] = ..., rows: _Optional[_Iterable[bytes]] = ..., part: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("type", "body")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    type: int
    body: bytes
    def __init__(self, type: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...
