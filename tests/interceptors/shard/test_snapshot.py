import msgspec
import pytest

from interceptors.shard.state import SNAPSHOT_FORMAT, ShardState
from wal.errors import Corrupt, UnsupportedFormat


def test_snapshot_of_a_newer_release_is_refused_as_such() -> None:
    newer = msgspec.msgpack.encode({"format": SNAPSHOT_FORMAT + 1, "something": "else"})
    with pytest.raises(UnsupportedFormat, match="format 2"):
        ShardState.restore(newer)


@pytest.mark.parametrize("damaged", [b"", b"\xc1", b"\x80", ShardState().snapshot()[:-1]], ids=repr)
def test_damaged_snapshot_is_refused_as_corrupt(damaged: bytes) -> None:
    with pytest.raises(Corrupt):
        ShardState.restore(damaged)


def test_empty_state_survives_its_snapshot() -> None:
    assert ShardState.restore(ShardState().snapshot()).snapshot() == ShardState().snapshot()
