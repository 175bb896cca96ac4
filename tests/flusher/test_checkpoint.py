"""The checkpoint's encoding, and the bounded history by which retention finds positions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flusher.manifest import (
    HISTORY_STEPS,
    NO_CHECKPOINT,
    Checkpoint,
    CutPosition,
    decode_checkpoint,
    extend_history,
)
from wal.errors import Corrupt, UnsupportedFormat
from wal.timetick import compose_tick

DAY_MS = 86_400_000


def test_a_checkpoint_comes_back_as_it_was_stored() -> None:
    checkpoint = Checkpoint(
        cut_number=3,
        tick=9,
        position=4,
        manifest_crc32c=7,
        history=(CutPosition(9, 4, 8),),
        shard_state=b"state",
    )
    assert decode_checkpoint(msgspec.msgpack.encode(checkpoint)) == checkpoint
    assert decode_checkpoint(None) == NO_CHECKPOINT


def test_a_checkpoint_of_a_newer_release_is_refused() -> None:
    with pytest.raises(UnsupportedFormat):
        decode_checkpoint(msgspec.msgpack.encode(Checkpoint(format=3)))


STORED = msgspec.msgpack.encode(
    Checkpoint(
        cut_number=3,
        tick=compose_tick(1_000_000_000_000),
        position=4,
        manifest_crc32c=7,
        history=(CutPosition(8, 2, 7), CutPosition(9, 4, 8)),
        shard_state=b"state",
        producers=b"producers",
    )
)


@pytest.mark.parametrize("end", range(len(STORED)))
def test_a_checkpoint_that_is_cut_short_is_corrupt(end: int) -> None:
    with pytest.raises(Corrupt):
        decode_checkpoint(STORED[:end])


@given(junk=st.binary(min_size=1, max_size=8))
def test_bytes_behind_a_checkpoint_are_corrupt(junk: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_checkpoint(STORED + junk)


def test_flipped_bit_is_refused_or_another_value_and_never_a_field_left_out() -> None:
    """Values have no checksum of their own: the state map is RocksDB's, which has."""
    refused = 0
    for bit in range(8 * len(STORED)):
        damaged = bytearray(STORED)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            decoded = decode_checkpoint(bytes(damaged))
        except (Corrupt, UnsupportedFormat):
            refused += 1
        else:
            assert msgspec.msgpack.encode(decoded) == damaged
    assert refused > 4 * len(STORED), "most bytes are names, lengths and types"


@given(gaps_ms=st.lists(st.integers(1, DAY_MS // 50), min_size=1, max_size=400))
def test_history_always_knows_the_bound_to_within_two_steps(gaps_ms: list[int]) -> None:
    history: tuple[CutPosition, ...] = ()
    cuts: list[CutPosition] = []
    now_ms = 1_000_000_000_000
    for number, gap_ms in enumerate(gaps_ms, 1):
        now_ms += gap_ms
        cuts.append(CutPosition(compose_tick(now_ms), number, now_ms))
        history = extend_history(history, cuts[-1], now_ms=now_ms, retention_ms=DAY_MS)
        assert history[-1] == cuts[-1]
        assert list(history) == sorted(history, key=lambda cut: cut.tick)
        old = [cut for cut in cuts if cut.tick <= compose_tick(now_ms - DAY_MS)]
        kept = [cut for cut in history if cut.tick <= compose_tick(now_ms - DAY_MS)]
        # Never too high; too low by no more than what thinning may have taken.
        exact = old[-1].tick if old else 0
        found = kept[-1].tick if kept else 0
        assert found <= exact
        if old:
            behind = [cut for cut in old if cut.tick > found]
            assert not behind or behind[-1].tick - behind[0].tick <= compose_tick(
                2 * DAY_MS // HISTORY_STEPS
            )


def test_history_stays_bounded_when_cuts_are_made_all_the_time() -> None:
    history: tuple[CutPosition, ...] = ()
    for number in range(12_000):  # a day is 8,640
        now_ms = 1_000_000_000_000 + number * 10_000
        step = CutPosition(compose_tick(now_ms), number, now_ms)
        history = extend_history(history, step, now_ms=now_ms, retention_ms=DAY_MS)
    assert HISTORY_STEPS / 2 < len(history) <= 2 * HISTORY_STEPS + 4


def test_cuts_under_ticks_that_stand_ahead_of_the_clock_get_old_by_the_clock() -> None:
    """A clock was ten years ahead for two cuts; the ticks of all later ones follow theirs."""
    now_ms = 1_700_000_000_000
    ahead_ms = 10 * 365 * DAY_MS
    history: tuple[CutPosition, ...] = ()
    for number in (1, 2):
        ahead = now_ms + ahead_ms + number
        history = extend_history(
            history,
            CutPosition(compose_tick(ahead), number, ahead),
            now_ms=ahead,
            retention_ms=DAY_MS,
        )
    tick = history[-1].tick
    hours = 72
    for hour in range(1, hours + 1):
        step = CutPosition(tick + hour, 2 + hour, now_ms + hour * DAY_MS // 24)
        history = extend_history(history, step, now_ms=step.made_ms, retention_ms=DAY_MS)
    now_ms += hours * DAY_MS // 24
    assert history[0].position == 2 + hours - 24, "the newest that is a day old bounds what is kept"
    assert [cut.age_ms(now_ms) for cut in history] == [
        hour * DAY_MS // 24 for hour in range(24, -1, -1)
    ]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, DAY_MS), st.integers(-40 * DAY_MS, 40 * DAY_MS)),
        min_size=1,
        max_size=40,
    )
)
def test_no_cut_is_told_to_be_older_than_it_is_by_a_clock_that_was_ahead(
    steps: list[tuple[int, int]],
) -> None:
    true_ms = 1_700_000_000_000
    made: dict[int, int] = {}
    history: tuple[CutPosition, ...] = ()
    tick = 0
    for number, (gap_ms, wrong_ms) in enumerate(steps, 1):
        true_ms += gap_ms
        clock_ms = true_ms + max(0, wrong_ms)
        tick = max(tick + 1, compose_tick(clock_ms))
        made[number] = true_ms
        history = extend_history(
            history,
            CutPosition(tick, number, clock_ms),
            now_ms=clock_ms,
            retention_ms=1000 * DAY_MS,
        )
        assert all(cut.age_ms(true_ms) <= true_ms - made[cut.position] for cut in history)
