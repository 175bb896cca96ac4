"""The window of a log: the writes of producers that are in the log, with their results. Pure.

For each producer the window keeps the results with the highest sequences, and all results from the
producer's oldest outstanding write on. Forgetting a result raises the producer's floor: a sequence
at or below the floor without a result is refused. So forgetting never turns a retry into a second
write.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap

import msgspec

from interceptors.errors import ProducerFenced, SequenceTooOld
from wal.append import AppendResult, results_of
from wal.codec import decode_versioned
from wal.entry import LogEntry, Visible, messages_of
from wal.headers import InsertHeader
from wal.position import CLIENT_PRODUCER_IDS, MessageId, ProducerStamp
from wal.rows import row_offsets
from wal.timetick import add_ms

Write = tuple[int, int]
"""One write: its producer's id and its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """Limits of what the log remembers of producers."""

    results_per_producer_max: int = 1_024
    """The number of writes that a producer may have outstanding or in doubt, and so how far a retry
    may lag behind after a restart.
    """
    results_max: int = 65_536
    """The number of results of all producers. Each takes about 500 bytes of memory and 60 bytes of
    each checkpoint. The least active producers lose theirs first.
    """
    results_age_s: float = 86_400
    """Results older than this are forgotten at the next cut."""
    producers_max: int = 4_096
    """The number of named producers; each takes 40 bytes of each checkpoint."""


CLIENT_RESULTS_MAX = 4_096
"""The number of writes that a client may have outstanding without a named producer."""
CLIENT_AGE_MS = 600_000
"""How long such a client is remembered after its last write: longer than it repeats a write
(`remote.link.GIVE_UP_S_MAX`). After the same time a named producer counts as having nothing
outstanding.
"""
OUTSTANDING_FACTOR = 4
"""A producer with outstanding writes keeps at most this many times `results_per_producer_max`
results, because its sequences may arrive out of order.
"""


@dataclass(slots=True)
class KnownProducer:
    """One producer. `sequences` are the keys of `results`, ascending; other results at or below
    `floor` are forgotten.

    All writes of the producer below `settled` have ended; 0 means that it has no outstanding
    writes.
    """

    epoch: int = 0
    floor: int = 0
    settled: int = field(default=0, compare=False)
    sequences: list[int] = field(default_factory=list)
    results: dict[int, AppendResult] = field(default_factory=dict)
    idle_since_ms: int = field(default=0, compare=False)
    """When a cut first found no new result of the producer; 0 again after a new result."""


