"""A bridge from a topic into a collection: every message once, whatever ends it and wherever."""

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode import bridging
from streamingnode.bridging import BridgeReport, bridge
from streamingnode.node import Node
from tests.streamingnode.remote.nodes import keys_in_log, node_behind_proxy
from tests.streamingnode.remote.proxy import until
from wal.errors import InvalidArgument, Overloaded, TopicNotFound
from wal.rocksmq.messages import PRODUCE_BYTES_MAX, ConsumerMessage, ProducerMessage

pytestmark = pytest.mark.anyio

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)]).append(
    pa.field("item", pa.string())
)
NAME = "bridge.t.c"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with sn.open_node(tmp_path / "node", cut_interval_s=None) as node:
        await node.create_collection("c", SCHEMA, primary_key="id", shards=2)
        await node.mq.create_topic("t")
        yield node


def as_json(*keys: int) -> list[bytes]:
    return [json.dumps({"id": key, "item": "tea"}).encode() for key in keys]


def as_arrow(*keys: int) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(
            pa.Table.from_pylist([{"id": key, "item": "tea"} for key in keys], schema=SCHEMA)
        )
    return bytes(sink.getvalue())


async def letters(node: Node) -> list[ConsumerMessage]:
    await node.mq.create_consumer_group("t.dead", "look")
    try:
        return await node.mq.consume("t.dead", "look", 10_000)
    finally:
        await node.mq.destroy_consumer_group("t.dead", "look")


async def run_once(node: Any, **options: Any) -> BridgeReport:
    return await bridge(
        node, "t", "c", **{"name": None, "once": True, "on_progress": lambda _: None} | options
    )


async def test_json_and_arrow_bodies_become_rows_and_the_report_counts_them(node: Node) -> None:
    ids = await node.mq.produce("t", [*as_json(1), as_arrow(2, 3), as_arrow(), *as_json(4)])
    report = await bridge(node, "t", "c", once=True)
    assert report == BridgeReport(messages=4, rows=4, dead=0, last_id=ids[-1])
    assert await keys_in_log(node) == [1, 2, 3, 4]
    assert (await node.mq.info())["t"].groups[NAME].lag == 0
    assert await bridge(node, "t", "c", once=True) == BridgeReport()
    assert "t.dead" not in await node.mq.info()


WRONG = {
    "no json": b"{",
    "no arrow": b"tea",
    "nothing": b"",
    "an unknown column": b'{"id": 1, "price": 2}',
    "no key": b'{"item": "tea"}',
    "a wrong type": b'{"id": "one"}',
    "a list": b'[{"id": 1}]',
    "no text": b'{"id": 1, "item": "\xff"}',
    "a row over a group": as_json(1)[0][:-1] + b" " * 9 + b',"item": "' + b"x" * (5 << 20) + b'"}',
    "half a stream": as_arrow(1, 2)[:-40],
}


async def test_a_body_that_does_not_fit_goes_to_the_dead_letters_with_its_error_and_origin(
    node: Node,
) -> None:
    first = await node.mq.produce("t", as_json(100))
    ids = [
        (await node.mq.produce("t", [ProducerMessage(body, {"kind": kind})]))[0]
        for kind, body in WRONG.items()
    ]
    last = await node.mq.produce("t", as_json(101))
    report = await bridge(node, "t", "c", once=True)
    assert (report.messages, report.rows, report.dead, report.last_id) == (
        2 + len(WRONG),
        2,
        len(WRONG),
        last[0],
    )
    assert await keys_in_log(node) == [100, 101]
    assert first[0] < ids[0]
    found = await letters(node)
    assert [each.payload for each in found] == [*WRONG.values()]
    assert [each.properties["kind"] for each in found] == [*WRONG]
    assert [(each.properties["topic"], int(each.properties["id"])) for each in found] == [
        ("t", each) for each in ids
    ]
    assert all(each.properties["error"] and each.properties["bridge"] == NAME for each in found)


async def test_what_a_program_wrote_wrong_is_said_in_the_dead_letter(node: Node) -> None:
    bodies = [b'{"id": "1"}', b'"{\\"id\\": 1}"', b'{"id": 1, "item": "\\ud800"}']
    await node.mq.produce("t", bodies)
    assert (await bridge(node, "t", "c", once=True)).dead == len(bodies)
    assert [each.properties["error"] for each in await letters(node)] == [
        (
            "SchemaMismatch: column 'id': the text '1' where int64 belongs is a number in quotes — "
            "write the value itself, without quotes around it"
        ),
        (
            "SchemaMismatch: it is a text with a JSON object in it — write the object itself, "
            "without quotes around it"
        ),
        (
            "SchemaMismatch: column 'item': '\\ud800' is half of a surrogate pair, which is no "
            "character — "
            "write both halves, or leave it out"
        ),
    ]


