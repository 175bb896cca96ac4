"""The window: which writes of which producers are in the log, and what their appenders were told.
Pure.

Of each producer the results with the highest sequences are kept. What is forgotten moves the
producer's floor: a sequence at or below it without a result is refused, so that forgetting never
turns a retry into a second write. A write that somebody may still send is held: nothing of it is
forgotten, and no floor refuses it.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from weakref import ref

import msgspec

from interceptors.errors import ProducerFenced, SequenceTooOld
from wal.append import AppendResult, results_of
from wal.codec import decode_versioned
from wal.entry import LogEntry, Visible, messages_of
from wal.errors import InvalidArgument
from wal.headers import InsertHeader
from wal.position import (
    CLIENT_PRODUCER_IDS,
    SEQUENCE_MAX,
    MessageId,
    Place,
    ProducerStamp,
)
from wal.rows import row_offsets
from wal.timetick import add_ms

Write = tuple[int, int]
"""One write: its producer's id and its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """How much is remembered of producers; what is held (`Places`) comes on top."""

    results_per_producer_max: int = 1_024
    """How many of its writes may be under way or in doubt at a time, so how far a retry may lie
    behind after a restart.
    """
    results_max: int = 65_536
    """One costs some 500 bytes of memory and 60 of each checkpoint; the least active producers lose
    theirs first.
    """
    results_age_s: float = 86_400
    """Older ones go with the next cut."""
    producers_max: int = 4_096
    """Named ones; each costs 40 bytes of each checkpoint."""


CLIENT_RESULTS_MAX = 4_096
"""How many writes of one client without a name may be under way."""
CLIENT_AGE_MS = 600_000
"""How long such a client is known after its last write; longer than it sends one again
(`remote.client.GIVE_UP_S_MAX`).
"""


class _Held(ref[Place]):
    """Refers to the place that holds a write."""

    __slots__ = ("write",)
    write: Write


class Places:
    """The writes that somebody may still send, and how far each producer's sequences have come;
    outlives terms.
    """

    def __init__(self) -> None:
        # Held for as long as anything refers to the place: the call or transaction that sends the
        # write, or its group. So there is nothing to give back, and nothing that could be given
        # back too early.
        self._held: dict[Write, _Held] = {}
        self._dead: deque[ref[Place]] = deque()
        """Of places that are gone, in whatever thread garbage was collected; to be taken out on the
        event loop.
        """
        self._last: dict[int, int] = {}

    def __contains__(self, write: object) -> bool:
        if self._dead:
            self._drop_dead()
        return write in self._held

    def __len__(self) -> int:
        self._drop_dead()
        return len(self._held)

    def writes(self) -> frozenset[Write]:
        """Return what is held now."""
        self._drop_dead()
        return frozenset(self._held)

    def hold(self, place: Place) -> Place:
        """Hold a write from now on by this place, or by the one it has; it counts for the sequences
        drawn later.
        """
        write = (place.stamp.producer_id, place.stamp.sequence)
        # `in` lets go of the dead: nobody else may ask for long
        held = self._held[write]() if write in self else None
        if held is not None and held.stamp.epoch == place.stamp.epoch:
            return held
        self._held[write] = known = _Held(place, self._dead.append)
        known.write = write
        if write[0] < CLIENT_PRODUCER_IDS:  # clients number their writes by themselves
            self.reach(*write)
        return place

    def _drop_dead(self) -> None:
        while self._dead:
            gone = self._dead.popleft()
            assert isinstance(gone, _Held), "only those are told of"
            if self._held.get(gone.write) is gone:  # else it is held by another place since
                del self._held[gone.write]

    def draw(self, producer_id: int, epoch: int) -> ProducerStamp:
        """Return the stamp of the producer's next write, which is not held."""
        self.check_drawable(producer_id)
        sequence = self._last[producer_id] = self._last.get(producer_id, 0) + 1
        return ProducerStamp(producer_id, epoch, sequence)

    def check_drawable(self, producer_id: int) -> None:
        """Raise `InvalidArgument` when a producer has no sequence left."""
        if self._last.get(producer_id, 0) >= SEQUENCE_MAX:
            raise InvalidArgument(
                f"the producer has used sequence {SEQUENCE_MAX} — use another producer"
            )

    def reach(self, producer_id: int, sequence: int) -> None:
        """Draw no sequence up to this one."""
        self._last[producer_id] = max(sequence, self._last.get(producer_id, 0))

    def release(self, write: Write) -> None:
        """Hold a write no longer, although its place is still there."""
        self._held.pop(write, None)

    def forget(self, producer_id: int) -> None:
        """Forget how far a producer has come that is gone."""
        self._last.pop(producer_id, None)


