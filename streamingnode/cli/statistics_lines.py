"""A node's statistics as a few lines for people; machines read all of them as JSON."""

from typing import TYPE_CHECKING

from streamingnode.cli.output import format_bytes, format_count

if TYPE_CHECKING:
    from scanner.scanner import ScanStatistics
    from streamingnode.statistics import NodeStatistics
    from wal.measure import Distribution


def statistics_fields(statistics: "NodeStatistics") -> dict[str, object]:
    """Return what to print, by label."""
    log, appends, ticks = statistics.log, statistics.appends, statistics.ticks
    writes, flusher = statistics.writes, statistics.flusher
    fields: dict[str, object] = {
        "log": f"{log.state}, {format_count(log.reopened, 'time')} reopened"
        + (f" ({log.last_error})" * bool(log.last_error)),
        "appends": f"{appends.succeeded} ok, {appends.failed} failed, {appends.in_flight} in flight; "
        f"{appends.messages_per_s:.1f} messages/s, {format_bytes(appends.bytes_per_s)}/s",
        "append time": _times(appends.seconds),
        "message size": f"median {format_bytes(appends.message_bytes.p50)}, "
        f"largest {format_bytes(appends.message_bytes.max)}",
        "ticks": f"{ticks.lag_s:.3f} s behind, {ticks.unconfirmed} unconfirmed, {ticks.mvcc_updates} MVCC updates",
        "waiting": f"{format_count(writes.waiting_rows, 'row')}, "
        f"{format_count(writes.open_transactions, 'open transaction')}",
        "flusher": flusher.state.value
        + (f" for want of {flusher.short_of}" * bool(flusher.short_of))
        + f", {format_count(flusher.unflushed_rows, 'row')} "
        f"({format_bytes(flusher.unflushed_bytes)}) in no cut yet"
        + (f"; {flusher.last_error}" * bool(flusher.last_error)),
    }
    fields |= {
        f"in {each.name}": f"{_times(each.before_s)} before, {_times(each.after_s)} after"
        for each in appends.interceptors
    }
    return fields | {f"reader {reader.name}": _reader(reader) for reader in statistics.readers}


def _reader(reader: "ScanStatistics") -> str:
    mode = reader.mode.value if reader.mode else "opening"
    return (
        f"{mode}, {format_count(reader.backlog, 'message')} behind, {reader.messages_per_s:.1f} messages/s, "
        f"delivered {_times(reader.delivery_s)}"
    )


def _times(seconds: "Distribution") -> str:
    if not seconds.count:
        return "not measured"
    return f"median {1000 * seconds.p50:.2f} ms, p99 {1000 * seconds.p99:.2f} ms"
