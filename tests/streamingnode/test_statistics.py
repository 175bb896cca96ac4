"""What a node tells about itself, over whole nodes: the numbers are those of what was done."""

import asyncio
import io
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from interceptors.errors import ProducerFenced
from streamingnode.cli.output import Output
from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.statistics import NodeStatistics
from tests.streamingnode.append_double import schema_of
from wal.append import Pack

pytestmark = pytest.mark.anyio

SCHEMA = schema_of(id=pa.int64(), item=pa.string())
CHAIN = ["shard", "txn", "timetick", "lock", "redo", "room", "idempotency"]


class Heard:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.appends: list[tuple[str, str]] = []
        self.interceptors: list[str] = []

    def interceptor_timed(
        self, name: str, before_s: float, after_s: float, *, failed_before: bool
    ) -> None:
        assert before_s >= 0 <= after_s
        assert not (failed_before and after_s)
        self.interceptors.append(name)

    def append_ended(self, pack: Pack, seconds: float, status: str) -> None:
        assert seconds >= 0
        of_pieces = [
            (group.pieces[0].target.type.name, status) for group in pack.groups if group.pieces
        ]
        self.appends += of_pieces or [(pack.messages[0].type.name, status)]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with sn.open_node(None) as opened:
        await opened.create_collection("orders", SCHEMA, primary_key="id")
        yield opened


async def insert(node: Node, *ids: int) -> None:
    await node.insert("orders", [{"id": number, "item": "tea"} for number in ids])


async def test_appends_are_counted_timed_and_sized(node: Node) -> None:
    before = (await node.statistics()).appends
    await insert(node, 1)
    await insert(node, 2, 3)
    with pytest.raises(sn.StreamingNodeError):
        await node.commit_transaction(1)
    await anyio.lowlevel.checkpoint()  # an append is in flight until its task has ended
    after = (await node.statistics()).appends
    segment = 1  # made for the first row
    assert (after.succeeded - before.succeeded, after.failed - before.failed) == (2 + segment, 1)
    assert after.message_bytes.count - before.message_bytes.count == 2 + segment
    assert after.message_bytes.total > before.message_bytes.total
    assert after.bytes_per_s >= after.messages_per_s >= 0
    assert 0 < after.seconds.p50 <= after.seconds.p99 <= after.seconds.max
    assert after.seconds.count == after.succeeded
    assert (after.cancelled, after.in_flight, after.interceptors) == (0, 0, ())


async def test_write_that_is_refused_among_others_counts_as_failed(node: Node) -> None:
    await insert(node, 1)
    fenced = await node.producer("feed")
    await node.producer("feed")
    before = (await node.statistics()).appends
    writes = [node.insert("orders", [{"id": number, "item": "tea"}]) for number in range(2, 5)]
    refused = [fenced.insert("orders", [{"id": 5, "item": "tea"}]) for _ in range(2)]
    outcomes = await asyncio.gather(*writes, *refused, return_exceptions=True)
    assert [isinstance(outcome, ProducerFenced) for outcome in outcomes] == [False] * 3 + [True] * 2
    after = (await node.statistics()).appends
    assert (after.succeeded - before.succeeded, after.failed - before.failed) == (3, 2)


async def test_observer_hears_every_append_and_every_interceptor() -> None:
    heard = Heard()
    async with sn.open_node(None, observer=heard) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        await insert(node, 1)
        measured = (await node.statistics()).appends
    assert ("CREATE_COLLECTION", "ok") in heard.appends
    assert ("INSERT", "ok") in heard.appends
    assert len(heard.appends) >= measured.succeeded
    assert set(heard.interceptors) == set(CHAIN)


async def test_interceptors_are_timed_when_the_configuration_says_so() -> None:
    async with sn.open_node(
        None, config=load_config(arguments={"statistics.time_interceptors": True})
    ) as node:
        await node.create_collection("orders", SCHEMA, primary_key="id")
        measured = (await node.statistics()).appends
    assert [each.name for each in measured.interceptors] == CHAIN
    assert all(
        each.before_s.count == each.after_s.count == measured.succeeded
        for each in measured.interceptors
    )


async def test_open_reader_tells_how_far_it_is_behind_and_how_late_it_delivers(node: Node) -> None:
    await insert(node, 1)
    async with node.read("orders", types=[sn.MessageType.INSERT]) as messages:
        await anext(messages)
        await insert(node, 2)
        await anext(messages)
        (behind,) = (await node.statistics()).readers
        assert (behind.messages, behind.batches, behind.backlog) == (2, 2, 0)
        await insert(node, 3)
        await node.consistent_tick()
        (behind,) = (await node.statistics()).readers
        assert behind.backlog == 1
    assert behind.read_s.count > 0
    assert behind.delivery_s.count == 1, "the first was there before the reader"
    assert behind.delivery_s.max < 60
    assert (await node.statistics()).readers == ()


async def test_levels_follow_transactions_segments_and_cuts(node: Node) -> None:
    txn_id = await node.begin_transaction()
    await node.insert("orders", [{"id": 1, "item": "tea"}], txn_id=txn_id)
    writes = (await node.statistics()).writes
    assert (writes.open_transactions, writes.growing_segments) == (1, 0)
    assert writes.open_transaction_bytes > 0
    await node.commit_transaction(txn_id)
    writes = (await node.statistics()).writes
    assert (writes.open_transactions, writes.growing_segments) == (0, 1)
    cut = await node.flush()
    told = await node.statistics()
    assert (told.flusher.cut_number, told.flusher.cut_tick) == (cut.number, cut.tick)
    assert told.writes.growing_segments == 0


async def test_ticks_are_confirmed_up_to_what_was_acknowledged_and_readers_state_moves(
    node: Node,
) -> None:
    updates = (await node.statistics()).ticks.mvcc_updates
    written = await node.insert("orders", [{"id": 1, "item": "tea"}])
    ticks = (await node.statistics()).ticks
    assert written.time_tick <= ticks.confirmed <= ticks.last
    assert (ticks.unconfirmed, ticks.oldest_unconfirmed) == (0, 0)
    assert ticks.lag_s < 60
    assert ticks.mvcc_updates > updates


async def test_statistics_are_the_same_after_json_and_people_get_lines(node: Node) -> None:
    await insert(node, 1)
    async with node.read("orders") as messages:
        await anext(messages)
        told = await node.statistics()
    assert msgspec.json.decode(msgspec.json.encode(told), type=NodeStatistics) == told
    stdout = io.StringIO()
    Output(stdout=stdout).show({"statistics": told})
    values, _, readers = stdout.getvalue().partition("\nstatistics.readers:\n")
    shown = {line.split()[0]: line.partition(" ")[2].strip() for line in values.splitlines()}
    assert shown["statistics.log.state"] == "open"
    assert shown["statistics.appends.succeeded"] == str(told.appends.succeeded)
    assert len(readers.splitlines()) == 1 + len(told.readers)