@dataclass(slots=True)
class KnownProducer:
    """One producer: `sequences` are the keys of `results`, ascending; others at or below `floor`
    are forgotten.
    """

    epoch: int = 0
    floor: int = 0
    sequences: list[int] = field(default_factory=list)
    results: dict[int, AppendResult] = field(default_factory=dict)
    idle_since_ms: int = field(default=0, compare=False)
    """Of a client without a name: when a cut first found it without a new result, 0 since it has
    one.
    """


class Window:
    """The producers of one log. Everything at or below `tick` was in it when it was saved; `held`
    are writes to keep.
    """

    def __init__(
        self,
        limits: ProducerLimits | None = None,
        *,
        tick: int = 0,
        held: Places | frozenset[Write] = frozenset(),
    ) -> None:
        self.limits = limits or ProducerLimits()
        self.tick = tick
        self.held = held
        self.results = 0
        """How many results are kept."""
        self.producers: OrderedDict[int, KnownProducer] = OrderedDict()
        """In the order of their last results, oldest first."""

    def find(self, stamp: ProducerStamp) -> AppendResult | None:
        """Return what the first try of this write came to, None when the log has none.

        Raises `ProducerFenced` for the stamp of an older epoch or of nobody known, `SequenceTooOld`
        when nobody remembers.
        """
        known = self.check_epoch(stamp)
        result = known.results.get(stamp.sequence)
        if (
            result is None
            and stamp.sequence <= known.floor
            and (stamp.producer_id, stamp.sequence) not in self.held
        ):
            oldest = next((each for each in known.sequences if each > known.floor), known.floor + 1)
            raise SequenceTooOld(stamp.sequence, oldest)
        return result

    def check_epoch(self, stamp: ProducerStamp) -> KnownProducer:
        """Return the stamp's producer. Raises `ProducerFenced` for an older epoch or one that
        nobody knows.
        """
        known = self.producers.get(stamp.producer_id)
        if known is None:
            if stamp.producer_id < CLIENT_PRODUCER_IDS:
                raise ProducerFenced(stamp.epoch, None)
            # a client draws its id by itself, and this is its first write
            known = self._known(stamp.producer_id)
        if stamp.epoch < known.epoch:
            raise ProducerFenced(stamp.epoch, known.epoch)
        return known

    def has_forgotten(self, write: Write) -> bool:
        """Whether nobody can know any more if the write is in the log, unless it was held all the
        time.
        """
        known = self.producers.get(write[0])
        return known is not None and write[1] <= known.floor and write[1] not in known.results

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of the producer that is in the log, 0 when it has none."""
        known = self.producers.get(producer_id)
        if known is None:
            return 0
        return max(known.floor, known.sequences[-1]) if known.sequences else known.floor

    def fence(self, producer_id: int, epoch: int) -> None:
        """Know a producer, and refuse older epochs of it, from now on."""
        known = self._known(producer_id)
        known.epoch = max(known.epoch, epoch)

    def add(self, stamp: ProducerStamp, result: AppendResult) -> None:
        """Remember what became of a write; repeating it changes nothing."""
        producer_id = stamp.producer_id
        epoch = stamp.epoch
        sequence = stamp.sequence
        known = self._known(producer_id)
        known.epoch = max(known.epoch, epoch)
        if sequence in known.results or (
            sequence <= known.floor and (producer_id, sequence) not in self.held
        ):
            return
        known.results[sequence] = result
        known.idle_since_ms = 0
        insort(known.sequences, sequence)
        self.results += 1
        self.producers.move_to_end(producer_id)
        # What is held comes on top, or it would push out the newest results.
        is_client = producer_id >= CLIENT_PRODUCER_IDS
        sequences = known.sequences
        kept_max = CLIENT_RESULTS_MAX if is_client else self.limits.results_per_producer_max
        while len(sequences) > kept_max and (lowest := self._lowest(producer_id, known)):
            if len(sequences) - bisect_left(sequences, lowest) <= kept_max:
                break
            self._forget(known, lowest)
        # asked first: to count what is held takes longer than the rest
        results_max = self.limits.results_max
        while (
            self.results > results_max
            and self.results > results_max + len(self.held)
            and self._forget_one()
        ):
            pass

    def observe(self, entry: LogEntry, visible: Sequence[Visible]) -> None:
        """Remember an entry as the log is read again; `visible` is what readers see because of
        it.
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
        """Forget the results of a client's writes below a sequence, which it was told of, but for
        those that are held.
        """
        known = self.producers.get(producer_id)
        if known is not None and known.floor < sequence - 1:
            for each in known.sequences[: bisect_left(known.sequences, sequence)]:
                if (producer_id, each) not in self.held:
                    self._forget(known, each)
            known.floor = sequence - 1

    def keep_only(self, producer_ids: Collection[int]) -> None:
        """Forget all other producers but the clients, which go by age."""
        for producer_id in [each for each in self.producers if each not in producer_ids]:
            if producer_id < CLIENT_PRODUCER_IDS:
                self.results -= len(self.producers.pop(producer_id).results)

    def _forget_clients(self, now_ms: int) -> None:
        """Forget clients that have written nothing for `CLIENT_AGE_MS`: none of them sends a write
        again.
        """
        for producer_id, known in list(self.producers.items()):
            if producer_id >= CLIENT_PRODUCER_IDS:
                known.idle_since_ms = known.idle_since_ms or now_ms
                is_old = now_ms - known.idle_since_ms >= CLIENT_AGE_MS
                if is_old and not any(
                    (producer_id, sequence) in self.held for sequence in known.sequences
                ):
                    self.results -= len(self.producers.pop(producer_id).results)

    def freeze(self, tick: int, *, now_ms: int) -> "Window":
        """Return what a checkpoint at `tick` has to know, for `encode_window`: cheap, and untouched
        by later changes.

        `now_ms` is of a clock that nobody sets: by ticks a client would be forgotten too early when
        theirs was set forward.

        Results above the tick are left out: they are read from the log again. Those past their age
        that have no younger one below them are forgotten first, so that the floor never passes a
        sequence that is kept, or one still to come.
        """
        frozen = Window(self.limits, tick=tick)
        oldest_tick = add_ms(tick, -int(self.limits.results_age_s * 1000))
        self._forget_clients(now_ms)
        for producer_id, known in self.producers.items():
            # Here too and not only in the copy: what the window has, one that is rebuilt from
            # checkpoint and log has as well, so a write that is held between the two is in neither
            # or in both.
            while (lowest := self._lowest(producer_id, known)) and known.results[
                lowest
            ].time_tick < oldest_tick:
                self._forget(known, lowest)
            kept = {
                each: known.results[each]
                for each in known.sequences
                if known.results[each].time_tick <= tick
            }
            frozen.producers[producer_id] = KnownProducer(
                known.epoch, known.floor, list(kept), kept
            )
            frozen.results += len(kept)
        return frozen

    def _forget_one(self) -> bool:
        """Forget a result of the producer whose last one is the oldest; return whether there was
        one not held.
        """
        for _ in range(len(self.producers)):
            producer_id, known = next(iter(self.producers.items()))
            if lowest := self._lowest(producer_id, known):
                self._forget(known, lowest)
                return True
            self.producers.move_to_end(producer_id)  # so that it is not passed each time
        return False

    def _known(self, producer_id: int) -> KnownProducer:
        known = self.producers.get(producer_id)
        if known is None:
            known = self.producers[producer_id] = KnownProducer()
        return known

    def _lowest(self, producer_id: int, known: KnownProducer) -> int:
        """Return the lowest sequence with a result that is not held, 0 for none."""
        for sequence in known.sequences:  # mostly the first
            if (producer_id, sequence) not in self.held:
                return sequence
        return 0

    def _forget(self, known: KnownProducer, sequence: int) -> None:
        known.sequences.remove(sequence)
        del known.results[sequence]
        known.floor = max(known.floor, sequence)
        self.results -= 1


