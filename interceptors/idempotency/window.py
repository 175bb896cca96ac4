"""The window: which writes of which producers are in the log, and what their appenders were told. Pure.

In come results, from the live append path and from the log as it is read again; out goes, for a stamp, the result of its
first try, or that there was none, or that nobody can know any more. Of each producer the results with the highest sequences
are kept. What is forgotten moves the producer's floor: a sequence at or below it without a result is refused, so that
forgetting never turns a retry into a second write. Producers themselves are forgotten only when they are deleted.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from interceptors.idempotency.results import result_of_entry
from interceptors.idempotency.snapshot import KnownProducer, KnownWindow
from wal.append import AppendResult
from wal.errors import ProducerFenced, SequenceTooOld
from wal.message import AnyMessage, LogEntry
from wal.producer_stamp import ProducerStamp
from wal.timetick import add_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """How much is remembered of producers.

    `results_per_producer_max` bounds how many writes of one producer may be under way or in doubt at a time, and so how far
    a retry may lie behind. `results_max` bounds all of them together (some 500 bytes of memory and 60 of each checkpoint
    for one); the least active producers lose theirs first. Results older than `results_age_s` are not saved.
    `producers_max` named producers can exist; one costs 40 bytes of each checkpoint.
    """

    results_per_producer_max: int = 256
    results_max: int = 65_536
    results_age_s: float = 86_400
    producers_max: int = 4_096


class _Producer:
    """What is known of one producer: `sequences` are the keys of `results`, ascending."""

    __slots__ = ("epoch", "floor", "results", "sequences")

    def __init__(self, epoch: int = 0, floor: int = 0) -> None:
        self.epoch = epoch
        self.floor = floor
        self.sequences: list[int] = []
        self.results: dict[int, AppendResult] = {}

    def forget_lowest(self) -> None:
        self.floor = max(self.floor, self.sequences.pop(0))


class Window:
    """The producers of one log. Everything at or below `tick` was in it when it was saved."""

    def __init__(self, limits: ProducerLimits | None = None, *, tick: int = 0) -> None:
        self.limits = limits or ProducerLimits()
        self.tick = tick
        self.results = 0
        """How many results are kept."""
        self._producers: OrderedDict[int, _Producer] = OrderedDict()
        """In the order of their last results, oldest first."""

    # --- asking -----------------------------------------------------------------------------------------------------------

    def find(self, stamp: ProducerStamp) -> AppendResult | None:
        """Return what the first try of this write came to, None when the log has none.

        Raises `ProducerFenced` for the stamp of an older epoch or of nobody known, `SequenceTooOld` when nobody remembers.
        """
        known = self._producers.get(stamp.producer_id)
        if known is None:
            raise ProducerFenced(stamp.epoch, None)
        if stamp.epoch < known.epoch:
            raise ProducerFenced(stamp.epoch, known.epoch)
        result = known.results.get(stamp.sequence)
        if result is None and stamp.sequence <= known.floor:
            raise SequenceTooOld(stamp.sequence, known.sequences[0] if known.sequences else known.floor + 1)
        return result

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of the producer that is in the log, 0 when it has none."""
        known = self._producers.get(producer_id)
        if known is None:
            return 0
        return max(known.floor, known.sequences[-1]) if known.sequences else known.floor

    @property
    def producers(self) -> int:
        """How many producers are known."""
        return len(self._producers)

    # --- learning ---------------------------------------------------------------------------------------------------------

    def fence(self, producer_id: int, epoch: int) -> None:
        """Know a producer, and refuse older epochs of it, from now on."""
        known = self._known(producer_id)
        known.epoch = max(known.epoch, epoch)

    def add(self, stamp: ProducerStamp, result: AppendResult) -> None:
        """Remember what became of a write; repeating it changes nothing."""
        known = self._known(stamp.producer_id)
        known.epoch = max(known.epoch, stamp.epoch)
        if stamp.sequence in known.results or stamp.sequence <= known.floor:
            return
        known.results[stamp.sequence] = result
        if known.sequences and stamp.sequence < known.sequences[-1]:
            insort(known.sequences, stamp.sequence)
        else:
            known.sequences.append(stamp.sequence)
        self.results += 1
        self._producers.move_to_end(stamp.producer_id)
        if len(known.sequences) > self.limits.results_per_producer_max:
            self._forget_lowest(known)
        while self.results > self.limits.results_max:
            self._forget_lowest(self._least_active())

    def observe(self, entry: LogEntry, visible: Sequence[AnyMessage]) -> None:
        """Remember an entry as the log is read again; `visible` is what readers see because of it."""
        if entry.producer is not None and entry.time_tick > self.tick:
            self.add(entry.producer, result_of_entry(entry, visible))

    def keep_only(self, producer_ids: Collection[int]) -> None:
        """Forget all other producers."""
        for producer_id in [each for each in self._producers if each not in producer_ids]:
            self.results -= len(self._producers.pop(producer_id).results)

    # --- on disk ----------------------------------------------------------------------------------------------------------

    def freeze(self, tick: int) -> KnownWindow:
        """Return what a checkpoint at `tick` has to know, for `encode_window`: cheap, and untouched by later changes.

        Results above the tick are left out: they are read from the log again. So are those past their age that have no
        younger one below them.
        """
        oldest_tick = add_ms(tick, -int(self.limits.results_age_s * 1000))
        return KnownWindow(tick, tuple(self._freeze_each(tick, oldest_tick)))

    @classmethod
    def thaw(cls, known: KnownWindow, limits: ProducerLimits | None = None) -> "Window":
        """Return the window that `freeze` saved."""
        window = cls(limits, tick=known.tick)
        for each in known.producers:
            producer = window._producers[each.producer_id] = _Producer(each.epoch)
            for sequence, result in each.results.items():
                window.add(ProducerStamp(each.producer_id, each.epoch, sequence), result)
            producer.floor = max(producer.floor, each.floor)
        return window

    def _freeze_each(self, tick: int, oldest_tick: int) -> Iterator[KnownProducer]:
        for producer_id, known in self._producers.items():
            results = known.results
            # From the lowest up, as everywhere: the floor never passes a sequence that is kept, or one still to come.
            expired = list(takewhile(lambda each: results[each].time_tick < oldest_tick, known.sequences))  # noqa: B023
            kept = {each: results[each] for each in known.sequences[len(expired) :] if results[each].time_tick <= tick}
            yield KnownProducer(producer_id, known.epoch, max(known.floor, *expired[-1:], 0), kept)

    def _least_active(self) -> _Producer:
        """Return the producer whose last result is the oldest; those without results go behind the others."""
        while True:
            producer_id, known = next(iter(self._producers.items()))
            if known.sequences:
                return known
            self._producers.move_to_end(producer_id)

    def _known(self, producer_id: int) -> _Producer:
        known = self._producers.get(producer_id)
        if known is None:
            known = self._producers[producer_id] = _Producer()
        return known

    def _forget_lowest(self, known: _Producer) -> None:
        del known.results[known.sequences[0]]
        known.forget_lowest()
        self.results -= 1
