"""The fencing token of a node directory: its latest owner's term and a random number, in a sector of the floor file.

The locks keep a second owner out. Where they do not work, or the directory is replaced under its owner, the token tells.
Each opening writes its own before it opens the database for good, and the writer compares before each batch and again before it
acknowledges. An owner that finds another one is fenced. What it acknowledged before was synced before the other token, so
the other owner, who reads after writing it, has it.
"""

import os
import secrets
from pathlib import Path

from wal.errors import ChannelFenced
from wal.files import open_regular
from wal.rocks.floor import CLAIM_BYTES, CLAIM_OFFSET, FLOOR_NAME, decode_claim_term, encode_claim

NONCE_BYTES = 16


class Claim:
    """The token of one opening of a node directory; `take` comes first. One thread at a time; `check` costs microseconds."""

    __slots__ = ("_descriptor", "_identity", "_mine", "_nonce", "_path", "term")

    def __init__(self, directory: Path) -> None:
        self.term = 0
        """The latest term taken; 0 before the first."""
        self._path = str(directory / FLOOR_NAME)
        self._descriptor = open_regular(directory / FLOOR_NAME, os.O_RDWR)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._identity = _identity(os.fstat(self._descriptor))
        self._mine = b""

    def take(self, term: int) -> None:
        """Write the token for `term`, durably. Raises `OSError`."""
        token = encode_claim(term, self._nonce)
        os.pwrite(self._descriptor, token, CLAIM_OFFSET)
        self._mine = token  # not before: after a write that failed, the token on the disk is still the last one of ours
        self.term = term
        os.fsync(self._descriptor)

    def check(self) -> None:
        """Raise `ChannelFenced` when the token is another owner's, or another floor file is in the place of this one."""
        found = os.pread(self._descriptor, CLAIM_BYTES, CLAIM_OFFSET)
        if found != self._mine:
            raise ChannelFenced(
                f"{Path(self._path).parent} was taken over by another owner, of term {decode_claim_term(found)} — "
                "stop one of the two: this one writes no more"
            )
        try:
            in_place = _identity(os.stat(self._path)) == self._identity  # noqa: PTH116 - twice for each batch of writes
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise ChannelFenced(
                f"{self._path} was replaced or removed under its owner — put the directory back, or open the new one again"
            )

    def close(self) -> None:
        """Close the file; idempotent. The token stays, so that a later owner's term is above it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
