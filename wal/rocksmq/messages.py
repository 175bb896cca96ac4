"""Messages of topics and the bytes of an entry of them: `docs/format.md`, section "Topic entry". No I/O."""

import struct
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from wal.codec import CHECKSUM_END, MESSAGES_PER_ENTRY_MAX, crc32c, entry_crc32c
from wal.errors import Corrupt, InvalidArgument, TooLarge, UnsupportedFormat, shown

ENTRY_MAGIC = 0x514D
"""`MQ` on disk."""
ENTRY_FORMAT = 1
ENTRY_BYTES_TARGET = 1 << 20
"""What is produced together is cut into entries of about this many bytes, which is what is read and checked at once."""
PRODUCE_BYTES_MAX = 16 << 20
"""Of one call: it becomes one write, which holds the interpreter lock for about 1 ms per MiB."""
NAME_BYTES_MAX = 255
"""Of a topic's or a group's name in UTF-8."""
CACHE_BYTES_MAX = 32 << 20
"""Entries that are kept in memory, of all topics together: those used last."""

_UNCHECKED, _CHECKED, _LENGTHS = struct.Struct("<HHI"), struct.Struct("<IIQ"), struct.Struct("<II")
"""magic, format, checksum; what that covers: previous checksum, message count, first id; then of each message the lengths of
payload and properties, and then of each its payload and its properties."""
ENTRY_HEADER_BYTES = _UNCHECKED.size + _CHECKED.size

_encode = msgspec.msgpack.Encoder().encode
_decode_properties = msgspec.msgpack.Decoder(dict[str, str]).decode

Body = tuple[bytes, bytes]
"""The payload of a message and its encoded properties; no bytes for none."""


class ProducerMessage(msgspec.Struct, frozen=True):
    """What is produced."""

    payload: bytes
    properties: Mapping[str, str] = {}


class ConsumerMessage(msgspec.Struct, frozen=True, gc=False):
    """What is consumed."""

    message_id: int
    payload: bytes
    properties: Mapping[str, str]


def check_name(kind: str, name: str) -> str:
    """Return `name` if a "topic" or "group" may carry it. Raises `InvalidArgument`."""
    if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
        reason = "is not allowed — use text without '/' and control characters"
    elif name.startswith("_"):
        reason = "is reserved: names that start with '_' are the node's — rename it"
    elif len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        reason = f"is too long — use at most {NAME_BYTES_MAX} bytes"
    else:
        return name
    raise InvalidArgument(f"{kind} name {shown(name)} {reason}")


def bodies_of(messages: Sequence[ProducerMessage | bytes]) -> tuple[list[Body], int]:
    """Return what of a produce call is stored, and how many bytes. Raises `InvalidArgument`, `TooLarge`."""
    if not isinstance(messages, Sequence) or isinstance(messages, (bytes, bytearray, memoryview, str)) or not messages:
        raise InvalidArgument("messages are a list of bytes or of ProducerMessage — pass at least one")
    if len(messages) > MESSAGES_PER_ENTRY_MAX:
        raise TooLarge(f"{len(messages)} messages in one call — produce at most {MESSAGES_PER_ENTRY_MAX} at a time")
    bodies, size_bytes = list[Body](), 0
    for message in messages:
        payload, properties = message, b""
        if isinstance(message, ProducerMessage):
            payload = message.payload
            if message.properties:
                properties = _encoded(message.properties)
        if type(payload) is not bytes:
            raise InvalidArgument(f"a payload is {type(payload).__name__} — pass bytes, or a ProducerMessage of bytes")
        bodies.append((payload, properties))
        size_bytes += len(payload) + len(properties)
    if size_bytes > PRODUCE_BYTES_MAX:
        raise TooLarge(f"{size_bytes} bytes in one call — produce at most {PRODUCE_BYTES_MAX} at a time")
    return bodies, size_bytes


def _encoded(properties: Mapping[str, str]) -> bytes:
    if not all(type(each) is str for pair in properties.items() for each in pair):
        raise InvalidArgument(f"properties {shown(properties)} are not text — pass names and values as str")
    try:
        return _encode(dict(properties))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"properties {shown(properties)} have no UTF-8 — correct them") from error


def parts_of(bodies: Sequence[Body]) -> Iterator[Sequence[Body]]:
    """Yield the messages of each entry."""
    start = size_bytes = 0
    for at, (payload, properties) in enumerate(bodies):
        if at > start and (size_bytes >= ENTRY_BYTES_TARGET or at - start >= MESSAGES_PER_ENTRY_MAX):
            yield bodies[start:at]
            start, size_bytes = at, 0
        size_bytes += len(payload) + len(properties)
    if bodies:
        yield bodies[start:]


