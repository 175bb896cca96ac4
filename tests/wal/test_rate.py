from wal.measure import WINDOW_S, Rate


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def test_rate_of_a_steady_stream_is_its_count_per_second() -> None:
    clock = Clock()
    rate = Rate(clock)
    for _ in range(3 * WINDOW_S):
        clock.now_s += 1
        rate.add(5)
    clock.now_s += 0.5
    assert rate.per_second == 5.0
    assert rate.total == 15 * WINDOW_S


def test_rate_is_nothing_once_the_window_has_passed() -> None:
    clock = Clock()
    rate = Rate(clock)
    rate.add(5)
    clock.now_s += 2
    assert rate.per_second > 0
    clock.now_s += WINDOW_S + 1
    assert rate.per_second == 0.0


def test_rate_before_a_whole_second_has_passed_is_nothing() -> None:
    clock = Clock()
    rate = Rate(clock)
    rate.add(5)
    clock.now_s += 0.5
    assert rate.per_second == 0.0
    assert rate.total == 5


def test_rate_of_a_young_counter_is_over_its_age() -> None:
    clock = Clock()
    clock.now_s = 1000.0
    rate = Rate(clock)
    rate.add(8)
    clock.now_s += 4
    assert rate.per_second == 2.0


def test_rate_of_what_is_counted_later_is_of_when_it_happened() -> None:
    clock = Clock()
    clock.now_s = 1000.0
    rate = Rate(clock)
    happened_s = clock.now_s
    clock.now_s += 1.5
    rate.add(3, happened_s)
    assert rate.per_second == 3.0
    clock.now_s += 3600
    rate.add(500, happened_s)
    clock.now_s += 2
    assert rate.per_second == 0.0
