"""The check of one log, entry by entry: what it believes, and how it names what it does not."""

from typing import cast

import pytest
from rocksdict import Rdict

from streamingnode.care.findings import Report
from streamingnode.care.salvage import ClosedLog, good_entries
from tests.wal.entries import into_entry
from wal.codec import encode_entry, entry_crc32c
from wal.headers import MessageType, TimeTickHeader
from wal.message import MutableMessage

TICK = 1 << 40


def chain(
    *counts: int, first: int = 1, terms: tuple[int, ...] = (), ticks: tuple[int, ...] = ()
) -> list[tuple[int, bytes]]:
    """Return (last position, bytes) of entries with so many messages each, that follow each
    other.
    """
    entries = []
    position = first
    crc32c = 0
    for index, count in enumerate(counts):
        term = terms[index] if terms else 1
        tick = ticks[index] if ticks else TICK + position
        messages = [
            MutableMessage(MessageType.TIME_TICK, TimeTickHeader(), time_tick=tick, wal_term=term)
            for _ in range(count)
        ]
        data = encode_entry(into_entry(messages, first_position=position), previous_crc32c=crc32c)
        crc32c = entry_crc32c(data)
        position = position + count
        entries.append((position - 1, data))
    return entries


def check(entries: list[tuple[int, bytes]], *, first: int = 1, floor: int = 0) -> Report:
    report = Report()
    log = ClosedLog(log_id=1, entries=cast("Rdict", None), first=first, end=floor, is_torn=False)
    for _ in good_entries(log, entries, report):
        pass
    return report


def places(report: Report) -> list[str]:
    return [finding.place for finding in report.damages]


def test_entries_that_follow_each_other_are_sound() -> None:
    report = check(chain(1, 3, 2), floor=6)
    assert report.findings == []
    assert report.counts == {"log entries": 3, "log positions": 6}


def test_a_truncated_log_begins_where_its_record_says() -> None:
    assert check(chain(2, 2, first=7), first=7, floor=10).findings == []
    assert places(check(chain(2, 2, first=7), first=5)) == ["log 'p0', positions 5 to 6"]


@pytest.mark.parametrize("missing, place", [(0, "1 to 1"), (1, "2 to 4")])
def test_an_entry_that_is_missing_is_named_by_its_positions(missing: int, place: str) -> None:
    entries = chain(1, 3, 2)
    del entries[missing]
    assert places(check(entries, floor=6)) == [f"log 'p0', positions {place}"]


def test_a_missing_end_is_short_of_the_floor() -> None:
    assert places(check(chain(1, 3, 2)[:2], floor=6)) == ["log 'p0', positions 5 to 6"]


def test_a_flipped_bit_takes_its_own_entry_and_no_other() -> None:
    entries = chain(1, 3, 2)
    position, data = entries[1]
    entries[1] = position, data[:60] + bytes([data[60] ^ 4]) + data[61:]
    report = check(entries, floor=6)
    assert places(report) == ["log 'p0', positions 2 to 4"]
    assert "fails its checksum" in report.findings[0].detail


def test_an_entry_of_another_history_breaks_the_chain() -> None:
    entries = chain(1, 3, 2)
    entries[2] = chain(1, 2, 1, 2, ticks=(5, TICK + 2, TICK + 4, TICK + 5))[3]
    assert places(check(entries, floor=6)) == ["log 'p0', positions 5 to 6"]


def test_an_entry_under_another_key_is_not_believed() -> None:
    entries = chain(1, 3, 2)
    entries[1] = 3, entries[1][1]
    assert places(check(entries, floor=6)) == ["log 'p0', positions 2 to 4"]


def test_an_entry_twice_is_damage() -> None:
    entries = chain(1, 3, 2)
    entries.insert(2, entries[1])
    assert len(places(check(entries, floor=6))) == 1


@pytest.mark.parametrize(
    "terms, ticks", [((2, 1), (TICK, TICK + 1)), ((1, 1), (TICK, TICK))], ids=["term", "tick"]
)
def test_a_tick_or_term_that_goes_back_is_named(
    terms: tuple[int, ...], ticks: tuple[int, ...]
) -> None:
    report = check(chain(1, 1, terms=terms, ticks=ticks), floor=2)
    assert places(report) == ["log 'p0', positions 2 to 2"]
