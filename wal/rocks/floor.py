"""The floor file: the acknowledged end of each log, kept outside of the database, and the token of
the directory's owner.

With it a start detects what RocksDB has lost without an error, and gives no tick below the recorded
one. Layout (little endian, `docs/adr/0004-log-layout-on-rocksdb.md`): two slots of 4 KiB, of which
the valid one with the higher generation counts. Sectors of their own hold a promised tick and the
fencing token of the latest owner.
"""

import os
import secrets
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from wal.codec import crc32c
from wal.errors import ChannelFenced, Corrupt, UnsupportedFormat
from wal.failpoint import failpoint
from wal.files import open_regular, read_regular, write_file

# Marks a directory as a backup, which must not be opened as a node: opening would change it.
BACKUP_RECORD_NAME = "backup.json"
FLOOR_NAME = "floor"
FLOOR_TEMPORARY_NAME = f"{FLOOR_NAME}.tmp"
FLOOR_FORMAT = 1
FLOOR_MAGIC = b"SNFL"
SLOT_BYTES = 4096
PROMISE_OFFSET = 2 * SLOT_BYTES
TOKEN_OFFSET = PROMISE_OFFSET + 512
FLOOR_BYTES = 3 * SLOT_BYTES
FLOOR_READ_BYTES_MAX = 16 * FLOOR_BYTES
"""A longer file is not a floor file. In a shorter one, bytes after `FLOOR_BYTES` are ignored."""

_CHECKSUM_BYTES = 4
"""Before each part: the CRC32C of the rest of it, little endian."""
_HEAD = struct.Struct("<4sHH32sQQQQ")
"""magic, format, log count, node id, generation, term, tick, version of the state map."""
_POSITION = struct.Struct("<IQ")  # log id, last durable position
_PROMISE = struct.Struct("<Q")  # tick
_NONCE_BYTES = 16
_TOKEN = struct.Struct(f"<Q{_NONCE_BYTES}s")  # term, random number of the owner
TOKEN_BYTES = _CHECKSUM_BYTES + _TOKEN.size

LOGS_MAX = (SLOT_BYTES - _CHECKSUM_BYTES - _HEAD.size) // _POSITION.size
"""Maximum number of logs of one store."""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """What was durable when the floor was written. `tick` is the highest tick in the log or
    promised; `positions` holds the last durable position by log id.
    """

    node_id: str
    generation: int = 0
    term: int = 0
    tick: int = 0
    meta_version: int = 0
    positions: Mapping[int, int] = {}


def encode_slot(floor: Floor) -> bytes:
    """Return the used bytes of a slot."""
    numbers = floor.generation, floor.term, floor.tick, floor.meta_version
    head = _HEAD.pack(
        FLOOR_MAGIC, FLOOR_FORMAT, len(floor.positions), floor.node_id.encode(), *numbers
    )
    return _with_checksum(
        head + b"".join(_POSITION.pack(*item) for item in floor.positions.items())
    )


def decode_slot(data: bytes) -> Floor | None:
    """Return the floor in a slot, None when the slot is not valid. Raises `UnsupportedFormat` for
    the format of a newer release.
    """
    if len(data) < _CHECKSUM_BYTES + _HEAD.size:
        return None
    magic, version, count, node_id, generation, term, tick, meta_version = _HEAD.unpack_from(
        data, _CHECKSUM_BYTES
    )
    body = _checked(data, _HEAD.size + count * _POSITION.size)
    if magic != FLOOR_MAGIC or body is None:
        return None
    if version != FLOOR_FORMAT:
        raise UnsupportedFormat(
            f"the floor file has format {version}, this release reads {FLOOR_FORMAT}"
        )
    return Floor(
        node_id=node_id.rstrip(b"\0").decode(errors="replace"),
        generation=generation,
        term=term,
        tick=tick,
        meta_version=meta_version,
        positions=dict(_POSITION.iter_unpack(body[_HEAD.size :])),
    )


def encode_promise(tick: int) -> bytes:
    """Return the bytes of a promised tick."""
    return _with_checksum(_PROMISE.pack(tick))


def encode_token(term: int, nonce: bytes) -> bytes:
    """Return the bytes of an owner's fencing token."""
    return _with_checksum(_TOKEN.pack(term, nonce))


def _first_number(data: bytes, layout: struct.Struct) -> int:
    body = _checked(data, layout.size)
    return 0 if body is None else int(layout.unpack(body)[0])


decode_promise: Callable[[bytes], int] = partial(_first_number, layout=_PROMISE)
"""Return the promised tick, 0 when there is none or its write was cut short."""
decode_token_term: Callable[[bytes], int] = partial(_first_number, layout=_TOKEN)
"""Return the term of a fencing token, 0 when there is none or its write was cut short."""


