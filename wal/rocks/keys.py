"""Keys in the database: bytes, big endian, so that they sort as their numbers do.

Column family `default`: `s<name>` facts about the store, `t<name>` log id of a pchannel, `f<log id>` first position kept,
`m<key>` the state map. Column family `entries`: `<log id><last position>`. Log ids are numbers, so no log's keys are a
prefix of another's, whatever the pchannels are called.
"""

import struct

FORMAT_KEY = b"sformat"
NODE_ID_KEY = b"snode_id"
TERM_KEY = b"sterm"
DURABILITY_KEY = b"sdurability"
"""What an acknowledgement meant in the last term; absent means `fsync`."""
META_VERSION_KEY = b"smeta_version"
"""Counts the changes of the state map, so that a lost one is missed like a lost entry."""

LOG_ID_PREFIX = b"t"
FIRST_POSITION_PREFIX = b"f"
META_PREFIX = b"m"

_ENTRY = struct.Struct(">IQ")
_NUMBER = struct.Struct(">Q")
_LOG_ID = struct.Struct(">I")


def entry_key(log_id: int, last_position: int) -> bytes:
    """Return the key of the entry whose last message has `last_position`; a seek to any position it holds finds it."""
    return _ENTRY.pack(log_id, last_position)


def split_entry_key(key: bytes) -> tuple[int, int]:
    """Return the log id and the last position in an entry's key."""
    log_id, position = _ENTRY.unpack(key)
    return log_id, position


def log_id_key(name: str) -> bytes:
    """Return the key that holds the id of the log called `name`."""
    return LOG_ID_PREFIX + name.encode()


def encode_log_id(log_id: int) -> bytes:
    """Return a log id as stored."""
    return _LOG_ID.pack(log_id)


def decode_log_id(data: bytes) -> int:
    """Return the log id `encode_log_id` wrote."""
    log_id: int = _LOG_ID.unpack(data)[0]
    return log_id


def first_position_key(log_id: int) -> bytes:
    """Return the key that holds the first position kept of a log; absent until it is truncated."""
    return FIRST_POSITION_PREFIX + _LOG_ID.pack(log_id)


def meta_key(key: str) -> bytes:
    """Return the key of an item of the state map."""
    return META_PREFIX + key.encode()


def encode_number(number: int) -> bytes:
    """Return an unsigned 64-bit number as stored."""
    return _NUMBER.pack(number)


def decode_number(data: bytes) -> int:
    """Return the number `encode_number` wrote."""
    number: int = _NUMBER.unpack(data)[0]
    return number
