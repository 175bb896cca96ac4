"""Which cut is the earliest that is kept, as the log store remembers it. No I/O.

The number goes up, durably, before retention removes the cuts below it. So a cut that retention took is told from one that
is lost; whatever no cut names any more is only removed when none is lost.
"""

from collections.abc import Sequence

import msgspec

from wal.errors import Corrupt

CUTS_RECORD = "cuts/"
FIRST_CUT = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(int).decode


def kept_cuts_key(pchannel: str) -> str:
    """Return the key that a pchannel's number has in the log store's map."""
    return f"{CUTS_RECORD}{pchannel}"


def encode_first_kept(number: int) -> bytes:
    """Return the stored form of the number of the earliest cut that is kept."""
    return _encode(number)


def decode_first_kept(content: bytes | None) -> int:
    """Return a stored number, that of the first cut when nothing was ever removed. Raises `Corrupt` for other bytes."""
    if content is None:
        return FIRST_CUT
    try:
        return _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the number of the earliest cut kept does not decode: {error}") from error


def are_all_there(numbers: Sequence[int], first_kept: int) -> bool:
    """Whether no cut is missing between the earliest that must be there and the newest of these ascending numbers.

    Of those below, any may be on their way out while they are listed.
    """
    return not numbers or sum(number >= first_kept for number in numbers) == max(numbers[-1] - first_kept + 1, 0)