# --- what an appender was told --------------------------------------------------------------------
#
# A group and its entry say the same, so a retry that comes after a crash hears what the first try
# would have heard.


def result_of_messages(entry: LogEntry, visible: Sequence[Visible]) -> AppendResult:
    """Return the result of a synced entry of messages; `visible` is what readers see because of
    it.
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
    """One result; ids are positions, of the log's kind; `row_offsets` are (vchannel, first,
    count).
    """

    sequence: int
    first_position: int
    count: int
    time_tick: int
    last_confirmed: int
    txn_id: int
    row_offsets: tuple[tuple[str, int, int], ...]


class StoredProducer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One producer and its results."""

    producer_id: int
    epoch: int
    floor: int
    results: tuple[StoredResult, ...]


class StoredWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the checkpoint."""

    format: int = WINDOW_FORMAT
    tick: int
    producers: tuple[StoredProducer, ...]


def encode_window(window: Window) -> bytes:
    """Return a window's bytes; some 2 us for each result, so in a thread when there are many."""
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
    held: Places | frozenset[Write] = frozenset(),
) -> Window:
    """Return the window in `data`; `kind` is that of its log's ids.

    Raises `UnsupportedFormat` for a newer release's, `Corrupt` for anything else.
    """
    stored = decode_versioned(
        data, StoredWindow, WINDOW_FORMAT, "the checkpoint's window of producers"
    )
    window = Window(limits, tick=stored.tick, held=held)
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