class Window:
    """The producers of one log. A restored window already contains everything at or below `tick`.

    `outstanding` maps producer ids to their oldest outstanding sequence of an earlier term.
    """

    def __init__(
        self,
        limits: ProducerLimits | None = None,
        *,
        tick: int = 0,
        outstanding: Mapping[int, int] | None = None,
    ) -> None:
        self.limits = limits or ProducerLimits()
        self.tick = tick
        self._outstanding = outstanding or {}
        self.results = 0
        """The number of kept results."""
        self.producers: OrderedDict[int, KnownProducer] = OrderedDict()
        """Producers by id, in the order of their last results, oldest first."""

    def find(self, stamp: ProducerStamp) -> AppendResult | None:
        """Return the result of a write, None when the log does not have it.

        Raises `ProducerFenced` for an older epoch or an unknown producer, `SequenceTooOld` when the
        window may have forgotten the result.
        """
        known = self.check_epoch(stamp)
        result = known.results.get(stamp.sequence)
        if result is None and stamp.sequence <= known.floor:
            oldest = next((each for each in known.sequences if each > known.floor), known.floor + 1)
            raise SequenceTooOld(stamp.sequence, oldest)
        return result

    def check_epoch(self, stamp: ProducerStamp) -> KnownProducer:
        """Return the stamp's producer. Raises `ProducerFenced` for an older epoch or an unknown
        producer.
        """
        known = self.producers.get(stamp.producer_id)
        if known is None:
            if stamp.producer_id < CLIENT_PRODUCER_IDS:
                raise ProducerFenced(stamp.epoch, None)
            # a client chooses its own id, and this is its first write
            known = self._known(stamp.producer_id)
        if stamp.epoch < known.epoch:
            raise ProducerFenced(stamp.epoch, known.epoch)
        return known

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of the producer that is in the log, 0 when it has none."""
        known = self.producers.get(producer_id)
        if known is None:
            return 0
        return max(known.floor, known.sequences[-1]) if known.sequences else known.floor

    def fence(self, producer_id: int, epoch: int) -> None:
        """Add a producer if it is new, and refuse its older epochs from now on."""
        known = self._known(producer_id)
        known.epoch = max(known.epoch, epoch)

    def add(self, stamp: ProducerStamp, result: AppendResult) -> None:
        """Record the result of a write; idempotent."""
        producer_id = stamp.producer_id
        epoch = stamp.epoch
        sequence = stamp.sequence
        known = self._known(producer_id)
        known.epoch = max(known.epoch, epoch)
        if sequence in known.results or sequence <= known.floor:
            return
        known.results[sequence] = result
        known.idle_since_ms = 0
        insort(known.sequences, sequence)
        self.results += 1
        self.producers.move_to_end(producer_id)
        kept_max = self.limits.results_per_producer_max
        outstanding_max = OUTSTANDING_FACTOR * kept_max
        if producer_id >= CLIENT_PRODUCER_IDS:
            kept_max = outstanding_max = CLIENT_RESULTS_MAX
        while len(known.sequences) > kept_max:
            if _is_outstanding(known) and len(known.sequences) <= outstanding_max:
                break
            self._forget(known, known.sequences[0])
        while self.results > self.limits.results_max:
            self._forget_one()

    def observe(self, entry: LogEntry, visible: Sequence[Visible]) -> None:
        """Record the results of an entry that recovery reads; `visible` is what the entry makes
        visible to readers.
        """
        if entry.time_tick <= self.tick:
            return
        if entry.producer is not None and entry.rows is None:
            self.add(entry.producer, result_of_messages(entry, visible))
        if (rows := entry.rows) is not None and rows.producers:
            results = results_of(entry, row_offsets(rows.batches, len(rows.ticks)))
            for stamp, result in zip(rows.producers, results, strict=True):
                if stamp is not None:
                    self.add(stamp, result)

    def settle(self, producer_id: int, sequence: int) -> None:
        """Record that all writes of a producer below a sequence have ended.

        Results from the sequence on are kept. A named producer may repeat writes below it, so the
        limits decide about their results. A client without a name never repeats them, so they are
        forgotten.
        """
        known = self.producers.get(producer_id)
        if known is None:
            return
        known.settled = sequence
        known.idle_since_ms = 0
        if producer_id >= CLIENT_PRODUCER_IDS and known.floor < sequence - 1:
            for each in known.sequences[: bisect_left(known.sequences, sequence)]:
                self._forget(known, each)
            known.floor = sequence - 1

    def outstanding(self) -> dict[int, int]:
        """Return each producer's oldest possibly outstanding sequence, for the window of the next
        term.
        """
        return {each: known.settled for each, known in self.producers.items() if known.settled}

    def keep_only(self, producer_ids: Collection[int]) -> None:
        """Forget all other named producers. Clients are kept; they are forgotten by age."""
        for producer_id in [each for each in self.producers if each not in producer_ids]:
            if producer_id < CLIENT_PRODUCER_IDS:
                self.results -= len(self.producers.pop(producer_id).results)

    def _forget_idle(self, now_ms: int) -> None:
        """Clear the outstanding writes of producers that have written nothing for `CLIENT_AGE_MS`,
        and forget idle clients completely: these writes are not repeated any more.
        """
        for producer_id, known in list(self.producers.items()):
            known.idle_since_ms = known.idle_since_ms or now_ms
            if now_ms - known.idle_since_ms < CLIENT_AGE_MS:
                continue
            known.settled = 0
            if producer_id >= CLIENT_PRODUCER_IDS:
                self.results -= len(self.producers.pop(producer_id).results)

    def freeze(self, tick: int, *, now_ms: int) -> "Window":
        """Return the content of a checkpoint at `tick`, for `encode_window`: a cheap copy that
        later changes do not affect.

        `now_ms` comes from a clock that cannot be set. Ticks follow a clock that can be set
        forward, which would forget clients too early.

        Results above the tick are left out: recovery reads them from the log. Results past their
        age are forgotten first, from the lowest sequence up to the first that is younger or
        outstanding. So the floor never passes a kept result.
        """
        frozen = Window(self.limits, tick=tick)
        oldest_tick = add_ms(tick, -int(self.limits.results_age_s * 1000))
        self._forget_idle(now_ms)
        for producer_id, known in self.producers.items():
            # Forget here too, not only in the copy: a window rebuilt from checkpoint and log then
            # has every result that this one has.
            while known.sequences and not _is_outstanding(known):
                lowest = known.sequences[0]
                if known.results[lowest].time_tick >= oldest_tick:
                    break
                self._forget(known, lowest)
            kept = {
                each: known.results[each]
                for each in known.sequences
                if known.results[each].time_tick <= tick
            }
            frozen.producers[producer_id] = KnownProducer(
                known.epoch, known.floor, sequences=list(kept), results=kept
            )
            frozen.results += len(kept)
        return frozen

    def _forget_one(self) -> None:
        """Forget the lowest result of the least recently active producer whose results are not
        outstanding; if all are outstanding, that of the first producer.
        """
        for _ in range(len(self.producers)):
            producer_id, known = next(iter(self.producers.items()))
            if known.sequences and not _is_outstanding(known):
                self._forget(known, known.sequences[0])
                return
            self.producers.move_to_end(producer_id)  # so that the next search skips it
        known = next(each for each in self.producers.values() if each.sequences)
        self._forget(known, known.sequences[0])

    def _known(self, producer_id: int) -> KnownProducer:
        known = self.producers.get(producer_id)
        if known is None:
            known = KnownProducer(settled=self._outstanding.get(producer_id, 0))
            self.producers[producer_id] = known
        return known

    def _forget(self, known: KnownProducer, sequence: int) -> None:
        known.sequences.remove(sequence)
        del known.results[sequence]
        known.floor = max(known.floor, sequence)
        self.results -= 1


def _is_outstanding(known: KnownProducer) -> bool:
    """Return whether all results of a producer are at or above its oldest outstanding write."""
    return 0 < known.settled <= known.sequences[0]


# --- results of entries ---------------------------------------------------------------------------
# The result of an entry is that of its group: a retry after a crash returns what the first attempt
# would have returned.


def result_of_messages(entry: LogEntry, visible: Sequence[Visible]) -> AppendResult:
    """Return the result of a synced entry of messages; `visible` is what the entry makes visible to
    readers.
    """
    row_offsets: dict[str, tuple[int, int]] = {}
    for part in (part for message in messages_of(visible) for part in message.bodies):
        if isinstance(part.header, InsertHeader):
            first, count = row_offsets.get(part.vchannel, (part.header.first_offset, 0))
            row_offsets[part.vchannel] = first, count + part.header.rows
    return results_of(entry, [row_offsets])[0]


# --- in a checkpoint: MessagePack with a format number, see docs/format.md ------------------------


WINDOW_FORMAT = 1


class StoredResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored result. Message ids are stored as positions; `row_offsets` are triples (vchannel,
    first, count).
    """

    sequence: int
    first_position: int
    count: int
    time_tick: int
    last_confirmed: int
    txn_id: int
    row_offsets: tuple[tuple[str, int, int], ...]


