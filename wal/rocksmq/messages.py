"""Messages of topics and the byte format of their entries: `docs/format.md`, section "Topic entry".
No I/O.
"""

import struct
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, count, pairwise
from operator import attrgetter
from typing import Any

import msgspec

from wal.codec import MESSAGES_PER_ENTRY_MAX, check_head, crc32c, entry_crc32c
from wal.errors import Corrupt, InvalidArgument, TooLarge, shown

ENTRY_MAGIC = 0x514D
"""`MQ` on disk."""
ENTRY_FORMAT = 1
ENTRY_BYTES_TARGET = 1 << 20
"""One produce call is split into entries of about this many bytes; an entry is read and checked at
once.
"""
PRODUCE_BYTES_MAX = 16 << 20
"""Maximum bytes of one produce call: it becomes one write, which holds the interpreter lock for
about 1 ms per MiB.
"""
NAME_BYTES_MAX = 255
"""Maximum length of a topic's or a group's name in UTF-8."""
DEAD_SUFFIX = ".dead"
"""The dead letters of a topic are messages of the topic whose name has this suffix."""
ERROR_CHARACTERS_MAX = 1_000
"""Maximum length of the error text in a dead letter."""
CACHE_BYTES_MAX = 64 << 20
"""Maximum size in memory of the cached entries of all topics together."""
MESSAGE_OVERHEAD_BYTES = 264
ENTRY_OVERHEAD_BYTES = 512
"""Memory of a message beside its bytes, and of an entry beside its messages."""

_UNCHECKED = struct.Struct("<HHI")
_CHECKED = struct.Struct("<IIQ")
"""magic, format, checksum; covered by the checksum: previous checksum, message count, first id.
Then follow the lengths of payload and properties of each message, four bytes each, and then the
payload and properties of each message.
"""
ENTRY_HEADER_BYTES = _UNCHECKED.size + _CHECKED.size

_LAST = attrgetter("last_position")
_encode = msgspec.msgpack.Encoder().encode
_decode_properties = msgspec.msgpack.Decoder(dict[str, str]).decode


class ProducerMessage(msgspec.Struct, frozen=True):
    """A message to produce."""

    payload: bytes
    properties: Mapping[str, str] = {}


class ConsumerMessage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A consumed message.

    `delivery_count` counts the deliveries to consumers of the group, this one included: 1 for the
    first delivery. Messages that a consumer has fetched and not yet processed count too. A seek
    resets it. `docs/guarantees.md` describes how exact it is after a kill. `get_message` is not a
    delivery and returns 1.
    """

    message_id: int
    payload: bytes
    properties: Mapping[str, str]
    delivery_count: int = 1


def size_of(message: ProducerMessage | ConsumerMessage) -> int:
    """Return the approximate size of a message: bytes of its payload plus characters of its
    properties.
    """
    return len(message.payload) + sum(map(len, chain.from_iterable(message.properties.items())))


def dead_letter(
    body: bytes,
    properties: Mapping[str, str],
    *,
    error: str,
    topic: str,
    message_id: int,
    bridge: str,
) -> ProducerMessage:
    """Return the dead letter of a message of `topic` whose rows are refused with `error`.

    `bridge` names the producer that could not write them.
    """
    origin = {"topic": topic, "id": str(message_id), "bridge": bridge}
    return ProducerMessage(body, {**properties, "error": error[:ERROR_CHARACTERS_MAX], **origin})


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


def bodies_of(messages: Sequence[ProducerMessage | bytes]) -> tuple[list[bytes], int]:
    """Return the stored bodies of a produce call, and their total bytes. Raises `InvalidArgument`,
    `TooLarge`.

    The list holds two bodies for each message in turn: its payload and its encoded properties
    (empty without properties).
    """
    # Test for a list first: the check of the abstract class costs as much as the rest for one
    # message.
    is_list = type(messages) is list or isinstance(messages, Sequence)
    if not is_list or isinstance(messages, (bytes, bytearray, memoryview, str)) or not messages:
        raise InvalidArgument(
            "messages are a list of bytes or of ProducerMessage — pass at least one"
        )
    if len(messages) > MESSAGES_PER_ENTRY_MAX:
        raise TooLarge(
            f"{len(messages)} messages in one call — produce at most {MESSAGES_PER_ENTRY_MAX} at a "
            "time"
        )
    bodies: list[Any] = [b""] * (2 * len(messages))
    bodies[::2] = messages
    if set(map(type, messages)) != {bytes}:
        for at, message in enumerate(messages):
            if isinstance(message, ProducerMessage):
                bodies[2 * at] = message.payload
                bodies[2 * at + 1] = _encoded(message.properties) if message.properties else b""
        if kinds := set(map(type, bodies)) - {bytes}:
            raise InvalidArgument(
                f"a payload is {kinds.pop().__name__} — pass bytes, or a ProducerMessage of bytes"
            )
    if (size_bytes := sum(map(len, bodies))) > PRODUCE_BYTES_MAX:
        raise TooLarge(
            f"{size_bytes} bytes in one call — produce at most {PRODUCE_BYTES_MAX} at a time"
        )
    return bodies, size_bytes


def _encoded(properties: Mapping[str, str]) -> bytes:
    try:
        return _encode(msgspec.convert(dict(properties), dict[str, str]))
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"properties {shown(properties)} are not text — pass names and values as str"
        ) from error


def parts_of(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the part of the bodies (see `bodies_of`) that goes into each entry."""
    ends = list(accumulate(map(len, bodies), initial=0))
    start = 0
    while start < len(bodies):
        stop = bisect_left(ends, ends[start] + ENTRY_BYTES_TARGET, start + 2, len(bodies))
        stop = min(stop + stop % 2, start + 2 * MESSAGES_PER_ENTRY_MAX)
        yield bodies[start:stop]
        start = stop