def _with_checksum(body: bytes) -> bytes:
    return crc32c(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def _checked(data: bytes, size: int) -> bytes | None:
    """Return `size` bytes after a checksum, None when they are missing or fail the checksum."""
    end = _CHECKSUM_BYTES + size
    body = data[_CHECKSUM_BYTES:end]
    return body if len(body) == size and _with_checksum(body) == data[:end] else None


def decode_floor(data: bytes) -> Floor:
    """Return the newest floor in a whole file. Raises `Corrupt` when neither slot is valid."""
    slots = [slot for at in (0, SLOT_BYTES) if (slot := decode_slot(data[at : at + SLOT_BYTES]))]
    if not slots:
        raise Corrupt(
            "neither slot of the floor file is valid — restore the node directory from a backup"
        )
    newest = max(slots, key=lambda slot: slot.generation)
    return msgspec.structs.replace(
        newest,
        tick=max(newest.tick, decode_promise(data[PROMISE_OFFSET:TOKEN_OFFSET])),
        term=max(newest.term, decode_token_term(data[TOKEN_OFFSET:])),
    )


def write_floor(directory: Path, floor: Floor) -> None:
    """Replace the floor file of a node that is not open, atomically. The caller syncs the
    directory.
    """
    temporary = directory / FLOOR_TEMPORARY_NAME
    write_file(
        temporary,
        encode_slot(msgspec.structs.replace(floor, generation=0)).ljust(FLOOR_BYTES, b"\0"),
    )
    temporary.rename(directory / FLOOR_NAME)


def is_begun_floor(data: bytes) -> bool:
    """Whether a temporary file is a floor or what a crash leaves of one: nothing, zeros, or a part
    of it.
    """
    return len(data) <= FLOOR_BYTES and (
        not any(data) or data[_CHECKSUM_BYTES:][: len(FLOOR_MAGIC)] == FLOOR_MAGIC
    )


def read_floor(directory: Path) -> Floor | None:
    """Return the floor of a node directory, None when there is no floor file. Raises `Corrupt`,
    `UnsupportedFormat`.
    """
    try:
        return decode_floor(read_regular(directory / FLOOR_NAME, bytes_max=FLOOR_READ_BYTES_MAX))
    except FileNotFoundError:
        return None


class FloorFile:
    """The floor file, held open by the owner of the directory. `sync`, `promise` and `take_token`
    wait for the disk.

    There is no lock: only the writer thread writes the slots, only one call at a time writes the
    promise, and only an opening writes the token. Between two syncs only one slot is written. A
    power cut in the middle of that leaves the other, synced slot: it loses at most one sync
    interval of the floor and nothing of the log. Where `flock` does not work, or the directory is
    replaced under its owner, the token detects it: the writer compares the token before it
    acknowledges.
    """

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / FLOOR_NAME)
        self._descriptor = open_regular(directory / FLOOR_NAME, os.O_RDWR)
        self._status = os.fstat(self._descriptor)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._token = b""
        self.token_term = 0
        """The term of the last token written; 0 before the first."""
        self.dirty = False
        """Whether something was recorded since the last sync."""
        self.reload()

    def reload(self) -> None:
        """Replace `known` by the content of the file. Raises `Corrupt`, `UnsupportedFormat`."""
        floor = decode_floor(os.pread(self._descriptor, FLOOR_READ_BYTES_MAX, 0))
        self._positions = dict(floor.positions)
        self._promised = floor.tick
        self.known = msgspec.structs.replace(
            floor, generation=floor.generation + 1, positions=self._positions
        )
        """The last recorded floor, synced or not; it goes into the slot of its generation."""

    def take_token(self, term: int) -> None:
        """Write the token for `term`; durable on return."""
        token = encode_token(term, self._nonce)
        os.pwrite(self._descriptor, token, TOKEN_OFFSET)
        # Only after the write: if that fails, the previous token is still on the disk.
        self._token = token
        self.token_term = term
        os.fsync(self._descriptor)

    def check_owner(self) -> None:
        """Raise `ChannelFenced` when the token or the floor file is another owner's."""
        self.check_token()
        self.check_place()

    def check_token(self) -> None:
        """Raise `ChannelFenced` when the token in this file is another owner's."""
        found = os.pread(self._descriptor, TOKEN_BYTES, TOKEN_OFFSET)
        if found != self._token:
            raise ChannelFenced(
                f"{Path(self._path).parent} was taken over by another owner, of term "
                f"{decode_token_term(found)} — "
                "stop one of the two: this one writes no more"
            )

    def check_place(self) -> None:
        """Raise `ChannelFenced` when another floor file, or none, is in the place of this one."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - often called
            in_place = os.path.samestat(found, self._status)
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise ChannelFenced(
                f"{self._path} was replaced or removed under its owner — put the directory back, "
                "or open the new one again"
            )

    def record(
        self, positions: Mapping[int, int], *, tick: int = 0, term: int = 0, meta: int = 0
    ) -> None:
        """Raise the floor to what a completed sync made durable. Survives a kill immediately, a
        power cut after `sync`. Writer thread only.
        """
        old = self.known
        self._positions.update(positions)  # the same mapping as `known.positions`
        self.known = msgspec.structs.replace(
            old,
            term=max(old.term, term),
            tick=max(old.tick, tick),
            meta_version=max(old.meta_version, meta),
        )
        os.pwrite(
            self._descriptor, encode_slot(self.known), (self.known.generation & 1) * SLOT_BYTES
        )
        self.dirty = True

    def promise(self, tick: int) -> None:
        """Raise the promised tick; a lower tick changes nothing. Durable on return. Blocks; one
        call at a time.
        """
        if tick > self._promised:
            os.pwrite(self._descriptor, encode_promise(tick), PROMISE_OFFSET)
            # Promises run ahead of the clock, so after a power cut the clock alone would not keep
            # ticks above this one.
            os.fsync(self._descriptor)
            self._promised = tick
            failpoint("append.tick_promised")

    def sync(self) -> None:
        """Make the floor survive a power cut, then turn to the other slot. Writer thread only."""
        os.fsync(self._descriptor)
        # Only now is this slot safe, so only now may the other one be overwritten.
        self.known = msgspec.structs.replace(self.known, generation=self.known.generation + 1)
        self.dirty = False

    def close(self) -> None:
        """Close the file; idempotent. The token stays, so that a later owner's term is above it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