class StoredProducer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One stored producer with its results."""

    producer_id: int
    epoch: int
    floor: int
    results: tuple[StoredResult, ...]


class StoredWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The window as stored in a checkpoint."""

    format: int = WINDOW_FORMAT
    tick: int
    producers: tuple[StoredProducer, ...]


def encode_window(window: Window) -> bytes:
    """Return the bytes of a window. Takes about 2 us for each result, so run it in a thread when
    there are many.
    """
    producers = tuple(
        StoredProducer(
            producer_id, known.epoch, known.floor, tuple(starmap(_stored, known.results.items()))
        )
        for producer_id, known in window.producers.items()
    )
    return msgspec.msgpack.encode(StoredWindow(tick=window.tick, producers=producers))


def _stored(sequence: int, of: AppendResult) -> StoredResult:
    first = of.first_position
    last_confirmed = of.last_confirmed_position
    offsets = tuple((vchannel, *place) for vchannel, place in of.row_offsets.items())
    return StoredResult(sequence, first, of.count, of.time_tick, last_confirmed, of.txn_id, offsets)


def decode_window(
    data: bytes,
    kind: type[MessageId],
    limits: ProducerLimits | None = None,
    *,
    outstanding: Mapping[int, int] | None = None,
) -> Window:
    """Return the window in `data`. `kind` is the class of the log's message ids; for `outstanding`
    see `Window`.

    Raises `UnsupportedFormat` for the format of another release, `Corrupt` for other bytes that do
    not decode.
    """
    stored = decode_versioned(
        data, StoredWindow, WINDOW_FORMAT, "the checkpoint's window of producers"
    )
    window = Window(limits, tick=stored.tick, outstanding=outstanding)
    for producer in stored.producers:
        window.fence(producer.producer_id, producer.epoch)
        for each in producer.results:
            place = each.first_position
            offsets = {vchannel: (at, rows) for vchannel, at, rows in each.row_offsets}
            result = AppendResult(
                kind, place, each.count, each.time_tick, each.last_confirmed, each.txn_id, offsets
            )
            window.add(ProducerStamp(producer.producer_id, producer.epoch, each.sequence), result)
        known = window.producers[producer.producer_id]
        known.floor = max(known.floor, producer.floor)
    return window