def encode_entry(bodies: Sequence[bytes], *, first_id: int, previous_crc32c: int) -> bytes:
    """Return the bytes of messages as one entry; `wal.codec.entry_crc32c` reads its checksum
    back.
    """
    lengths = struct.pack(f"<{len(bodies)}I", *map(len, bodies))
    checked = b"".join(
        [_CHECKED.pack(previous_crc32c, len(bodies) // 2, first_id), lengths, *bodies]
    )
    return _UNCHECKED.pack(ENTRY_MAGIC, ENTRY_FORMAT, crc32c(checked)) + checked


class TopicEntry:
    """A valid entry: it was just written, or read and checked."""

    def __init__(self, bodies: Sequence[bytes], data: bytes, first_position: int) -> None:
        self._bodies = bodies
        self.first_position = first_position
        self.last_position = first_position + len(bodies) // 2 - 1
        self.crc32c = entry_crc32c(data)
        self.size_bytes = len(data)
        self.memory_bytes = (
            self.size_bytes + MESSAGE_OVERHEAD_BYTES * len(bodies) // 2 + ENTRY_OVERHEAD_BYTES
        )

    @cached_property
    def messages(self) -> list[ConsumerMessage]:
        """Its messages, created on first use."""
        bodies = zip(
            count(self.first_position), self._bodies[::2], self._bodies[1::2], strict=False
        )
        return [
            ConsumerMessage(at, payload, _decode_properties(of) if of else {})
            for at, payload, of in bodies
        ]


def decode_entry(data: bytes, previous_crc32c: int | None) -> TopicEntry:
    """Return a checked entry; `previous_crc32c` is None when the entry before is unknown. Raises as
    `check_head`.
    """
    _, messages, first_id = check_head(
        data, _CHECKED, magic=ENTRY_MAGIC, version=ENTRY_FORMAT, previous_crc32c=previous_crc32c
    )
    try:
        lengths = struct.unpack_from(f"<{2 * messages}I", data, ENTRY_HEADER_BYTES)
        ends = list(accumulate(lengths, initial=ENTRY_HEADER_BYTES + 4 * len(lengths)))
        entry = TopicEntry([data[start:end] for start, end in pairwise(ends)], data, first_id)
        if ends[-1] != len(data) or not entry.messages:
            raise ValueError(f"it has {len(data)} bytes, and its messages end at {ends[-1]}")
    except (struct.error, msgspec.DecodeError, ValueError) as error:
        raise Corrupt(
            f"entry at position {first_id} passes its checksum but does not decode: {error}"
        ) from error
    return entry


class EntryCache:
    """The last produced or read entries of all topics, up to `CACHE_BYTES_MAX` in memory.

    Entries of a removed topic are evicted in time, as all others.
    """

    def __init__(self) -> None:
        self._entries = defaultdict[int, list[TopicEntry]](list)
        """By log id, in the order of positions."""
        self._order = deque[tuple[int, TopicEntry]]()
        self._bytes = 0

    def find(self, log_id: int, message_id: int) -> TopicEntry | None:
        """Return the entry that holds a message, None when it is not cached."""
        entries = self._entries.get(log_id, [])
        at = bisect_left(entries, message_id, key=_LAST)
        if at == len(entries) or entries[at].first_position > message_id:
            return None
        return entries[at]

    def messages(self, log_id: int, ids: Sequence[int], start: int = 0) -> list[ConsumerMessage]:
        """Return the messages of `ids[start:]` that are in the entry of `ids[start]`; empty when
        that entry is not cached. The ids ascend.
        """
        if (entry := self.find(log_id, ids[start])) is None:
            return []
        known = entry.messages
        first = entry.first_position
        return [
            known[each - first]
            for each in ids[start : bisect_right(ids, entry.last_position, start)]
        ]

    def put(self, log_id: int, entry: TopicEntry) -> None:
        """Cache an entry, and evict the oldest ones above `CACHE_BYTES_MAX`."""
        if self.find(log_id, entry.last_position):
            return
        insort(self._entries[log_id], entry, key=_LAST)
        self._order.append((log_id, entry))
        self._bytes += entry.memory_bytes
        while self._bytes > CACHE_BYTES_MAX and len(self._order) > 1:  # always keep the newest
            self._forget(*self._order.popleft())

    def _forget(self, log_id: int, entry: TopicEntry) -> None:
        self._bytes -= entry.memory_bytes
        entries = self._entries[log_id]
        del entries[bisect_left(entries, entry.last_position, key=_LAST)]
        if not entries:
            del self._entries[log_id]
