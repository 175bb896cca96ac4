from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Batch(_message.Message):
    __slots__ = ("types", "begin_ts", "end_ts", "bodies", "ids", "parts")
    TYPES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TS_FIELD_NUMBER: _ClassVar[int]
    END_TS_FIELD_NUMBER: _ClassVar[int]
    BODIES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    types: _containers.RepeatedScalarFieldContainer[int]
    begin_ts: _containers.RepeatedScalarFieldContainer[int]
    end_ts: _containers.RepeatedScalarFieldContainer[int]
    bodies: _containers.RepeatedScalarFieldContainer[bytes]
    ids: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, types: _Optional[_Iterable[int]] = ..., begin_ts: _Optional[_Iterable[int]] = ..., end_ts: _Optional[_Iterable[int]] = ..., bodies: _Optional[_Iterable[bytes]] = ..., ids: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class InsertRequest(_message.Message):
    __slots__ = ("collection", "partition", "row_ids", "timestamps", "rows")
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    collection: str
    partition: str
    row_ids: _containers.RepeatedScalarFieldContainer[int]
    timestamps: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, collection: _Optional[str] = ..., partition: _Optional[str] = ..., row_ids: _Optional[_Iterable[int]] = ..., timestamps: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("collection", "partition", "primary_keys", "timestamps")
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_KEYS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    collection: str
    partition: str
    primary_keys: _containers.RepeatedScalarFieldContainer[int]
    timestamps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, collection: _Optional[str] = ..., partition: _Optional[str] = ..., primary_keys: _Optional[_Iterable[int]] = ..., timestamps: _Optional[_Iterable[int]] = ...) -> None: ...

class SearchRequest(_message.Message):
    __slots__ = ("request_id", "collection", "partitions", "reply_channel", "query")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    REPLY_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    collection: str
    partitions: _containers.RepeatedScalarFieldContainer[str]
    reply_channel: str
    query: bytes
    def __init__(self, request_id: _Optional[int] = ..., collection: _Optional[str] = ..., partitions: _Optional[_Iterable[str]] = ..., reply_channel: _Optional[str] = ..., query: _Optional[bytes] = ...) -> None: ...

class SearchResult(_message.Message):
    __slots__ = ("request_id", "error", "hits")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: str
    hits: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[str] = ..., hits: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SegmentStatistics(_message.Message):
    __slots__ = ("segment_id", "rows", "memory_bytes")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    rows: int
    memory_bytes: int
    def __init__(self, segment_id: _Optional[int] = ..., rows: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class TimeTick(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: str
    def __init__(self, source: _Optional[str] = ...) -> None: ...

class TimeSync(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sources: _Optional[_Iterable[str]] = ...) -> None: ...

class StreamingMessage(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    payload: bytes
    def __init__(self, header: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...
