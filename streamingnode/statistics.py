"""The statistics that `Node.statistics` returns, and the meter of appends.

docs/metrics.md explains every field. Counts start at the opening of the node and only rise; rates
are of the last ten seconds; levels are current. Times are in seconds and sizes in bytes, unless a
name says otherwise.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from flusher.flusher import Flusher, FlusherStatistics
from scanner.scanner import ScanStatistics
from streamingnode.channel import Channel
from wal.append import AppendObserver, Pack
from wal.headers import MessageType
from wal.lifecycle import LogStatus
from wal.log import LogStore
from wal.measure import Distribution, Histogram, Rate
from wal.rocksmq.contract import TopicInfo
from wal.rocksmq.queue import RocksMQ
from wal.runtime import event_log
from wal.timetick import physical_ms

_log = event_log(__name__)


class InterceptorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The time of one interceptor before and after it called the next one; waits and refused
    appends are included.
    """

    name: str
    before_s: Distribution
    after_s: Distribution


class AppendStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The append groups of the node, including its background work; only successful ones are
    timed.
    """

    succeeded: int
    failed: int
    cancelled: int
    in_flight: int
    messages_per_s: float
    bytes_per_s: float
    seconds: Distribution
    message_bytes: Distribution
    interceptors: tuple[InterceptorStatistics, ...] = ()
    insert_rows: int = 0
    insert_bytes: int = 0
    delete_rows: int = 0
    messages_by_type: dict[str, int] = {}


class TickStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The ticks of the log, and the tick up to which readers may read it."""

    last: int
    confirmed: int
    lag_s: float
    ahead_s: float
    unconfirmed: int
    oldest_unconfirmed: int
    mvcc_updates: int


class WriteStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Writes under way to the log, and segments that are not in files yet; `pending` bytes are held
    in memory.
    """

    open_transactions: int
    open_transaction_bytes: int
    pending_row_bytes: int
    pending_append_bytes: int
    pending_transaction_bytes: int
    growing_segments: int
    growing_segment_bytes: int


class TailStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The newest entries, kept in memory for readers."""

    entries: int
    bytes: int


class SpaceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How near the disk is to full, as of the last check: at the last write, or 100 ms ago."""

    level: str
    free_bytes: int
    needed_bytes: int
    log_bytes: int
    reserve_bytes: int
    queued_bytes: int


class SpoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Writes on a client's disk that are not in its node's log yet; the oldest is `age_s` seconds
    old.

    `state` is `connected` while the node takes writes, `refused` while it refuses them for now,
    `away` or `closed`. `frames` counts messages, `writes` the writes in them, and `dead_letters`
    the messages of topic `writes.dead`.
    """

    state: str
    frames: int
    writes: int
    bytes: int
    bytes_max: int
    age_s: float
    dead_letters: int


class NodeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """All statistics of the node in process `pid` at one moment; `space` is null for a node in
    memory.

    `spool` is the spool of the client that asks; null without one.
    """

    pid: int
    at_ms: int
    uptime_s: float
    log: LogStatus
    appends: AppendStatistics
    ticks: TickStatistics
    writes: WriteStatistics
    tail: TailStatistics
    space: SpaceStatistics | None
    readers: tuple[ScanStatistics, ...]
    flusher: FlusherStatistics
    spool: SpoolStatistics | None = None
    topics: dict[str, TopicInfo] = {}


UNCOUNTED_MAX = 256
"""How many appends are counted together, at half the cost; `statistics` first counts the rest."""

SLOW_APPEND_S = 1.0
"""An append that takes at least this long logs a warning."""


@dataclass(slots=True)
class TypeMeter:
    """The successful messages of one type: their number, rows and payloads; each counts the time of
    its pack.
    """

    messages: int = 0
    rows: int = 0
    payload_bytes: int = 0
    seconds: Histogram = field(default_factory=Histogram)
    message_bytes: Histogram = field(default_factory=Histogram)