async def test_a_body_too_large_for_a_dead_letter_leaves_its_size_and_the_bridge_goes_on(
    node: Node,
) -> None:
    [big] = await node.mq.produce(
        "t", [ProducerMessage(bytes(PRODUCE_BYTES_MAX - 20), {"kind": "zeros"})]
    )
    await node.mq.produce("t", as_json(1))
    assert (await bridge(node, "t", "c", once=True)).dead == 1
    assert await keys_in_log(node) == [1]
    [found] = await letters(node)
    assert (found.payload, found.properties["left_out_bytes"]) == (b"", str(PRODUCE_BYTES_MAX - 20))
    assert (found.properties["topic"], found.properties["id"]) == ("t", str(big))


def as_stream(*columns: Any, names: Sequence[str] = SCHEMA.names, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.RecordBatch.from_arrays([*columns], names=[*names])
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def same_view(count: int, size_bytes: int) -> Any:
    """Return texts that all lie in the same bytes."""
    view = struct.pack("<i4sii", size_bytes, b"xxxx", 0, 0)
    buffers = [None, pa.py_buffer(view * count), pa.py_buffer(b"x" * size_bytes)]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


KEYS = pa.array(range(2_000), pa.int64())
SMALL_BODIES = {
    "compressed": lambda: as_stream(
        pa.array([0] * (1 << 20), pa.int64()), pa.nulls(1 << 20), compression="zstd"
    ),
    "a dictionary": lambda: as_stream(
        KEYS,
        pa.DictionaryArray.from_arrays(pa.array([0] * len(KEYS), pa.int8()), ["x" * (1 << 18)]),
    ),
    "views of the same": lambda: as_stream(KEYS, same_view(len(KEYS), 1 << 18)),
    "a run": lambda: as_stream(
        KEYS, pa.RunEndEncodedArray.from_arrays(pa.array([len(KEYS)]), pa.array(["x" * (1 << 18)]))
    ),
    "nulls in a list": lambda: as_stream(
        KEYS[:1], pa.ListArray.from_arrays([0, 1 << 28], pa.nulls(1 << 28))
    ),
}


@pytest.mark.parametrize("kind", SMALL_BODIES)
async def test_a_small_body_that_would_take_much_memory_goes_to_the_dead_letters_unread(
    node: Node, kind: str
) -> None:
    body = SMALL_BODIES[kind]()
    assert len(body) < 1 << 20
    await node.mq.produce("t", [body, *as_json(1)])
    before = pa.default_memory_pool().max_memory() or 0
    report = await bridge(node, "t", "c", once=True)
    assert (report.rows, report.dead) == (1, 1)
    assert (pa.default_memory_pool().max_memory() or 0) - before < 64 << 20
    assert [each.payload for each in await letters(node)] == [body]


async def test_nulls_that_would_take_much_memory_in_the_collection_are_refused_and_a_few_are_not(
    node: Node,
) -> None:
    vectors = SCHEMA.append(pa.field("vector", pa.list_(pa.float32(), 10_000)))
    await node.create_collection("v", vectors, primary_key="id")

    bodies = [
        as_stream(
            pa.array(range(count), pa.int64()),
            pa.nulls(count),
            pa.nulls(count),
            names=vectors.names,
        )
        for count in (2, 1_000_000)
    ]
    await node.mq.produce("t", bodies)
    report = await bridge(node, "t", "v", once=True)
    assert (report.rows, report.dead) == (2, 1)
    assert (await letters(node))[0].properties["error"].startswith("TooLarge")


async def test_rows_of_many_messages_are_made_and_written_a_part_at_a_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridging, "ROWS_BYTES_MAX", 100)
    await node.mq.produce("t", [*as_json(*range(20)), b"{", *as_json(*range(20, 40))])
    last_ids = list[int]()
    report = await bridge(
        node, "t", "c", once=True, on_progress=lambda now: last_ids.append(now.last_id)
    )
    assert (report.messages, report.rows, report.dead) == (41, 40, 1)
    assert await keys_in_log(node) == list(range(40))
    assert last_ids == sorted(set(last_ids))
    assert len(last_ids) > 4


async def test_bodies_of_dead_letters_with_large_properties_are_kept(node: Node) -> None:
    for _ in range(3):
        await node.mq.produce("t", [ProducerMessage(b"tea", {"long": "x" * (7 << 20)})])
    assert (await bridge(node, "t", "c", once=True)).dead == 3
    assert [each.payload for each in await letters(node)] == [b"tea"] * 3


