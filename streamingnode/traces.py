"""OpenTelemetry spans of a node's appends, cuts and recoveries; loaded only with `serve.traces`.

A span is created when its work has ended, so the append path carries nothing for it. The program's
SDK exports spans; without one they are dropped.
"""

import sys
import time

from flusher.directory import Cut
from spark_sink.errors import PackageMissing
from wal.append import Pack
from wal.errors import StreamingNodeError

try:
    from opentelemetry import trace
    from opentelemetry.context import Context, attach
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise PackageMissing("opentelemetry-api", "otel") from error


class Traces:
    """The spans of one node. Its methods are called on the event loop."""

    def __init__(self, node_id: str, channel: str) -> None:
        """Load the tracer that the program has configured; blocks."""
        self._tracer = trace.get_tracer("streamingnode")
        self._node = {"streamingnode.node_id": node_id, "streamingnode.channel": channel}

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """Record one attempt to append a pack.

        The span is a child of its caller's span if the write was appended alone. A pack of queued
        writes has no parent: that would be the span of its first caller.
        """
        attributes: dict[str, AttributeValue] = {
            "term": pack.wal_term,
            "message_types": sorted({str(each.type) for each in pack.messages or pack.batches}),
            "groups": len(pack.groups),
            "refused": pack.refused,
            "messages": pack.message_count,
            "bytes": pack.size_bytes,
            "outcome": status,
        }
        if pack.ticket is not None:
            attributes |= {"tick": pack.time_tick, "position": pack.ticket.first_position}
        self._record(
            "append", seconds, None if pack.come_again is None else Context(), **attributes
        )

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        """Record nothing: an append has one span."""

    def cut_made(self, cut: Cut, seconds: float) -> None:
        """Record a cut whose checkpoint is durable; the span starts at its message in the log."""
        rows = sum(segment.rows for segment in cut.manifest.segments)
        self._record("cut", seconds, number=cut.number, tick=cut.tick, rows=rows)

    def recovered(self, term: int, entries: int, seconds: float) -> None:
        """Record a term whose state was rebuilt from `entries` entries of the log; called in the
        task that opens it.
        """
        self._record("recovery", seconds, term=term, entries=entries)
        # background work that starts from here on outlives the span of the opening caller
        attach(Context())

    def _record(
        self, name: str, seconds: float, parent: Context | None = None, /, **fields: AttributeValue
    ) -> None:
        begun_ns = (ended_ns := time.time_ns()) - round(seconds * 1e9)
        attributes = self._node | {f"streamingnode.{key}": value for key, value in fields.items()}
        span = self._tracer.start_span(
            f"streamingnode.{name}", parent, attributes=attributes, start_time=begun_ns
        )
        failure = sys.exception()  # the error that the append is raising
        if fields.get("outcome") == "error" and failure is not None:
            code = (
                failure.code if isinstance(failure, StreamingNodeError) else type(failure).__name__
            )
            span.set_attribute("error.type", code)
            span.set_status(trace.StatusCode.ERROR, str(failure))
        span.end(ended_ns)
