"""What Prometheus reads of a node: numbers of what was done, each documented, and never too
many.
"""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import streamingnode as sn
from streamingnode import http, metrics, statistics
from streamingnode.node import Node
from tests.streamingnode.http_asking import ask, port_of
from tests.streamingnode.remote.nodes import SCHEMA, rows

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
COMMON = {"node_id", "channel_name"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(http, "METRICS_S_MIN", 0.0)
    timed: dict[str, Any] = {"statistics.time_interceptors": True}
    async with sn.open_node(tmp_path, http="127.0.0.1:0", cut_interval_s=None, **timed) as opened:
        await opened.create_collection("c", SCHEMA, primary_key="id")
        yield opened


async def scraped(node: Node) -> str:
    answer = await ask(port_of(node), "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return answer.body.decode()


async def samples(node: Node) -> Samples:
    return {
        (
            each.name.removeprefix("streamingnode_"),
            frozenset((k, v) for k, v in each.labels.items() if k not in COMMON),
        ): (each.value)
        for family in text_string_to_metric_families(await scraped(node))
        for each in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


async def test_every_series_is_documented_with_its_type_and_labels_and_no_other_is(
    node: Node,
) -> None:
    await node.mq.create_topic("t")
    await node.mq.create_consumer_group("t", "g")
    table = re.findall(
        r"^\| `(streamingnode_\w+)` \| (\w+) \| (.*?) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE
    )
    documented = {
        (name, kind, *sorted(re.findall(r"`(\w+)`", labels))) for name, kind, labels in table
    }
    found = set()
    for family in text_string_to_metric_families(await scraped(node)):
        if not family.name.startswith("process_"):
            assert family.samples, family.name
            assert all(each.labels.keys() >= COMMON for each in family.samples)
            labels = {label for each in family.samples for label in each.labels} - COMMON - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.add((name, family.type, *sorted(labels)))
    assert found == documented


async def test_rows_and_messages_are_counted_by_type(node: Node) -> None:
    await node.insert("c", rows(1, 2, 3))
    await node.upsert("c", rows(1, 4))
    await node.delete("c", [2])
    async with node.transaction() as txn:
        await txn.insert("c", rows(5))
    txn_id = await node.begin_transaction()
    await node.insert("c", rows(6, 7), txn_id=txn_id)
    await node.commit_transaction(txn_id)
    found = await samples(node)
    assert value(found, "insert_rows_total") == 3 + 2 + 1 + 2
    assert value(found, "delete_rows_total") == 2 + 1
    assert value(found, "insert_bytes_total") > 0
    of = {
        kind: value(found, "append_message_total", message_type=kind, status="ok")
        for kind in ("INSERT", "DELETE")
    }
    assert of == {"INSERT": 4, "DELETE": 2}
    assert value(found, "append_message_total", message_type="COMMIT_TXN", status="ok") == 1
    assert value(found, "growing_segment_rows_total") == 8
    assert value(found, "segment_assign_collection_total") == 1


async def test_appends_are_counted_and_their_times_and_sizes_are_histograms(node: Node) -> None:
    await node.insert("c", rows(1))
    with pytest.raises(sn.StreamingNodeError):
        await node.commit_transaction(1)
    told = (await node.statistics()).appends
    found = await samples(node)
    assert value(found, "append_group_total", status="ok") == told.succeeded
    assert value(found, "append_group_total", status="error") == told.failed == 1
    inserts = {"message_type": "INSERT", "status": "ok"}
    assert value(found, "append_message_bytes_sum", **inserts) == told.insert_bytes
    for name, most in (
        ("append_message_duration_seconds", told.seconds.max),
        ("append_message_bytes", told.insert_bytes),
    ):
        assert value(found, f"{name}_count", **inserts) == told.messages_by_type["INSERT"]
        assert 0 < value(found, f"{name}_sum", **inserts) <= most * told.messages_by_type["INSERT"]
        buckets = {
            float(dict(labels)["le"]): count
            for (each, labels), count in found.items()
            if each == f"{name}_bucket" and ("message_type", "INSERT") in labels
        }
        counts = [buckets[bound] for bound in sorted(buckets)]
        assert counts == sorted(counts)
        assert counts[-1] == told.messages_by_type["INSERT"]
        assert all(count == counts[-1] for bound, count in buckets.items() if bound > most * 1.13)
    assert (
        value(found, "interceptor_before_append_duration_seconds_count", interceptor_name="lock")
        > 0
    )


async def test_what_readers_were_given_is_counted_when_they_are_closed_too(node: Node) -> None:
    await node.insert("c", rows(1, 2))
    await node.insert("c", rows(3))
    for opened in (1, 2):
        async with node.read(
            "c", sn.DeliverPolicy.all(), until=await node.consistent_tick()
        ) as reader:
            # it was created first
            assert [message.num_rows async for message in reader] == [0, 2, 1]
            found = await samples(node)
            assert value(found, "scan_message_total") == 3 * opened
        again = await samples(node)
        assert value(again, "scan_message_total") == 3 * opened
        assert (
            value(again, "scan_message_bytes_total") == value(found, "scan_message_bytes_total") > 0
        )


async def test_a_slow_append_is_told_with_what_it_was(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await node.insert("c", rows(1))
    assert "slow_append" not in caplog.text
    monkeypatch.setattr(statistics, "SLOW_APPEND_S", 0.0)
    await node.insert("c", rows(2, 3))
    told = [record for record in caplog.records if "slow_append" in record.getMessage()]
    assert {(record.name, record.levelname) for record in told} == {
        ("streamingnode.statistics", "WARNING")
    }
    assert re.search(
        r"message_types=\['INSERT'\] groups=1 messages=1 binary_size=\d+ append_duration_s=\d",
        caplog.text,
    )


async def test_states_and_cuts_are_those_of_the_node(node: Node) -> None:
    await node.insert("c", rows(1))
    await node.flush()
    told = await node.statistics()
    found = await samples(node)
    assert value(found, "flusher_cut_number") == told.flusher.cut_number == 1
    assert value(found, "flusher_time_tick") == (told.flusher.cut_tick >> 18) / 1000
    assert (
        value(found, "recovery_info", state="open")
        == value(found, "flusher_info", state="running")
        == 1
    )
    for name in ("recovery_info", "flusher_info", "disk_info"):
        assert sum(count for (each, _), count in found.items() if each == name) == 1
    assert value(found, "info", wal_name="rocks", access_model="rw", term=str(told.log.term)) == 1
    async with node.read("c") as messages:
        await anext(aiter(messages))
        found = await samples(node)
    assert (
        sum(
            value(found, "scanner_total", scanner_model=model)
            for model in metrics.SCAN_MODES.values()
        )
        == 1
    )


async def test_topics_and_groups_beyond_the_bound_have_no_series(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "TOPICS_MAX", 2)
    monkeypatch.setattr(metrics, "GROUPS_MAX", 3)
    for topic in ("a", "b", "c"):
        await node.mq.create_topic(topic)
    for group in ("g1", "g2"):
        for topic in ("a", "b", "c"):
            await node.mq.create_consumer_group(topic, group)
    await node.mq.produce("a", [b"one", b"two"])
    found = await samples(node)
    assert value(found, "rocksmq_produce_total", topic="a") == 2
    assert {dict(labels)["topic"] for name, labels in found if name == "rocksmq_topic_bytes"} == {
        "a",
        "b",
    }
    assert len([name for name, _ in found if name == "rocksmq_group_lag"]) == 3


async def test_each_node_has_a_registry_of_its_own_and_none_is_global(node: Node) -> None:
    async with sn.open_node(None, http="127.0.0.1:0") as other:
        await node.insert("c", rows(1))
        assert value(await samples(node), "insert_rows_total") == 1
        assert value(await samples(other), "insert_rows_total") == 0
        assert other.node_id in await scraped(other)
        assert other.node_id not in await scraped(node)
        assert not [name for name, _ in await samples(other) if name.startswith("disk_")]
    assert not [
        each
        for each in prometheus_client.REGISTRY.collect()
        if each.name.startswith("streamingnode")
    ]
