"""The claim of an owner over attempts that fail."""

import errno
import os
from pathlib import Path

import pytest

from wal.errors import ChannelFenced
from wal.rocks.claim import Claim
from wal.rocks.floor import create_floor


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    create_floor(tmp_path, "0" * 32)
    return Claim(tmp_path)


def test_owner_whose_next_claim_was_not_written_is_not_fenced_by_its_last_one(
    claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim.take(4)

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="Input/output error"):
            claim.take(5)
    claim.check()
    claim.take(5)
    claim.check()
    claim.close()


def test_owner_is_fenced_by_a_claim_of_another_opening(claim: Claim, tmp_path: Path) -> None:
    claim.take(4)
    other = Claim(tmp_path)
    other.take(5)
    with pytest.raises(ChannelFenced, match="of term 5"):
        claim.check()
    other.close()
    claim.close()