async def test_a_running_bridge_brings_what_is_produced_and_ends_when_it_is_cancelled(
    node: Node,
) -> None:
    told: list[int] = []
    running = asyncio.ensure_future(
        bridge(node, "t", "c", on_progress=lambda report: told.append(report.messages))
    )
    await node.mq.produce("t", as_json(1))
    await until(lambda: told == [1])
    await node.mq.produce("t", as_json(2))
    await until(lambda: told == [1, 2])
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert await keys_in_log(node) == [1, 2]


async def test_a_topic_made_anew_is_bridged_from_its_beginning(node: Node) -> None:
    await node.mq.produce("t", as_json(1, 2))
    await bridge(node, "t", "c", once=True)
    await node.mq.destroy_topic("t")
    await node.mq.create_topic("t")
    await node.mq.produce("t", as_json(3))
    await bridge(node, "t", "c", once=True)
    assert await keys_in_log(node) == [1, 2, 3]


async def test_seeking_back_brings_nothing_twice_and_another_name_brings_it_again(
    node: Node,
) -> None:
    await node.mq.produce("t", as_json(1, 2))
    await bridge(node, "t", "c", once=True)
    await node.mq.force_seek("t", NAME, 0)
    assert (await bridge(node, "t", "c", once=True)).messages == 0
    assert (await bridge(node, "t", "c", once=True, name="again")).rows == 2


async def test_a_second_bridge_fences_the_first_and_nothing_is_lost_or_doubled(node: Node) -> None:
    first = asyncio.ensure_future(bridge(node, "t", "c"))
    for key in range(30):
        await node.mq.produce("t", as_json(key))
    await bridge(node, "t", "c", once=True)
    await node.mq.produce("t", as_json(30))
    outcome = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(outcome[0], sn.errors.ProducerFenced)
    await bridge(node, "t", "c", once=True)
    assert await keys_in_log(node) == [*range(31)]


async def test_others_who_consume_from_the_group_are_noticed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.mq.produce("t", as_json(*range(5)))
    go_to = bridging._Crossing._go_to

    async def and_another_consumes(crossing: Any, message_id: int) -> None:
        await go_to(crossing, message_id)
        await node.mq.consume("t", NAME, 1)

    monkeypatch.setattr(bridging._Crossing, "_go_to", and_another_consumes)
    with pytest.raises(Overloaded, match="another name"):
        await bridge(node, "t", "c", once=True)
    monkeypatch.undo()
    await bridge(node, "t", "c", once=True)
    assert await keys_in_log(node) == [*range(5)]


async def test_what_cannot_be_is_refused(node: Node) -> None:
    for arguments, kind in (
        (("no", "c"), TopicNotFound),
        (("t", "no"), sn.errors.CollectionNotFound),
    ):
        with pytest.raises(kind):
            await bridge(node, *arguments, once=True)
    with pytest.raises(InvalidArgument):
        await bridge(node, "t", "c", once=True, name="a/b")


# --- killed between its steps ---------------------------------------------------------------------


class KilledError(BaseException):
    """The process of the bridge is gone."""


class Steps:
    """Counts the steps of a bridge, and ends it before or after one of them."""

    def __init__(self, last: int, *, is_done: bool) -> None:
        self.left = last
        self.is_done = is_done
        self.is_killed = False
        self.names: list[str] = []


class Mortal:
    """Passes every call on; the call at which the bridge is killed is done, or it is not, and its
    answer is lost.
    """

    def __init__(self, original: Any, steps: Steps) -> None:
        self._original = original
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._original, name)
        steps = self._steps
        if name == "mq":
            return Mortal(found, steps)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any, **options: Any) -> Any:
            steps.names.append(name)
            steps.left -= 1
            if not steps.left:
                steps.is_killed = True
                if steps.is_done:
                    await found(*arguments, **options)
                raise KilledError
            result = await found(*arguments, **options)
            return Mortal(result, steps) if name in {"producer", "register_consumer"} else result

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._steps.is_killed:  # who is killed closes nothing
            await self._original.close()


