"""Who may write to a node directory, when no lock can tell: the claim of its latest owner, in a sector of the floor file.

Locks keep a second owner out. They fail on file systems without them, and when a directory is replaced under a running
owner. So each opening writes its term and a number of its own before it looks at what the database holds, and the
writer compares before each write and again before it acknowledges. An owner that finds another claim is fenced. What it
acknowledged before was synced before the other claim, so the other owner, who reads after claiming, has it.
"""

import os
import secrets
from pathlib import Path

from wal.errors import ChannelFenced
from wal.files import open_regular
from wal.rocks.floor import CLAIM_BYTES, CLAIM_OFFSET, FLOOR_NAME, decode_claim_term, encode_claim

NONCE_BYTES = 16


class Claim:
    """The claim of one opening on a node directory; `take` comes first. Any thread; `check` costs some microseconds."""

    __slots__ = ("_before", "_descriptor", "_identity", "_mine", "_nonce", "_path", "_place", "_taking", "term")

    def __init__(self, directory: Path) -> None:
        self.term = 0
        """The latest term claimed; 0 before the first."""
        self._path = directory / FLOOR_NAME
        self._place = str(self._path)
        self._descriptor = open_regular(self._path, os.O_RDWR)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._identity = _identity(os.fstat(self._descriptor))
        self._before = self._mine = self._taking = os.pread(self._descriptor, CLAIM_BYTES, CLAIM_OFFSET)

    def take(self, term: int) -> None:
        """Claim the directory for `term`, durably. Raises `OSError`."""
        claim = encode_claim(term, self._nonce)
        self._taking = claim  # other threads may look in between
        os.pwrite(self._descriptor, claim, CLAIM_OFFSET)
        self._mine = claim  # not before: after a write that failed, the claim on the disk is still the last one of ours
        self.term = term
        os.fsync(self._descriptor)

    def check(self) -> None:
        """Raise `ChannelFenced` when somebody else has claimed the directory, or another one is in its place."""
        self.check_number()
        try:
            in_place = _identity(os.stat(self._place)) == self._identity  # noqa: PTH116 - twice for each batch of writes
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise ChannelFenced(
                f"{self._path} was replaced or removed under its owner — put the directory back, or open the new one again"
            )

    def check_number(self) -> None:
        """Raise `ChannelFenced` when somebody else has claimed the directory: one read of a page."""
        before = (self._mine, self._taking)  # a reopening may take the next one between the read and the comparison
        found = os.pread(self._descriptor, CLAIM_BYTES, CLAIM_OFFSET)
        if found not in (*before, self._mine, self._taking):
            raise ChannelFenced(
                f"{self._path.parent} was taken over by another owner, of term {decode_claim_term(found)} — "
                "stop one of the two: this one writes no more"
            )

    def keep(self) -> None:
        """Withdraw nothing any more: an owner before that went on would write where nobody looks."""
        self._before = self._mine

    def withdraw(self) -> None:
        """Let the owner before go on: this opening failed. Does nothing once somebody else has claimed, nor after `keep`."""
        if self._descriptor >= 0 and os.pread(self._descriptor, CLAIM_BYTES, CLAIM_OFFSET) == self._mine:
            os.pwrite(self._descriptor, self._before, CLAIM_OFFSET)
        self.close()

    def close(self) -> None:
        """Let go of the file; idempotent. The claim stays, so that a later owner's term is above it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
