"""The window against a plain dict of everything that was ever written: it may forget, and never
forgets silently.
"""

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from interceptors.errors import ProducerFenced, SequenceTooOld
from interceptors.window import (
    CLIENT_AGE_MS,
    OUTSTANDING_FACTOR,
    ProducerLimits,
    StoredProducer,
    StoredResult,
    StoredWindow,
    Window,
    decode_window,
    encode_window,
)
from wal.append import AppendResult
from wal.position import CLIENT_PRODUCER_IDS, MemoryMessageId, ProducerStamp
from wal.timetick import add_ms, compose_tick, physical_ms

LIMITS = ProducerLimits(results_per_producer_max=4, results_max=9, results_age_s=0.004)
"""Ticks of the machine below are 1 ms apart, so that results also go by age."""
FIRST_TICK = compose_tick(1_000_000)
producers = st.sampled_from([1, 7, 9])
sequences = st.integers(1, 14)


def result_at(number: int, tick: int = 0) -> AppendResult:
    """Return a result that differs from every other number's."""
    return AppendResult(
        kind=MemoryMessageId,
        first_position=number,
        count=1,
        time_tick=tick or add_ms(FIRST_TICK, number),
        last_confirmed_position=number,
        txn_id=number % 3,
        row_offsets={"p0_1v0": (number, 2)} if number % 2 else {},
    )