async def test_a_bridge_that_is_killed_at_any_step_neither_loses_nor_doubles(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round is killed at one step further than the one before, twice, with the step done and
    not done.
    """
    monkeypatch.setattr(bridging, "MESSAGES_MAX", 7)
    monkeypatch.setattr(bridging, "DEAD_BYTES", 4)
    keys = list[int]()
    dead = list[bytes]()
    killed_at = set[tuple[str, bool]]()
    key = 0
    for step in range(1, 45):
        for is_done in (False, True):
            for _ in range(2):
                good = [key, key + 1]
                key = key + 2
                bad = [b"bad %d" % number for number in range(key, key + 3)]
                await node.mq.produce("t", [as_json(good[0])[0], *bad, as_json(good[1])[0]])
                keys = keys + good
                dead = dead + bad
                steps = Steps(step, is_done=is_done)
                try:
                    await run_once(Mortal(node, steps))
                except KilledError:
                    killed_at.add((steps.names[-1], is_done))
    await run_once(node)
    assert await keys_in_log(node) == keys
    found = await letters(node)
    assert [each.payload for each in found] == dead
    named = {name for name, _ in killed_at}
    assert named >= {
        "create_consumer_group",
        "producer",
        "info",
        "force_seek",
        "register_consumer",
        "consume",
    }
    assert named >= {"create_topic", "get_latest_msg", "put_note", "produce", "insert", "ack"}
    exact = {
        (name, is_done)
        for name in ("put_note", "produce", "insert", "ack")
        for is_done in (False, True)
    }
    assert killed_at >= exact


@pytest.mark.may_block
def test_a_process_that_is_killed_again_and_again_brings_every_message_once(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "node", cut_interval_s=None) as node:
        node.create_collection("c", SCHEMA, primary_key="id")
        node.mq.create_topic("t")
        for key in range(60):
            node.mq.produce("t", [as_json(key)[0], b"bad %d" % key])
    for _ in range(4):
        command = [
            sys.executable,
            "-m",
            "tests.streamingnode.killed_bridge",
            str(tmp_path / "node"),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(8)]
            process.kill()
        assert said[-1].strip().isdigit()
    with sn.sync.open_node(tmp_path / "node", cut_interval_s=None) as node:
        assert sn.sync.bridge(node, "t", "c").messages > 0
        assert sorted(map(int, node.snapshot("c")["id"].to_numpy())) == [*range(60)]
        node.mq.create_consumer_group("t.dead", "look")
        found = [each.payload for each in node.mq.consume("t.dead", "look", 1000)]
        assert found == [b"bad %d" % key for key in range(60)]


async def test_a_bridge_over_a_connection_goes_on_when_that_is_lost(tmp_path: Path) -> None:
    async with node_behind_proxy(tmp_path / "node") as served, served.client() as client:
        await served.owner.mq.create_topic("t")
        told: list[int] = []
        running = asyncio.ensure_future(
            bridge(client, "t", "c", on_progress=lambda report: told.append(report.last_id))
        )
        for key in range(5):
            ids = await served.owner.mq.produce("t", [*as_json(key), b"bad %d" % key])
            # asked in this round only
            await until(lambda: told and told[-1] == ids[-1])  # noqa: B023
            served.proxy.cut()
        running.cancel()
        await asyncio.wait([running])
        assert await keys_in_log(served.owner) == [*range(5)]
        assert [each.payload for each in await letters(served.owner)] == [
            b"bad %d" % key for key in range(5)
        ]


async def test_over_a_connection_a_bad_body_larger_than_a_call_takes_does_not_stop_a_bridge(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy(tmp_path / "node") as served, served.client() as client:
        await served.owner.mq.create_topic("t")
        await served.owner.mq.produce("t", [bytes(9 << 20)])
        await served.owner.mq.produce("t", as_json(1))
        assert (await bridge(client, "t", "c", once=True)).dead == 1
        assert await keys_in_log(served.owner) == [1]
        assert [each.properties["left_out_bytes"] for each in await letters(served.owner)] == [
            str(9 << 20)
        ]


async def test_a_topic_whose_dead_letters_could_have_no_name_is_refused_before_anything_is_done(
    node: Node,
) -> None:
    topic = "t" * 252
    await node.mq.create_topic(topic)
    with pytest.raises(InvalidArgument, match="too long"):
        await bridge(node, topic, "c", once=True, name="b")
    assert (await node.mq.info())[topic].groups == {}


async def test_letters_of_others_that_look_like_ones_own_hold_no_bridge_up(node: Node) -> None:
    [at] = await node.mq.produce("t", [b"bad"])
    await node.mq.create_topic("t.dead")
    await (await node.producer(NAME)).put_note(msgspec.msgpack.encode((at, -1)))  # and crashed then
    looks: list[dict[str, str]] = [
        {},
        {"topic": "t"},
        {"topic": "t", "id": "first"},
        {"topic": "u", "id": str(at)},
    ]
    await node.mq.produce(
        "t.dead", [ProducerMessage(b"", {"bridge": NAME, **properties}) for properties in looks]
    )
    assert (await run_once(node)).dead == 1
