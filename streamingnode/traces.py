"""What a node does as spans of OpenTelemetry: its appends, cuts and recoveries; loaded only where
`serve.traces` says so.

A span is made when the work it tells of has ended: nothing on the append path knows of it, and
nothing is held meanwhile. Where spans go is for the program's SDK to say; without one they go
nowhere.
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
        """Load what the program has configured; blocks."""
        self._tracer = trace.get_tracer("streamingnode")
        self._node = {"streamingnode.node_id": node_id, "streamingnode.channel": channel}

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        """Tell of one try of a pack.

        It is a child of its caller's span if the write went alone. A pack of those that waited has
        no parent: it would be the span of the caller who came first.
        """
        told: dict[str, AttributeValue] = {
            "term": pack.wal_term,
            "message_types": sorted({str(each.type) for each in pack.messages or pack.batches}),
            "groups": len(pack.groups),
            "refused": pack.refused,
            "messages": pack.message_count,
            "bytes": pack.size_bytes,
            "outcome": status,
        }
        if pack.ticket is not None:
            told |= {"tick": pack.time_tick, "position": pack.ticket.first_position}
        self._tell("append", seconds, None if pack.come_again is None else Context(), **told)

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        """Tell nothing: an append has one span."""

    def cut_made(self, cut: Cut, seconds: float) -> None:
        """Tell of a cut whose checkpoint is durable, from its message in the log on."""
        rows = sum(segment.rows for segment in cut.manifest.segments)
        self._tell("cut", seconds, number=cut.number, tick=cut.tick, rows=rows)

    def recovered(self, term: int, entries: int, seconds: float) -> None:
        """Tell of a term whose state was rebuilt from so many entries of the log; called in the
        task that opens it.
        """
        self._tell("recovery", seconds, term=term, entries=entries)
        # background work, begun from here on, outlives the span of who opens the node
        attach(Context())

    def _tell(
        self, name: str, seconds: float, parent: Context | None = None, /, **told: AttributeValue
    ) -> None:
        begun_ns = (ended_ns := time.time_ns()) - round(seconds * 1e9)
        attributes = self._node | {f"streamingnode.{key}": value for key, value in told.items()}
        span = self._tracer.start_span(
            f"streamingnode.{name}", parent, attributes=attributes, start_time=begun_ns
        )
        failure = sys.exception()  # that goes up through the append
        if told.get("outcome") == "error" and failure is not None:
            code = (
                failure.code if isinstance(failure, StreamingNodeError) else type(failure).__name__
            )
            span.set_attribute("error.type", code)
            span.set_status(trace.StatusCode.ERROR, str(failure))
        span.end(ended_ns)
