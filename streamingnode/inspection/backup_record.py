"""What a backup says about itself: whose it is, up to where, and every file of it with length and checksum. No I/O.

Two lines as in a cut manifest: a JSON document and its CRC32C. It is written last, so a backup without it is not finished.
Its presence keeps a node from being opened in the backup, which would change it. `docs/format.md`, section "Backup".
"""

import msgspec

from wal.codec import crc32c
from wal.errors import Corrupt, UnsupportedFormat

RECORD_FORMAT = 1


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file; `path` is relative to the backup."""

    path: str
    bytes: int
    crc32c: int


class BackupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One backup: everything that node `node_id` acknowledged up to `tick`; `cut` is the newest cut in it."""

    format: int
    node_id: str
    term: int
    tick: int
    cut: int
    made_ms: int
    files: tuple[CopiedFile, ...]

    @property
    def bytes(self) -> int:
        """How many bytes its files have."""
        return sum(file.bytes for file in self.files)


def encode_record(record: BackupRecord) -> bytes:
    """Return the record's file content."""
    document = msgspec.json.encode(record)
    return document + b"\ncrc32c:%08x\n" % crc32c(document)


def decode_record(content: bytes, *, name: str) -> BackupRecord:
    """Return the record in `content`. Raises `Corrupt`, or `UnsupportedFormat` for one of a newer release."""
    document, _, trailer = content.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32c(document):
        raise Corrupt(f"{name} fails its checksum — restore from another backup")
    try:
        version = msgspec.json.decode(document, type=_Versioned).format
        if version != RECORD_FORMAT:
            raise UnsupportedFormat(f"{name} has format {version}, this release reads {RECORD_FORMAT}")
        record = msgspec.json.decode(document, type=BackupRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{name} is no record of a backup: {error} — restore from another backup") from error
    for file in record.files:
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise Corrupt(f"{name} names {file.path!r}, which is outside of it — restore from another backup")
    return record


class _Versioned(msgspec.Struct):
    format: int