def encode_entry(bodies: Sequence[Body], *, first_id: int, previous_crc32c: int) -> bytes:
    """Return the bytes of messages as one entry; `wal.codec.entry_crc32c` reads its checksum back."""
    lengths = [_LENGTHS.pack(len(payload), len(properties)) for payload, properties in bodies]
    fixed = _CHECKED.pack(previous_crc32c, len(bodies), first_id)
    checked = b"".join([fixed, *lengths, *(part for body in bodies for part in body)])
    return _UNCHECKED.pack(ENTRY_MAGIC, ENTRY_FORMAT, crc32c(checked)) + checked


class TopicEntry:
    """An entry whose checksum was found right; its messages are made when somebody wants them."""

    __slots__ = ("_data", "count", "crc32c", "decoded", "first_position", "last_position", "size_bytes")

    def __init__(self, data: bytes, first_position: int, count: int) -> None:
        self.first_position, self.last_position, self.count = first_position, first_position + count - 1, count
        self.crc32c, self.size_bytes = entry_crc32c(data), len(data)
        self._data, self.decoded = data, list[ConsumerMessage]()
        """Its messages, once they were wanted."""

    def messages(self) -> list[ConsumerMessage]:
        """Return its messages. Raises `Corrupt`."""
        if self._data:
            try:
                self.decoded = self._decoded()
            except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Corrupt(f"entry at id {self.first_position} does not decode: {error}") from error
            self._data = b""
        return self.decoded

    def _decoded(self) -> list[ConsumerMessage]:
        data, at = self._data, ENTRY_HEADER_BYTES + self.count * _LENGTHS.size
        found: list[ConsumerMessage] = []
        message_id = self.first_position
        for length, properties_length in _LENGTHS.iter_unpack(data[ENTRY_HEADER_BYTES:at]):
            middle = at + length
            end = middle + properties_length
            properties = _decode_properties(data[middle:end]) if properties_length else {}
            found.append(ConsumerMessage(message_id, data[at:middle], properties))
            message_id, at = message_id + 1, end
        if at != len(data) or len(found) != self.count:
            raise Corrupt(f"entry at id {self.first_position} has {len(data)} bytes and its messages end at {at}")
        return found


def decode_entry(data: bytes, previous_crc32c: int | None) -> TopicEntry:
    """Return a checked entry; `previous_crc32c` is None where the one before is not known. Raises `Corrupt`."""
    if len(data) < ENTRY_HEADER_BYTES:
        raise Corrupt(f"a topic entry of {len(data)} bytes is shorter than its header")
    magic, version, checksum = _UNCHECKED.unpack_from(data)
    previous, count, first_id = _CHECKED.unpack_from(data, CHECKSUM_END)
    if magic != ENTRY_MAGIC:
        raise Corrupt("stored bytes are no topic entry: wrong magic number")
    if version != ENTRY_FORMAT:
        raise UnsupportedFormat(f"entry at id {first_id} has format {version}, this release reads {ENTRY_FORMAT}")
    if crc32c(memoryview(data)[CHECKSUM_END:]) != checksum:
        raise Corrupt(f"entry at id {first_id} fails its checksum")
    if previous_crc32c is not None and previous != previous_crc32c:
        raise Corrupt(f"entry at id {first_id} does not follow the entry before it")
    if not count:
        raise Corrupt(f"entry at id {first_id} has no message")
    return TopicEntry(data, first_id, count)


class EntryCache:
    """The entries that were produced or read last, by a topic's log id and any id in them."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], TopicEntry] = {}
        self._keys: list[tuple[int, int]] = []
        """Log id and last message id of each, ascending."""
        self._bytes = 0

    def find(self, log_id: int, message_id: int) -> TopicEntry | None:
        """Return the entry that holds a message."""
        at = bisect_left(self._keys, (log_id, message_id))
        if at == len(self._keys) or (key := self._keys[at])[0] != log_id:
            return None
        entry = self._entries[key] = self._entries.pop(key)  # the last to be forgotten
        return entry if entry.first_position <= message_id else None

    def messages(self, log_id: int, ids: Sequence[int]) -> list[ConsumerMessage] | None:
        """Return messages that were wanted before and lie in one entry, else None."""
        entry = self.find(log_id, ids[0])
        if entry is None or not entry.decoded or ids[-1] > entry.last_position:
            return None
        decoded, first = entry.decoded, entry.first_position
        return [decoded[each - first] for each in ids]

    def put(self, log_id: int, entry: TopicEntry) -> None:
        """Keep an entry, and forget what was not used for longest, in time also all of a topic that is gone."""
        key = log_id, entry.last_position
        if key not in self._entries:
            self._entries[key] = entry
            insort(self._keys, key)
            self._bytes += entry.size_bytes
            while self._bytes > CACHE_BYTES_MAX:
                oldest = next(iter(self._entries))
                self._bytes -= self._entries.pop(oldest).size_bytes
                del self._keys[bisect_left(self._keys, oldest)]
