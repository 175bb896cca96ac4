"""The window against a plain dict of everything that was ever written: it may forget, and never
forgets silently.
"""

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
    Places,
    ProducerLimits,
    Window,
    decode_window,
    encode_window,
)
from wal.append import AppendResult
from wal.position import CLIENT_PRODUCER_IDS, MemoryMessageId, Place, ProducerStamp
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
        self.places = Places()
        self.held: dict[tuple[int, int], Place] = {}
        self.held_most = 0
        self.window = Window(LIMITS, held=self.places)
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
        self.window.add(ProducerStamp(producer_id, self.epochs[producer_id], sequence), result)

    @rule(producer_id=producers)
    def write_next(self, producer_id: int) -> None:
        self.write(producer_id, self.window.last_sequence(producer_id) + 1)

    @rule(producer_id=producers, sequence=sequences)
    def hold(self, producer_id: int, sequence: int) -> None:
        """A caller names a write, and keeps it for as long as it may still send it."""
        key = producer_id, sequence
        if not self.window.has_forgotten(key):
            self.held[key] = self.places.hold(
                Place(ProducerStamp(producer_id, self.epochs[producer_id], sequence))
            )

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(self.held)))]

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
        self.held.clear()
        self.places = Places()
        self.latest = saved
        self.rebuild(saved)

    @precondition(lambda self: self.latest is not None)
    @rule(meanwhile=st.none() | st.tuples(producers, sequences))
    def reopen(self, meanwhile: tuple[int, int] | None) -> None:
        """The same in one process, which keeps what is held, and where a caller may come
        meanwhile.
        """
        before = self.window
        held = self.places.writes()
        assert self.latest is not None
        self.rebuild(self.latest, held)
        if meanwhile is not None and not before.has_forgotten(meanwhile):
            self.held[meanwhile] = self.places.hold(
                Place(ProducerStamp(meanwhile[0], 0, meanwhile[1]))
            )
            if meanwhile not in held and self.window.has_forgotten(meanwhile):
                self.places.release(meanwhile)
                del self.held[meanwhile]
        self.window.held = self.places

    def rebuild(
        self, saved: tuple[bytes, int], held: frozenset[tuple[int, int]] = frozenset()
    ) -> None:
        data, tick = saved
        self.window = decode_window(data, MemoryMessageId, LIMITS, held=held or self.places)
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
    def a_write_that_is_held_is_never_too_old(self) -> None:
        for producer_id, sequence in self.held:
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
            assert newest[-1] in kept or age_ms > LIMITS.results_age_s * 1000, (
                "a held one below it may be written later"
            )

    @invariant()
    def the_bounds_hold(self) -> None:
        self.held_most = max(self.held_most, len(self.held))
        assert self.window.results <= LIMITS.results_max + self.held_most, (
            "held ones come on top, until the next write"
        )
        kept = [isinstance(self.find(*key), AppendResult) for key in self.written]
        assert sum(kept) == self.window.results


TestWindow = WindowMachine.TestCase


def test_a_place_that_nobody_has_any_more_is_let_go_when_another_is_held() -> None:
    places = Places()
    for sequence in range(1, 100):
        places.hold(Place(ProducerStamp(1, 1, sequence)))
    assert len(places._held) == 1


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


def test_what_a_client_was_told_of_is_forgotten_once_nobody_sends_it_any_more() -> None:
    places = Places()
    client_id = CLIENT_PRODUCER_IDS
    window = Window(held=places)
    stamps = [ProducerStamp(client_id, 1, sequence) for sequence in range(1, 6)]
    place = places.hold(Place(stamps[1]))
    for number, stamp in enumerate(stamps):
        window.add(stamp, result_at(number))
    window.settle(client_id, 4)
    assert window.results == 3
    assert [window.find(stamp) for stamp in (*stamps[1:2], *stamps[3:])] == list(
        map(result_at, (1, 3, 4))
    )
    for stamp in (stamps[0], stamps[2]):
        with pytest.raises(SequenceTooOld):
            window.find(stamp)
    del place
    window.settle(client_id, 5)
    assert window.results == 1
    with pytest.raises(SequenceTooOld):
        window.find(stamps[1])


def test_client_is_known_for_its_time_since_its_last_write_whatever_the_clock_of_ticks_says() -> (
    None
):
    window = Window(held=Places())
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