class AppendMeter:
    """Counts and times the appends of a node, over all terms of its log: about 2 us for each.

    It forwards every call to other observers, such as the user's, and logs slow appends.
    """

    def __init__(self, *forward_to: AppendObserver) -> None:
        self._forward_to = forward_to
        self._ended = {"ok": 0, "error": 0, "cancel": 0}
        self._seconds = Histogram()
        self._message_bytes = Histogram()
        self._messages = Rate(time.monotonic)
        self._bytes = Rate(time.monotonic)
        self._uncounted: list[
            tuple[float, float, int, int, int, list[tuple[MessageType, int, int, int]]]
        ] = []
        """One tuple for each successful append: its end (by the clock of the rates), seconds,
        groups, messages, bytes, and for each batch or message its type, messages, rows, payload.
        """
        self._interceptors = defaultdict[str, tuple[Histogram, Histogram]](
            lambda: (Histogram(), Histogram())
        )
        self._by_type = defaultdict[MessageType, TypeMeter](TypeMeter)

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """Count the groups of an append, also refused ones; only successful ones are timed and
        sized.
        """
        groups = len(pack.groups)
        self._ended[status] += groups
        self._ended["error"] += pack.refused
        if status == "ok" and groups:
            if pack.messages:
                parts = [
                    (each.type, 1, getattr(each.header, "rows", 0), len(each.payload))
                    for each in pack.messages
                ]
            else:
                parts = [
                    (batch.type, len(batch.groups), batch.rows, len(batch.payload))
                    for batch in pack.batches
                ]
            self._uncounted.append(
                (time.monotonic(), seconds, groups, pack.message_count, pack.size_bytes, parts)
            )
            if len(self._uncounted) >= UNCOUNTED_MAX:
                self._count()
        if seconds >= SLOW_APPEND_S:
            types = sorted({str(each.type) for each in pack.messages or pack.batches})
            size = {
                "groups": groups,
                "messages": pack.message_count,
                "binary_size": pack.size_bytes,
            }
            _log.warning(
                "slow_append",
                message_types=types,
                **size,
                append_duration_s=round(seconds, 3),
                outcome=status,
            )
        for each in self._forward_to:
            each.append_ended(pack, seconds, status)

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        """Time one interceptor of one append."""
        before, after = self._interceptors[name]
        before.record(before_s)
        if not failed_before:
            after.record(after_s)
        for each in self._forward_to:
            each.interceptor_timed(name, before_s, after_s, failed_before=failed_before)

    def _count(self) -> None:
        uncounted = self._uncounted
        self._uncounted = []
        for at_s, seconds, groups, messages, size_bytes, parts in uncounted:
            self._seconds.record(seconds, groups)
            self._message_bytes.record(size_bytes / messages, messages)
            self._messages.add(messages, at_s)
            self._bytes.add(size_bytes, at_s)
            for kind, count, rows, payload_bytes in parts:
                of = self._by_type[kind]
                of.messages += count
                of.rows += rows
                of.payload_bytes += payload_bytes
                of.seconds.record(seconds, count)
                of.message_bytes.record(payload_bytes / count, count)

    @property
    def histograms(
        self,
    ) -> tuple[Mapping[MessageType, TypeMeter], Mapping[str, tuple[Histogram, Histogram]]]:
        """Return times and sizes of messages by type, and for each interceptor its time before and
        after the next one.
        """
        self._count()
        return self._by_type, self._interceptors

    def statistics(self, *, in_flight: int) -> AppendStatistics:
        """Return the measurements so far."""
        self._count()
        inserts = self._by_type[MessageType.INSERT]
        deletes = self._by_type[MessageType.DELETE]
        return AppendStatistics(
            succeeded=self._ended["ok"],
            failed=self._ended["error"],
            cancelled=self._ended["cancel"],
            in_flight=in_flight,
            messages_per_s=self._messages.per_second,
            bytes_per_s=self._bytes.per_second,
            seconds=self._seconds.distribution(),
            message_bytes=self._message_bytes.distribution(),
            interceptors=tuple(
                InterceptorStatistics(
                    name=name, before_s=before.distribution(), after_s=after.distribution()
                )
                for name, (before, after) in self._interceptors.items()
            ),
            insert_rows=inserts.rows,
            insert_bytes=inserts.payload_bytes,
            delete_rows=deletes.rows,
            messages_by_type={str(kind): of.messages for kind, of in self._by_type.items()},
        )


def node_statistics(
    channel: Channel,
    flusher: Flusher,
    appends: AppendMeter,
    mq: Sequence[RocksMQ],
    *,
    now_ms: Callable[[], int],
    opened_s: float,
) -> NodeStatistics:
    """Collect the statistics of a node's parts, on their event loop; `now_ms` is the clock that
    ticks follow.
    """
    at_ms = now_ms()
    term = channel.term
    store = channel.store
    pending = channel.pending
    confirmed_tick = term.acks.confirmed_tick
    shards = term.shards.state
    return NodeStatistics(
        pid=os.getpid(),
        at_ms=at_ms,
        uptime_s=time.monotonic() - opened_s,
        log=channel.wal.status,
        appends=appends.statistics(
            in_flight=sum([len(pack.groups) for pack in channel.wal.in_flight])
        ),
        ticks=TickStatistics(
            last=channel.ticks.last,
            confirmed=confirmed_tick,
            lag_s=max(0, at_ms - physical_ms(confirmed_tick)) / 1000,
            ahead_s=channel.ticks.ahead_ms / 1000,
            unconfirmed=term.acks.pending,
            oldest_unconfirmed=term.acks.oldest_pending_tick or 0,
            mvcc_updates=term.mvcc.updates,
        ),
        writes=WriteStatistics(
            open_transactions=len(term.transactions.sessions),
            open_transaction_bytes=term.transactions.size_bytes,
            pending_row_bytes=pending.rows.held_bytes,
            pending_append_bytes=pending.appends.held_bytes,
            pending_transaction_bytes=pending.transactions.held_bytes,
            growing_segments=len(shards.segments),
            growing_segment_bytes=shards.growing_bytes,
        ),
        tail=TailStatistics(entries=channel.tail.entry_count, bytes=channel.tail.size_bytes),
        space=_space_statistics(store),
        readers=channel.scanners.statistics(),
        flusher=flusher.statistics(),
        topics=mq[0].statistics() if mq else {},
    )


def _space_statistics(store: LogStore) -> SpaceStatistics | None:
    if (space := store.space) is None:
        return None
    return SpaceStatistics(
        level=space.level.name.lower(),
        free_bytes=space.free_bytes,
        needed_bytes=space.needed_bytes,
        log_bytes=space.log_bytes,
        reserve_bytes=space.reserve_bytes,
        queued_bytes=store.queued_bytes,
    )
