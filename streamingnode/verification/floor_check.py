"""The floor file: whether both of its slots are what was written. Blocks for one read.

One slot may be torn by a power cut: the other one, older by a sync, counts then, and nothing is forgotten but how far the
last fifth of a second had come. That is worth a warning, because a flipped bit looks the same.
"""

from pathlib import Path

from streamingnode.verification.finding import RESTORE, Kind, Report
from wal.errors import Corrupt, StreamingNodeError, UnsupportedFormat
from wal.files import read_regular
from wal.rocks.floor import (
    FLOOR_BYTES,
    FLOOR_NAME,
    FLOOR_READ_BYTES_MAX,
    PROMISE_OFFSET,
    SLOT_BYTES,
    TOKEN_BYTES,
    TOKEN_OFFSET,
    Floor,
    decode_floor,
    decode_promise,
    decode_slot,
    decode_token_term,
)

_NEXT_START = "nothing to do: the next start writes it again"


def check_floor(directory: Path, report: Report) -> Floor | None:
    """Check the floor file and return what it says; None when it says nothing."""
    try:
        data = read_regular(directory / FLOOR_NAME, bytes_max=FLOOR_READ_BYTES_MAX)
    except FileNotFoundError:
        report.damage(Kind.MISSING, FLOOR_NAME, "without it nobody knows how far the log had come", RESTORE)
        return None
    except Corrupt as error:
        report.damage(Kind.UNREADABLE, FLOOR_NAME, error.happened, RESTORE)
        return None
    report.count("floor files")
    report.bytes += len(data)
    try:
        floor = decode_floor(data)
    except UnsupportedFormat as error:
        report.damage(Kind.UNREADABLE, FLOOR_NAME, str(error), "use the release that wrote it, or a newer one")
        return None
    except StreamingNodeError as error:
        report.damage(Kind.CHECKSUM, FLOOR_NAME, error.happened, RESTORE)
        return None
    _check_parts(data, report)
    return floor


def _check_parts(data: bytes, report: Report) -> None:
    if len(data) != FLOOR_BYTES:
        report.warn(Kind.LENGTH, FLOOR_NAME, f"has {len(data)} bytes, not {FLOOR_BYTES}", _NEXT_START)
    for number in (0, 1):
        slot = data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
        if any(slot) and decode_slot(slot) is None:
            detail = f"slot {number} fails its checksum: torn by a power cut, or damaged; the other one counts"
            report.warn(Kind.CHECKSUM, FLOOR_NAME, detail, _NEXT_START)
    promise, token = data[PROMISE_OFFSET:TOKEN_OFFSET], data[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES]
    if any(promise) and not decode_promise(promise):
        report.warn(Kind.CHECKSUM, FLOOR_NAME, "the promised tick fails its checksum", _NEXT_START)
    if any(token) and not decode_token_term(token):
        report.warn(Kind.CHECKSUM, FLOOR_NAME, "its owner's fencing token fails its checksum", _NEXT_START)
