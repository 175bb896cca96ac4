"""Spans of a node, as the program's own SDK keeps them: whose they are, what they say, and that
nobody pays who has none.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import streamingnode as sn
from streamingnode.cli import main
from streamingnode.errors import PackageMissing
from streamingnode.opening import visit_node
from tests.failing_disk import FailingDisk, Fault
from wal.append import Pack

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]  # the exporter takes a lock for each span

SCHEMA = pa.schema([pa.field("id", pa.int64())])


class Kept:
    """The spans that ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of(self, name: str, type_: str = "") -> list[ReadableSpan]:
        """Return those of a name, of appends those of a type of messages, in the order in which
        they ended.
        """
        spans = [
            span
            for span in self._exporter.get_finished_spans()
            if span.name == f"streamingnode.{name}"
        ]
        return [span for span in spans if not type_ or told(span)["message_types"] == (type_,)]


def told(span: ReadableSpan) -> Mapping[str, Any]:
    """Return the attributes of a span by their short names."""
    return {
        name.removeprefix("streamingnode."): value
        for name, value in (span.attributes or {}).items()
    }


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Stand in for the provider of the process, which can be set only once."""
    kept = Kept()
    monkeypatch.setattr(trace, "get_tracer", kept.provider.get_tracer)
    return kept


@pytest.fixture
def no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "streamingnode.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


async def test_write_that_comes_alone_is_a_child_of_its_callers_span_and_says_what_its_result_says(
    kept: Kept,
) -> None:
    async with sn.open_node(None, traces=True) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        with trace.get_tracer("shop").start_as_current_span("order") as order:
            result = await node.insert("orders", [{"id": 1}])
        term = (await node.statistics()).log.term
    (span,) = kept.of("append", "INSERT")
    assert (span.parent, span.context.trace_id) == (
        order.get_span_context(),
        order.get_span_context().trace_id,
    )
    said = told(span)
    assert (said["tick"], said["position"], said["outcome"]) == (
        result.time_tick,
        result.first_position,
        "ok",
    )
    assert (said["channel"], said["term"]) == ("p0", term)
    assert (said["groups"], said["messages"], said["refused"]) == (1, 1, 0)
    assert said["bytes"] > 0
    assert span.start_time
    assert span.end_time
    assert span.start_time < span.end_time


async def test_writes_that_come_together_have_one_span_that_is_nobodys_child(
    kept: Kept, tmp_path: Path
) -> None:
    async with sn.open_node(tmp_path, traces=True) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": 0}])
        with trace.get_tracer("shop").start_as_current_span("order") as order:
            await asyncio.gather(
                *[node.insert("orders", [{"id": number}]) for number in range(1, 9)]
            )
    first, alone, *packs = kept.of("append", "INSERT")
    assert (parent(first), parent(alone)) == (None, order.get_span_context().span_id)
    assert [parent(pack) for pack in packs] == [None] * len(packs)
    assert [pack.links for pack in packs] == [()] * len(packs)
    assert sum(told(pack)["groups"] for pack in packs) == 7
    assert len(packs) < 7


async def test_what_clients_write_is_no_child_of_a_span_of_the_nodes_process(
    kept: Kept, tmp_path: Path
) -> None:
    with trace.get_tracer("shop").start_as_current_span("opening"):
        node = await sn.open_node(tmp_path, traces=True, cut_interval_s=None)
        async with sn.connect(f"unix:{tmp_path}/node.sock") as client:
            await client.create_collection("orders", SCHEMA, primary_key="id")
            await client.insert("orders", [{"id": 1}])
        await node.aclose()
    spans = kept.of("append")
    assert {kind for span in spans for kind in told(span)["message_types"]} >= {
        "CREATE_COLLECTION",
        "INSERT",
    }
    assert [span.parent for span in spans] == [None] * len(spans)


async def test_append_that_is_refused_names_the_code_of_its_error(kept: Kept) -> None:
    async with sn.open_node(None, traces=True) as node:
        with pytest.raises(sn.StreamingNodeError) as refused:
            await node.commit_transaction(1)
    (span,) = kept.of("append", "COMMIT_TXN")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == str(refused.value)
    assert (told(span)["outcome"], told(span)["error.type"]) == ("error", refused.value.code)
    assert "tick" not in told(span)


async def test_opening_is_a_child_of_its_callers_span_and_what_the_node_does_by_itself_is_not(
    kept: Kept, tmp_path: Path
) -> None:
    with trace.get_tracer("shop").start_as_current_span("opening") as opening:
        node = await sn.open_node(tmp_path, traces=True, cut_interval_s=None)
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": 1}, {"id": 2}])
        cut = await node.flush()
        await node.aclose()
    by_caller = opening.get_span_context().span_id
    (recovery,) = kept.of("recovery")
    assert (parent(recovery), told(recovery)["term"]) == (by_caller, 1)
    (created,) = kept.of("append", "CREATE_SEGMENT")
    assert created.parent is None
    (asked,) = kept.of("append", "CUT")
    assert parent(asked) == by_caller, "the caller asked for it"
    (made,) = kept.of("cut")
    said = told(made)
    assert (made.parent, said["number"], said["tick"], said["rows"]) == (
        None,
        cut.number,
        cut.tick,
        2,
    )


async def test_log_that_is_opened_again_has_a_recovery_of_its_next_term(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, Fault.WRITE_LOST)
    async with sn.open_node(tmp_path, traces=True, cut_interval_s=None) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await node.insert("orders", [{"id": 1}])
        disk.fail_at(1)
        await node.insert("orders", [{"id": 2}])
        assert disk.reached
    first, second = [told(span) for span in kept.of("recovery")]
    assert (first["term"], second["term"]) == (1, 2)
    assert first["entries"] == 1, "the first tick of the term"
    assert second["entries"] >= 5, "two ticks, a collection, a segment, rows"


async def test_observer_hears_of_every_append_also_with_traces(kept: Kept) -> None:
    class Observer:
        def __init__(self) -> None:
            self.heard = 0
            self.timed = 0

        def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
            self.heard += 1

        def interceptor_timed(
            self, name: str, before_s: float, after_s: float, *, failed_before: bool
        ) -> None:
            self.timed += 1

    observer = Observer()
    async with sn.open_node(None, traces=True, observer=observer) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
    assert observer.heard >= len(kept.of("append")) > 0
    assert observer.timed > observer.heard


async def test_traces_without_their_package_name_the_extra(no_api: None) -> None:
    with pytest.raises(PackageMissing, match=r"opentelemetry-api is not installed .*\.\[otel\]"):
        await sn.open_node(None, traces=True)


async def test_command_makes_no_spans_and_needs_no_package_for_them(
    no_api: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMINGNODE_SERVE_TRACES", "true")
    async with visit_node(tmp_path, lasting=False) as node:
        assert node.config.serve.traces


def test_serve_makes_spans_where_it_is_told_to(
    no_api: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path), "--traces"]) == PackageMissing.exit_code
    assert ".[otel]" in capsys.readouterr().err


def test_node_without_traces_loads_nothing_of_opentelemetry() -> None:
    program = """
import anyio, sys, streamingnode as sn
async def main():
    async with sn.open_node(None): pass
anyio.run(main)
of_traces = ("opentelemetry", "streamingnode.traces")
print([name for name in sys.modules if name.startswith(of_traces)])
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
