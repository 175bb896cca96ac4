"""A node's statistics for Prometheus: one registry for each node, measured at each request. See
docs/metrics.md.

It adds no counting to the append path beyond that for `Node.statistics`. Every label has a bounded
set of values: types, states, interceptors, and a limited number of topics and groups.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from operator import attrgetter

from flusher.flusher import FlusherState
from spark_sink.errors import PackageMissing
from streamingnode.embedded import EmbeddedBackend
from streamingnode.statistics import AppendMeter, NodeStatistics
from wal.lifecycle import LogState
from wal.log import SpaceLevel
from wal.measure import Histogram
from wal.runtime import in_thread
from wal.timetick import physical_ms

try:
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.core import HistogramMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_LATEST
except ImportError as error:
    raise PackageMissing("prometheus_client", "http") from error

PREFIX = "streamingnode_"
TOPICS_MAX = 100
GROUPS_MAX = 500
"""The most topics (first by name), and the most groups in total, with series of their own: more
overloads dashboards and scrapers.
"""
SECONDS_BOUNDS = tuple(2.0**power for power in range(-12, 4))
"""From 0.25 ms to 8 s. A bound is the end of a bucket of `Histogram`, so its counts are exact."""
BYTES_BOUNDS = tuple(64.0 * 4**power for power in range(10))
"""From 64 B to 16 MiB."""
SCAN_MODES = {"opening": "opening", "catching up": "catchup", "tailing": "tailing"}
PENDING = ("row", "append", "transaction")
"""The kinds of writes for which `WriteStatistics` has the memory they hold."""

Value = Callable[[NodeStatistics], float]


def _seconds(tick: str) -> Value:
    """Return a function that reads a tick as Unix time in seconds; 0 if there is none."""
    of = attrgetter(tick)
    return lambda statistics: physical_ms(of(statistics)) / 1000


GAUGES: dict[str, tuple[str, Value | str]] = {
    "uptime_seconds": ("How long the node is open.", "uptime_s"),
    "last_allocated_time_tick": ("Newest allocated tick, as Unix time.", _seconds("ticks.last")),
    "last_confirmed_time_tick": (
        "Newest confirmed tick, up to which readers have everything, as Unix time.",
        _seconds("ticks.confirmed"),
    ),
    "time_tick_lag_seconds": ("The clock less the confirmed tick.", "ticks.lag_s"),
    "time_tick_ahead_seconds": ("How far the newest tick is ahead of the clock.", "ticks.ahead_s"),
    "unconfirmed_time_tick_total": ("Allocated ticks that are not confirmed.", "ticks.unconfirmed"),
    "produce_inflight_total": ("Append groups in flight.", "appends.in_flight"),
    "inflight_txn": ("Open streamed transactions.", "writes.open_transactions"),
    "inflight_txn_bytes": ("Size of open streamed transactions.", "writes.open_transaction_bytes"),
    "growing_segment_total": ("Segments that the next cut will seal.", "writes.growing_segments"),
    "growing_segment_bytes": (
        "Size of the growing segments in the log.",
        "writes.growing_segment_bytes",
    ),
    "write_ahead_buffer_entry_total": (
        "Newest entries of the log that are in memory for readers.",
        "tail.entries",
    ),
    "write_ahead_buffer_size_bytes": ("Size of the entries in memory for readers.", "tail.bytes"),
    "scanner_backlog_message_max": (
        "Messages before the place of the open reader that is furthest behind.",
        lambda statistics: max((reader.backlog for reader in statistics.readers), default=0),
    ),
    "scanner_txn_buf_bytes": (
        "Bodies of transactions that readers hold until the commit.",
        lambda statistics: sum(reader.transaction_bytes for reader in statistics.readers),
    ),
    "flusher_time_tick": (
        "Tick of the last cut, as Unix time; 0 before the first.",
        _seconds("flusher.cut_tick"),
    ),
    "flusher_cut_number": ("The last cut whose checkpoint is durable.", "flusher.cut_number"),
    "flusher_unflushed_rows": ("Rows that are in no cut yet.", "flusher.unflushed_rows"),
    "flusher_unflushed_bytes": (
        "Size in the log of rows that are in no cut yet.",
        "flusher.unflushed_bytes",
    ),
    "flusher_held_bytes": (
        "Size of rows that are in no cut yet and still in memory.",
        "flusher.held_bytes",
    ),
    "recovery_attempt_total": (
        "Failed tries to reopen the log since it last took appends.",
        "log.attempts",
    ),
}
SPACE = {
    "disk_free_bytes": ("Free space on the disk of the log.", "free_bytes"),
    "disk_needed_bytes": ("Free space below which appends are refused.", "needed_bytes"),
    "disk_log_bytes": ("RocksDB's own log.", "log_bytes"),
    "disk_reserve_bytes": ("Reserved for a start on a full disk.", "reserve_bytes"),
    "append_queue_bytes": ("Bytes appended but not synced yet.", "queued_bytes"),
}
COUNTERS: dict[str, tuple[str, Value | str]] = {
    "insert_rows_total": ("Rows written.", "appends.insert_rows"),
    "insert_bytes_total": ("Size of inserted rows in the log.", "appends.insert_bytes"),
    "delete_rows_total": ("Keys deleted.", "appends.delete_rows"),
    "log_reopened_total": ("How often the log came back after a failed write.", "log.reopened"),
    "flusher_fault_total": ("Disk errors of the flusher.", "flusher.faults"),
}


class NodeMetrics:
    """The metrics of one open node; all methods but `collect` run on its event loop."""

    def __init__(self, backend: EmbeddedBackend, appends: AppendMeter) -> None:
        self._backend = backend
        self._channel = backend.channel
        self._appends = appends
        self._labels = {"node_id": backend.node_id, "channel_name": backend.channel.log.name}
        self._families: list[Metric] = []
        self.registry = CollectorRegistry()
        """The registry of this node and its process, apart from the library's global one."""
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the last measurements; any thread may call it."""
        return self._families

    async def expose(self) -> tuple[bytes, str]:
        """Measure, and return the metrics as text with its content type; a thread makes the
        text.
        """
        self._families = list(self.measure())
        return await in_thread(generate_latest, self.registry), CONTENT_TYPE_LATEST

    def measure(self) -> Iterator[Metric]:
        """Yield every family as of now."""
        stats = self._backend.measure()
        for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
            for name, (text, value) in table.items():
                yield self._one(
                    name,
                    text,
                    attrgetter(value)(stats) if isinstance(value, str) else value(stats),
                    kind,
                )
        if stats.space is not None:
            for name, (text, field) in SPACE.items():
                yield self._one(name, text, getattr(stats.space, field))
            yield self._state(
                "disk_info", "How near the disk is to full.", SpaceLevel, stats.space.level
            )
        yield from self._of_channel(stats)
        yield from self._of_appends(stats)
        yield from self._of_topics(stats)

    def _of_channel(self, stats: NodeStatistics) -> Iterator[Metric]:
        segments = self._channel.term.shards.state.segments.values()
        limits = self._channel.config.segments
        collections = self._channel.catalog.collections()
        tail = self._channel.tail
        listener = self._backend.listener
        for name, text, value in (
            (
                "growing_segment_rows_total",
                "Rows in growing segments.",
                sum(each.stats.rows for each in segments),
            ),
            (
                "growing_segment_hwm_bytes",
                "Size of growing segments above which the largest are sealed.",
                limits.growing_bytes_high,
            ),
            (
                "growing_segment_lwm_bytes",
                "Size of growing segments at which sealing stops.",
                limits.growing_bytes_low,
            ),
            ("segment_assign_collection_total", "Collections.", len(collections)),
            (
                "segment_assign_partition_total",
                "Partitions.",
                sum(len(each.partitions) for each in collections),
            ),
            (
                "write_ahead_buffer_capacity_bytes",
                "Most bytes of entries in memory for readers.",
                self._channel.config.tail.capacity_bytes,
            ),
            (
                "write_ahead_buffer_latest_time_tick",
                "Newest tick of the entries in memory for readers, as Unix time.",
                physical_ms(tail.confirmed_tick) / 1000,
            ),
            (
                "connection_total",
                "Connected clients.",
                listener.connections if listener else 0,
            ),
        ):
            yield self._one(name, text, value)
        log = {
            "wal_name": self._channel.log.wal_name,
            "access_model": "rw",
            "term": str(stats.log.term),
        }
        yield self._labelled("info", "The log, and the term of its owner.", [(log, 1)])
        yield self._state(
            "recovery_info",
            "State of the log; it takes appends when open.",
            LogState,
            stats.log.state,
        )
        yield self._state(
            "flusher_info", "State of the flusher.", FlusherState, stats.flusher.state.value
        )
        readers = [reader.mode for reader in stats.readers]
        modes = [
            ({"scanner_model": label}, readers.count(mode)) for mode, label in SCAN_MODES.items()
        ]
        yield self._labelled("scanner_total", "Open readers.", modes)
        messages, size_bytes = self._channel.scanners.delivered
        yield self._one("scan_message_total", "Messages delivered to readers.", messages, "counter")
        yield self._one(
            "scan_message_bytes_total",
            "Size of entries delivered to readers.",
            size_bytes,
            "counter",
        )
        held = [
            ({"kind": f"{kind}s"}, getattr(stats.writes, f"pending_{kind}_bytes"))
            for kind in PENDING
        ]
        yield self._labelled("pending_bytes", "Memory that writes hold.", held)

    def _of_appends(self, stats: NodeStatistics) -> Iterator[Metric]:
        ended = {
            "ok": stats.appends.succeeded,
            "error": stats.appends.failed,
            "cancel": stats.appends.cancelled,
        }
        groups = [({"status": status}, count) for status, count in ended.items()]
        yield self._labelled("append_group_total", "Append groups, by outcome.", groups, "counter")
        types = [
            ({"message_type": name, "status": "ok"}, n)
            for name, n in stats.appends.messages_by_type.items()
        ]
        yield self._labelled("append_message_total", "Messages in the log.", types, "counter")
        by_type, interceptors = self._appends.histograms
        ok = [({"message_type": str(kind), "status": "ok"}, of) for kind, of in by_type.items()]
        took = [(labels, of.seconds) for labels, of in ok]
        yield self._histogram(
            "append_message_duration_seconds", "Append latency.", SECONDS_BOUNDS, took
        )
        sizes = [(labels, of.message_bytes) for labels, of in ok]
        yield self._histogram("append_message_bytes", "Sizes of payloads.", BYTES_BOUNDS, sizes)
        for at, when in enumerate(("before", "after")):
            of = [({"interceptor_name": name}, both[at]) for name, both in interceptors.items()]
            text = f"Time of an interceptor {when} the next one."
            yield self._histogram(
                f"interceptor_{when}_append_duration_seconds", text, SECONDS_BOUNDS, of
            )

    def _of_topics(self, stats: NodeStatistics) -> Iterator[Metric]:
        topics = dict(islice(sorted(stats.topics.items()), TOPICS_MAX))
        for name, text, kind, field in (
            ("rocksmq_topic_bytes", "Size of a topic.", "gauge", "bytes"),
            ("rocksmq_produce_total", "Messages produced.", "counter", "produced"),
            ("rocksmq_deliver_total", "Messages delivered.", "counter", "delivered"),
            ("rocksmq_ack_total", "Messages acknowledged.", "counter", "acked"),
        ):
            of = [({"topic": topic}, getattr(info, field)) for topic, info in topics.items()]
            yield self._labelled(name, text, of, kind)
        lags = (
            ({"topic": topic, "group": group}, info.lag)
            for topic, of in topics.items()
            for group, info in sorted(of.groups.items())
        )
        text = "Messages that a group has not acknowledged."
        yield self._labelled("rocksmq_group_lag", text, list(islice(lags, GROUPS_MAX)))

    def _one(self, name: str, text: str, value: float, kind: str = "gauge") -> Metric:
        return self._labelled(name, text, [({}, value)], kind)

    def _state(self, name: str, text: str, states: type[Enum], now: str) -> Metric:
        of = [
            ({"state": name.lower()}, int(name.lower() == now.replace(" ", "_")))
            for name in states.__members__
        ]
        return self._labelled(name, text, of)

    def _labelled(
        self,
        name: str,
        text: str,
        values: Iterable[tuple[dict[str, str], float]],
        kind: str = "gauge",
    ) -> Metric:
        # The library gives the samples of a counter, but not of a gauge, their suffix back.
        family = Metric(
            PREFIX + (name.removesuffix("_total") if kind == "counter" else name), text, kind
        )
        for labels, value in values:
            family.add_sample(PREFIX + name, self._labels | labels, value)
        return family

    def _histogram(
        self,
        name: str,
        text: str,
        bounds: tuple[float, ...],
        found: list[tuple[dict[str, str], Histogram]],
    ) -> Metric:
        family = HistogramMetricFamily(
            PREFIX + name, text, labels=[*self._labels, *(found[0][0] if found else ())]
        )
        for labels, histogram in found:
            counts = histogram.at_most(bounds)
            whole = histogram.distribution()
            buckets = [*zip(map(str, bounds), counts, strict=True), ("+Inf", whole.count)]
            family.add_metric([*self._labels.values(), *labels.values()], buckets, whole.total)
        return family