class WindowMachine(RuleBasedStateMachine):
    """Writes, retries, zombies, checkpoints and crashes; `written` is the log."""

    saved = Bundle("saved")
    latest: tuple[bytes, int] | None = None

    @initialize()
    def open(self) -> None:
        self.outstanding: set[tuple[int, int]] = set()
        self.window = Window(LIMITS)
        self.written: dict[tuple[int, int], tuple[AppendResult, int]] = {}
        self.epochs = dict.fromkeys([1, 7, 9], 0)
        self.fence_all()

    def fence_all(self) -> None:
        for producer_id, epoch in self.epochs.items():
            self.window.fence(producer_id, epoch)

    def find(self, producer_id: int, sequence: int) -> AppendResult | SequenceTooOld | None:
        try:
            return self.window.find(ProducerStamp(producer_id, self.epochs[producer_id], sequence))
        except SequenceTooOld as error:
            return error

    @rule(producer_id=producers, sequence=sequences)
    def write(self, producer_id: int, sequence: int) -> None:
        key = (producer_id, sequence)
        found = self.find(producer_id, sequence)
        if isinstance(found, SequenceTooOld):
            return
        if key in self.written:
            assert found == self.written[key][0]
            return
        assert found is None
        result = result_at(len(self.written) + 1)
        self.written[key] = result, self.epochs[producer_id]
        self.name_oldest(producer_id, sequence)
        self.window.add(ProducerStamp(producer_id, self.epochs[producer_id], sequence), result)
        if self.window.results == LIMITS.results_max and not self.others():
            self.outstanding.clear()  # there are as many as the window has room for

    @rule(producer_id=producers)
    def write_next(self, producer_id: int) -> None:
        self.write(producer_id, self.window.last_sequence(producer_id) + 1)

    @rule(producer_id=producers, sequence=sequences)
    def begin(self, producer_id: int, sequence: int) -> None:
        """A producer begins a write that may still be a first try, and names its oldest one."""
        if not isinstance(self.find(producer_id, sequence), SequenceTooOld):
            self.outstanding.add((producer_id, sequence))
            self.name_oldest(producer_id, sequence)

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It is the next write that names what is left."""
        self.outstanding.remove(data.draw(st.sampled_from(sorted(self.outstanding))))

    def name_oldest(self, producer_id: int, sequence: int) -> None:
        """Have a write with this sequence name the oldest one that is outstanding beside it."""
        own = [each for key, each in self.outstanding if key == producer_id]
        self.window.settle(producer_id, min([sequence, *own]))

    def others(self) -> list[int]:
        """Return the producers that have results below what they have outstanding."""
        return [
            each
            for each, known in self.window.producers.items()
            if known.sequences and not 0 < known.settled <= known.sequences[0]
        ]

    @rule(producer_id=producers)
    def open_again(self, producer_id: int) -> None:
        self.epochs[producer_id] += 1
        self.window.fence(producer_id, self.epochs[producer_id])

    @precondition(lambda self: any(self.epochs.values()))
    @rule(producer_id=producers, sequence=sequences)
    def zombie_is_refused(self, producer_id: int, sequence: int) -> None:
        if self.epochs[producer_id]:
            with pytest.raises(ProducerFenced):
                self.window.find(ProducerStamp(producer_id, self.epochs[producer_id] - 1, sequence))

    @rule(target=saved, back=st.integers(0, 6))
    def checkpoint(self, back: int) -> tuple[bytes, int]:
        """Save as of a tick that lies some writes back, as a cut does."""
        tick = add_ms(FIRST_TICK, max(0, len(self.written) - back))
        self.latest = encode_window(self.window.freeze(tick, now_ms=0)), tick
        return self.latest

    @rule(saved=saved)
    def crash(self, saved: tuple[bytes, int]) -> None:
        """Go on with a checkpoint and what the log has above its tick, in another process."""
        self.outstanding.clear()
        self.latest = saved
        self.rebuild(saved, {})

    @precondition(lambda self: self.latest is not None)
    @rule()
    def reopen(self) -> None:
        """The same in one process, which knows what is outstanding."""
        assert self.latest is not None
        self.rebuild(self.latest, self.window.outstanding())

    def rebuild(self, saved: tuple[bytes, int], outstanding: dict[int, int]) -> None:
        data, tick = saved
        self.window = decode_window(data, MemoryMessageId, LIMITS, outstanding=outstanding)
        for (producer_id, sequence), (result, epoch) in self.written.items():
            if result.time_tick > tick:
                self.window.add(ProducerStamp(producer_id, epoch, sequence), result)
        self.fence_all()

    @invariant()
    def a_write_in_the_log_is_never_taken_for_a_first_try(self) -> None:
        for (producer_id, sequence), (result, _) in self.written.items():
            found = self.find(producer_id, sequence)
            assert found == result or isinstance(found, SequenceTooOld)

    @invariant()
    def a_write_that_is_outstanding_is_never_too_old(self) -> None:
        for producer_id, sequence in self.outstanding:
            assert not isinstance(self.find(producer_id, sequence), SequenceTooOld)

    @invariant()
    def the_next_sequence_is_always_a_first_try(self) -> None:
        for producer_id in self.epochs:
            last = max(
                (sequence for key, sequence in self.written if key == producer_id), default=0
            )
            assert self.window.last_sequence(producer_id) == last
            assert self.find(producer_id, last + 1) is None

    @invariant()
    def the_newest_results_of_whoever_wrote_last_are_known(self) -> None:
        if self.written:
            producer_id = list(self.written)[-1][0]
            newest = sorted(sequence for key, sequence in self.written if key == producer_id)
            kept = [s for s in newest if isinstance(self.find(producer_id, s), AppendResult)]
            result, _ = self.written[producer_id, newest[-1]]
            age_ms = physical_ms(add_ms(FIRST_TICK, len(self.written))) - physical_ms(
                result.time_tick
            )
            assert newest[-1] in kept or age_ms > LIMITS.results_age_s * 1000

    @invariant()
    def the_bounds_hold(self) -> None:
        assert self.window.results <= LIMITS.results_max
        kept = [isinstance(self.find(*key), AppendResult) for key in self.written]
        assert sum(kept) == self.window.results


TestWindow = WindowMachine.TestCase


def test_as_many_results_as_promised_are_kept_of_a_producer_in_any_order() -> None:
    window = Window(LIMITS)
    for sequence in (50, 10, 40, 30, 20):
        window.add(ProducerStamp(1, 0, sequence), result_at(sequence))
    assert [window.find(ProducerStamp(1, 0, each)) for each in (20, 30, 40, 50)] == list(
        map(result_at, (20, 30, 40, 50))
    )
    with pytest.raises(SequenceTooOld) as caught:
        window.find(ProducerStamp(1, 0, 10))
    assert (caught.value.sequence, caught.value.oldest) == (10, 20)
    assert window.find(ProducerStamp(1, 0, 45)) is None, (
        "a gap above what is forgotten may still be filled"
    )


def test_producer_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ProducerFenced, match="deleted"):
        Window().find(ProducerStamp(3, 1, 1))


def test_least_active_producer_loses_its_results_first() -> None:
    window = Window(ProducerLimits(results_max=3))
    for producer_id, sequence in ((1, 1), (2, 1), (1, 2), (3, 1)):
        window.add(ProducerStamp(producer_id, 0, sequence), result_at(sequence))
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(2, 0, 1))
    assert window.find(ProducerStamp(1, 0, 1)) == result_at(1)
    assert window.last_sequence(2) == 1


def test_results_past_their_age_are_not_saved_but_stay_refused() -> None:
    window = Window(ProducerLimits(results_age_s=60))
    window.add(ProducerStamp(1, 3, 2), result_at(1, tick=FIRST_TICK))
    window.add(ProducerStamp(1, 3, 5), result_at(2, tick=add_ms(FIRST_TICK, 60_000)))
    later = decode_window(
        encode_window(window.freeze(add_ms(FIRST_TICK, 60_001), now_ms=0)), MemoryMessageId
    )
    with pytest.raises(SequenceTooOld):
        later.find(ProducerStamp(1, 3, 2))
    assert later.find(ProducerStamp(1, 3, 5)) == result_at(2, tick=add_ms(FIRST_TICK, 60_000))
    assert later.last_sequence(1) == 5
    with pytest.raises(ProducerFenced):
        later.find(ProducerStamp(1, 2, 6))


def test_a_restart_takes_no_sequence_below_a_younger_result_that_was_free_before() -> None:
    window = Window(ProducerLimits(results_age_s=60))
    window.add(ProducerStamp(1, 3, 1), result_at(1, tick=FIRST_TICK))
    window.add(ProducerStamp(1, 3, 9), result_at(2, tick=FIRST_TICK))
    window.add(ProducerStamp(1, 3, 4), result_at(3, tick=add_ms(FIRST_TICK, 60_000)))
    later = decode_window(
        encode_window(window.freeze(add_ms(FIRST_TICK, 60_001), now_ms=0)), MemoryMessageId
    )
    for sequence in range(2, 12):
        assert later.find(ProducerStamp(1, 3, sequence)) == window.find(
            ProducerStamp(1, 3, sequence)
        )
    with pytest.raises(SequenceTooOld):
        later.find(ProducerStamp(1, 3, 1))


def test_forgotten_producers_are_unknown_and_free_their_results() -> None:
    window = Window(LIMITS)
    for producer_id in (1, 2):
        window.add(ProducerStamp(producer_id, 0, 1), result_at(1))
    window.keep_only({2})
    assert (list(window.producers), window.results) == ([2], 1)
    assert window.last_sequence(1) == 0


def test_what_a_client_was_told_of_is_forgotten() -> None:
    client_id = CLIENT_PRODUCER_IDS
    window = Window()
    stamps = [ProducerStamp(client_id, 1, sequence) for sequence in range(1, 6)]
    for number, stamp in enumerate(stamps):
        window.add(stamp, result_at(number))
    window.settle(client_id, 4)
    assert window.results == 2
    assert [window.find(stamp) for stamp in stamps[3:]] == list(map(result_at, (3, 4)))
    for stamp in stamps[:3]:
        with pytest.raises(SequenceTooOld):
            window.find(stamp)


def test_client_is_known_for_its_time_since_its_last_write_whatever_the_clock_of_ticks_says() -> (
    None
):
    window = Window()
    stamps = [ProducerStamp(CLIENT_PRODUCER_IDS + each, 1, 1) for each in range(2)]
    for stamp in stamps:
        window.add(stamp, result_at(1, tick=FIRST_TICK))
    window.freeze(FIRST_TICK, now_ms=5)
    window.freeze(add_ms(FIRST_TICK, 2 * CLIENT_AGE_MS), now_ms=6)  # the clock was set forward
    window.add(ProducerStamp(CLIENT_PRODUCER_IDS + 1, 1, 2), result_at(2, tick=FIRST_TICK))
    assert window.find(stamps[0])
    window.freeze(add_ms(FIRST_TICK, 2 * CLIENT_AGE_MS), now_ms=5 + CLIENT_AGE_MS)
    assert list(window.producers) == [CLIENT_PRODUCER_IDS + 1]
    assert window.results == 2


# --- what is outstanding: in the machine above the next step mostly hides what one does -----------


def test_the_floor_stays_where_it_is_when_a_result_below_it_is_forgotten() -> None:
    """Else the one above it, forgotten before, is written again. Earlier releases saved such
    results.
    """
    results = tuple(
        StoredResult(sequence, sequence, 1, add_ms(FIRST_TICK, 90_000 * at), sequence, 0, ())
        for at, sequence in enumerate((1, 4))
    )
    stored = StoredWindow(tick=FIRST_TICK, producers=(StoredProducer(1, 1, 3, results),))
    window = decode_window(
        msgspec.msgpack.encode(stored), MemoryMessageId, ProducerLimits(results_age_s=60)
    )
    assert window.find(ProducerStamp(1, 1, 1)) is not None
    window.freeze(add_ms(FIRST_TICK, 90_001), now_ms=0)
    for sequence in (1, 2, 3):
        with pytest.raises(SequenceTooOld):
            window.find(ProducerStamp(1, 1, sequence))
    assert window.find(ProducerStamp(1, 1, 4)) is not None


def outstanding_beside(others: int, limits: ProducerLimits) -> Window:
    """Return a window in which write 1 of producer 1 is outstanding, later ones of it are done, and
    so are those of producer 2.
    """
    window = Window(limits)
    for producer_id in (1, 2):
        window.fence(producer_id, 1)
    window.settle(1, 1)
    for sequence in (2, 3):
        window.add(ProducerStamp(1, 1, sequence), result_at(sequence, tick=FIRST_TICK))
    for sequence in range(1, others + 1):
        window.add(ProducerStamp(2, 1, sequence), result_at(sequence, tick=FIRST_TICK))
    return window


def test_what_is_outstanding_is_not_forgotten_by_age_here_nor_over_a_reopening() -> None:
    window = outstanding_beside(2, ProducerLimits(results_age_s=60))
    much_later = add_ms(FIRST_TICK, 90_000)
    saved = encode_window(window.freeze(much_later, now_ms=1))
    rebuilt = decode_window(saved, MemoryMessageId, outstanding=window.outstanding())
    for each in (window, rebuilt):
        assert each.producers[1].floor == 0, "write 1 is still a first try"
        assert each.find(ProducerStamp(1, 1, 2)) == result_at(2, tick=FIRST_TICK)
        with pytest.raises(SequenceTooOld):
            each.find(ProducerStamp(2, 1, 2))


@pytest.mark.parametrize("how", ["of the producer", "of all"])
def test_what_is_outstanding_is_not_forgotten_for_later_results(how: str) -> None:
    limits = ProducerLimits(results_max=4)
    if how == "of the producer":
        limits = ProducerLimits(results_per_producer_max=1)
    window = outstanding_beside(5, limits)
    assert window.find(ProducerStamp(1, 1, 1)) is None, "still a first try"
    window.add(ProducerStamp(1, 1, 1), result_at(1))
    assert [window.find(ProducerStamp(1, 1, each)) is not None for each in (1, 2, 3)] == [True] * 3
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(2, 1, 1))


def test_a_producer_that_ends_its_oldest_write_keeps_as_many_results_as_others() -> None:
    window = outstanding_beside(0, ProducerLimits(results_per_producer_max=1))
    window.settle(1, 4)
    window.add(ProducerStamp(1, 1, 4), result_at(4))
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(1, 1, 3))


def test_a_producer_that_never_ends_its_oldest_write_keeps_a_bounded_number_of_results() -> None:
    window = Window(ProducerLimits(results_per_producer_max=2, results_max=100))
    window.fence(1, 1)
    window.settle(1, 1)
    for sequence in range(2, 40):
        window.add(ProducerStamp(1, 1, sequence), result_at(sequence))
    assert window.results == 2 * OUTSTANDING_FACTOR
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(1, 1, 1))


def test_the_bound_of_all_holds_when_everything_is_outstanding() -> None:
    window = Window(ProducerLimits(results_max=3))
    for producer_id in (1, 2, 3, 4):
        window.fence(producer_id, 1)
        window.settle(producer_id, 1)
        window.add(ProducerStamp(producer_id, 1, 1), result_at(producer_id))
    assert window.results == 3
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(1, 1, 1))


def test_a_producer_that_is_idle_has_nothing_outstanding() -> None:
    window = outstanding_beside(0, ProducerLimits(results_age_s=60))
    much_later = add_ms(FIRST_TICK, 90_000)
    window.freeze(much_later, now_ms=1)
    assert window.outstanding() == {1: 1}
    window.freeze(much_later, now_ms=1 + CLIENT_AGE_MS)
    assert window.outstanding() == {}
    with pytest.raises(SequenceTooOld):
        window.find(ProducerStamp(1, 1, 3))


def test_nothing_lowers_a_floor() -> None:
    window = Window()
    for sequence in (3, 5, 6):
        window.add(ProducerStamp(CLIENT_PRODUCER_IDS, 2, sequence), result_at(sequence))
    window.settle(CLIENT_PRODUCER_IDS, 6)
    known = window.producers[CLIENT_PRODUCER_IDS]
    assert known.floor == 5
    window.settle(CLIENT_PRODUCER_IDS, 2)
    window.add(ProducerStamp(CLIENT_PRODUCER_IDS, 1, 7), result_at(7))
    assert (known.floor, known.epoch, known.sequences) == (5, 2, [6, 7])
    window.fence(CLIENT_PRODUCER_IDS, 1)
    assert known.epoch == 2
    window.add(ProducerStamp(CLIENT_PRODUCER_IDS, 2, 4), result_at(4))
    assert (known.floor, known.sequences) == (5, [6, 7])
    saved = encode_window(window.freeze(add_ms(FIRST_TICK, 9), now_ms=0))
    assert decode_window(saved, MemoryMessageId).producers[CLIENT_PRODUCER_IDS].floor == 5


def test_a_window_that_is_opened_with_room_for_less_takes_no_write_that_it_forgets() -> None:
    window = Window(ProducerLimits(results_per_producer_max=4))
    window.fence(1, 1)
    for sequence in range(1, 5):
        window.add(ProducerStamp(1, 1, sequence), result_at(sequence))
    saved = encode_window(window.freeze(add_ms(FIRST_TICK, 9), now_ms=0))
    smaller = decode_window(saved, MemoryMessageId, ProducerLimits(results_per_producer_max=2))
    for sequence in (1, 2):
        with pytest.raises(SequenceTooOld):
            smaller.find(ProducerStamp(1, 1, sequence))
    assert smaller.find(ProducerStamp(1, 1, 3)) == result_at(3)