def test_places_keep_nothing_of_clients_whose_writes_nobody_sends_any_more() -> None:
    places = Places()
    places.reach(1, 0)
    kept = len(places._last)
    for client_id in range(CLIENT_PRODUCER_IDS, CLIENT_PRODUCER_IDS + 20):
        places.hold(Place(ProducerStamp(client_id, 1, 3)))
    assert (len(places), len(places._last)) == (0, kept)


# --- held writes, one after the other: in the machine above the next step mostly hides what one doe


@pytest.mark.parametrize("how", ["by age", "by number", "as settled"])
def test_the_floor_stays_where_it_is_when_a_write_that_was_held_is_forgotten(how: str) -> None:
    """Else the one above it, forgotten before, is written again."""
    places = Places()
    producer_id = CLIENT_PRODUCER_IDS if how == "as settled" else 1
    limits = ProducerLimits(results_per_producer_max=2, results_max=4, results_age_s=60)
    window = Window(limits, held=places)
    stamps = [ProducerStamp(producer_id, 1, sequence) for sequence in range(1, 5)]
    window.fence(producer_id, 1)
    place = places.hold(Place(stamps[0]))
    for number, stamp in enumerate(stamps):
        window.add(stamp, result_at(number, tick=add_ms(FIRST_TICK, 90_000 * bool(number))))
    if how == "as settled":
        window.settle(producer_id, 3)
    assert window.find(stamps[0]) == result_at(0, tick=FIRST_TICK)
    del place
    if how == "by number":
        for sequence in (1, 2):
            window.add(ProducerStamp(2, 1, sequence), result_at(sequence))
    else:
        window.settle(producer_id, 1)  # that of an older frame, which comes late
        window.freeze(add_ms(FIRST_TICK, 90_001), now_ms=0)
    for stamp in stamps[:2]:
        with pytest.raises(SequenceTooOld):
            window.find(stamp)
    assert [window.find(stamp) is not None for stamp in stamps[2:]] == [True, True]


def test_a_held_write_is_not_forgotten_by_age_here_nor_over_a_reopening() -> None:
    places = Places()
    client_id = CLIENT_PRODUCER_IDS
    window = Window(ProducerLimits(results_age_s=60), held=places)
    stamps = [ProducerStamp(of, 1, sequence) for of in (1, client_id) for sequence in (1, 2)]
    held = [places.hold(Place(stamps[0])), places.hold(Place(stamps[2]))]
    window.fence(1, 1)
    for number, stamp in enumerate(stamps):
        window.add(stamp, result_at(number, tick=FIRST_TICK))
    much_later = add_ms(FIRST_TICK, 2 * CLIENT_AGE_MS)
    window.freeze(much_later, now_ms=1)  # a client's time begins when a cut first finds it quiet
    saved = encode_window(window.freeze(much_later, now_ms=1 + CLIENT_AGE_MS))
    rebuilt = decode_window(saved, MemoryMessageId, held=places.writes())
    for each in (window, rebuilt):
        assert [each.find(stamp) for stamp in (stamps[0], stamps[2])] == [
            result_at(0, tick=FIRST_TICK),
            result_at(2, tick=FIRST_TICK),
        ]
        with pytest.raises(SequenceTooOld):
            each.find(stamps[1])
    del held
    window.freeze(much_later, now_ms=1 + CLIENT_AGE_MS)
    assert client_id not in window.producers
    with pytest.raises(SequenceTooOld):
        window.find(stamps[0])


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


def test_a_held_write_that_comes_when_all_above_it_is_forgotten_is_remembered() -> None:
    places = Places()
    window = Window(ProducerLimits(results_per_producer_max=1), held=places)
    window.fence(1, 1)
    place = places.hold(Place(ProducerStamp(1, 1, 1)))
    for sequence in (2, 3):
        window.add(ProducerStamp(1, 1, sequence), result_at(sequence))
    assert window.find(place.stamp) is None
    window.add(place.stamp, result_at(1))
    assert window.find(place.stamp) == result_at(1)


def test_what_is_held_pushes_out_no_newer_result() -> None:
    places = Places()
    window = Window(ProducerLimits(results_max=2), held=places)
    held = [places.hold(Place(ProducerStamp(1, 1, sequence))) for sequence in (1, 2)]
    newer = [ProducerStamp(2, 1, sequence) for sequence in (1, 2)]
    for number, stamp in enumerate([*(place.stamp for place in held), *newer]):
        window.add(stamp, result_at(number))
    assert [window.find(stamp) for stamp in newer] == [result_at(2), result_at(3)]
    window.add(ProducerStamp(2, 1, 3), result_at(4))
    assert window.results == 4
    with pytest.raises(SequenceTooOld):
        window.find(newer[0])
