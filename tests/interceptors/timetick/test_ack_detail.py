import pytest

from interceptors.acks import AckDetail, AckKind
from wal.message import LogEntry


def entry(tick: int) -> LogEntry:
    return LogEntry(
        first_position=1, time_tick=tick, last_confirmed_position=1, wal_term=1, crc32c=0, size_bytes=1, messages=()
    )


@pytest.mark.parametrize(
    "kind, tick, carried",
    [
        pytest.param(AckKind.SYNC, 0, None, id="tick zero"),
        pytest.param(AckKind.SYNC, 5, entry(5), id="idle tick with an entry"),
        pytest.param(AckKind.FAILED, 5, entry(5), id="failure with an entry"),
        pytest.param(AckKind.ENTRY, 5, None, id="entry without one"),
        pytest.param(AckKind.ENTRY, 5, entry(6), id="entry of another tick"),
    ],
)
def test_impossible_detail_is_refused(kind: AckKind, tick: int, carried: LogEntry | None) -> None:
    with pytest.raises(AssertionError):
        AckDetail(kind, tick, carried)


def test_entry_confirms_its_own_tick() -> None:
    assert AckDetail(AckKind.ENTRY, 5, entry(5)).tick == 5
