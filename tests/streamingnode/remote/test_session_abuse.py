"""A client that does not read, and rows and ids that nobody of ours sends."""

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest

import streamingnode as sn
from scanner.deliver_policy import StartingPoint
from streamingnode.collections import READ_COLLECTIONS_MAX, Definition
from streamingnode.remote import connection as connection_module
from streamingnode.remote.calls import AckCall, Opened, ReadCall, TransactionCall
from streamingnode.remote.connection import SEND_BUFFER_BYTES
from streamingnode.remote.writes import WireGroup, WireWrites
from streamingnode.writing.producer import NOTE_BYTES_MAX
from streamingnode.writing.target import PLAIN_DECODED_ROWS_MAX
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    SETTINGS,
    Served,
    contents,
    node_behind_proxy,
    rows,
    serving,
)
from tests.streamingnode.remote.proxy import Way, until
from tests.streamingnode.remote.raw import frame_bytes, raw_client, writes_of
from tests.streamingnode.remote.session_cases import (
    IDS,
    INSERTS,
    changed,
    greeted,
    serves,
    session_of,
    squeezed,
    told_of,
    waiting_bytes,
)
from wal.append import AppendResult
from wal.frames import Frame, FrameKind
from wal.headers import (
    BeginTxnHeader,
    CommitTxnHeader,
    Header,
    InsertHeader,
    MessageType,
    RollbackTxnHeader,
)
from wal.wire_types import WireError, decode

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


# --- a client that does not read ------------------------------------------------------------------


async def test_a_reader_that_takes_nothing_holds_up_nobody_else(served: Served) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    for key in range(8):
        await served.owner.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    async with greeted(served) as client:
        for number in range(1, 4):
            client.call(
                number, "read", ReadCall(info.id, "all", None, None, None, INSERTS, None, 1 << 40)
            )
        await until(lambda: session_of(served).connection._is_full)
        await serves(served)
        assert waiting_bytes(served) < 3 * SEND_BUFFER_BYTES


async def test_many_readers_of_one_connection_that_takes_nothing_have_no_more_waiting_than_one(
    served: Served,
) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    for key in range(8):
        await served.owner.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    async with greeted(served) as client:
        for number in range(1, 40):
            client.call(
                number, "read", ReadCall(info.id, "all", None, None, None, INSERTS, None, 1 << 40)
            )
        await until(lambda: session_of(served).connection._is_full)
        await serves(served)
        assert waiting_bytes(served) < 3 * SEND_BUFFER_BYTES


async def test_a_stream_sends_as_much_as_it_has_credit_for(served: Served) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    for key in range(4):
        await served.owner.insert("c", [{"id": key, "item": "x" * 100_000}])
    async with greeted(served) as client:
        client.call(1, "read", ReadCall(info.id, "all", None, None, None, INSERTS, None, 0))
        opened: Opened = (await client.expect(FrameKind.OPENED)).value(Opened)
        assert opened == Opened(1, 0)
        await client.still_served()
        client.say(FrameKind.CREDIT, 1, 1)
        await client.expect(FrameKind.MESSAGES)


async def test_answers_that_nobody_reads_are_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "SEND_BUFFER_BYTES", 1 << 16)
    bound = 1 << 20
    calls = b"".join(frame_bytes(FrameKind.CALL, number, "x" * 80) for number in range(1, 20_000))
    async with greeted(served) as client:
        transport = session_of(served).connection._transport
        sending = client._writer.transport
        assert transport is not None
        for _ in range(10):  # beyond what the system keeps for both
            client.send(calls)
            await until(
                lambda: (
                    not transport.is_reading()
                    or waiting_bytes(served) > bound
                    or not sending.get_write_buffer_size()
                )
            )
            if not transport.is_reading():
                break  # a node that does not read any more is what is asked for
            assert waiting_bytes(served) <= bound


async def test_the_server_closes_although_a_client_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sn.open_node(None, **SETTINGS) as owner:
        await owner.create_collection("c", SCHEMA, primary_key="id")
        for key in range(12):
            await owner.insert("c", [{"id": key, "item": "x" * 1_000_000}])
        async with serving(owner) as served, raw_client(served.port) as client:
            await client.greet()
            for number in range(1, 4):
                client.call(number, "snapshot", ["c", None])
            await until(lambda: session_of(served).connection._is_full)
            await owner.create_collection("d", SCHEMA, primary_key="id")
            await until(lambda: served.server.shared.tasks)
            try:
                monkeypatch.setattr("streamingnode.remote.connection.CLOSE_S_MAX", 0.05)
                async with asyncio.timeout(60):
                    await served.server.close()
            finally:
                client.close()


async def test_results_that_come_between_the_parts_of_a_catalog_are_results(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    for key in range(8):
        await served.owner.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    async with greeted(served) as client:
        session = session_of(served)
        for number in range(2, 5):
            client.call(
                number, "read", ReadCall(info.id, "all", None, None, None, INSERTS, None, 1 << 40)
            )
        await until(lambda: session.connection._is_full)
        monkeypatch.setattr(connection_module, "PART_BYTES", 64)  # as with many collections
        await served.owner.create_collection("d", SCHEMA, primary_key="id")
        await until(session._telling.locked)
        writes, data = writes_of(served.owner, [1000])
        client.say(FrameKind.WRITES, 50, writes, data)
        parts = 0
        while (frame := await client.frame()) is not None:
            if frame.number == 0 and frame.kind == FrameKind.PART:
                parts += 1
            elif frame.number == 0 and frame.kind == FrameKind.CATALOG:
                parts = 0
            elif frame.kind == FrameKind.RESULTS:
                break
        assert parts == 0


# --- rows and ids that nobody of ours sends -------------------------------------------------------


async def test_rows_that_are_much_more_than_they_say_are_refused_unread(served: Served) -> None:
    writes, data = writes_of(served.owner, [], WireGroup(1, False, ((0, 1),)), payload=squeezed(1))
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, writes, data)
        while (frame := await client.frame()) is not None:
            assert frame.kind != FrameKind.RESULTS


async def test_a_body_that_is_much_more_than_it_says_is_refused(served: Served) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    header = msgspec.msgpack.encode(
        InsertHeader(info.id, info.partitions[0].id, info.schema_version, 1)
    )
    async with greeted(served) as client:
        client.call(1, "transaction", step(MessageType.BEGIN_TXN, BeginTxnHeader(0)))
        begun: AppendResult = decode((await client.expect(FrameKind.REPLY)).payload, AppendResult)
        kinds = []
        for number, vchannel in enumerate(info.vchannels, 2):  # of one of them it is
            body = (MessageType.INSERT, vchannel, header, squeezed(8))
            client.call(number, "transaction", TransactionCall((body,), begun.txn_id))
            frame = await client.frame()
            kinds.append(frame and frame.kind)
        assert FrameKind.REPLY not in kinds


@pytest.mark.parametrize("is_plain", [False, True])
async def test_a_row_over_an_append_group_is_refused_although_those_beside_it_are_small(
    served: Served, is_plain: bool
) -> None:
    table = [{"id": 0, "item": "x" * (6 << 20)}, *rows(*range(1, 30))]
    batch = pa.RecordBatch.from_pylist(table, schema=SCHEMA)
    plain = msgspec.msgpack.encode([list(row.values()) for row in table]) if is_plain else None
    group = WireGroup(1, False, ((0, 1),))
    writes, data = writes_of(served.owner, [], group, batch=batch, payload=plain, is_plain=is_plain)
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, writes, data)
        outcome = await client.result()
        assert isinstance(outcome, WireError)
        assert outcome.code == "TOO_LARGE"


async def test_no_client_writes_in_the_name_of_the_node(tmp_path: Path) -> None:
    async with node_behind_proxy(tmp_path) as served, greeted(served) as client:
        writes, data = writes_of(served.owner, [1], WireGroup(2**63 - 1, False, ((0, 1),), 1, 1))
        client.say(FrameKind.WRITES, 1, writes, data)
        await client.frame()
    async with sn.open_node(tmp_path, **SETTINGS) as node:
        await node.insert("c", rows(2))


@pytest.mark.parametrize("kind", [None, *MessageType])
async def test_a_step_of_no_messages_or_of_none_of_a_transaction_is_refused(
    served: Served, kind: MessageType | None
) -> None:
    async with greeted(served) as client:
        client.call(1, "transaction", step(MessageType.BEGIN_TXN, BeginTxnHeader(0)))
        begun: AppendResult = decode((await client.expect(FrameKind.REPLY)).payload, AppendResult)
        messages = () if kind is None else ((kind, "", b"\xc1", b""),)
        client.call(2, "transaction", TransactionCall(messages, begun.txn_id))
        assert (await client.error()).code == "PROTOCOL_ERROR"
        await serves(served)


async def test_no_client_commits_a_transaction_of_the_process_that_has_the_node(
    served: Served,
) -> None:
    txn = served.owner.transaction()
    for key in range(6):
        await txn.insert("c", [{"id": key, "item": "x" * 1_000_000}])
    try:
        async with greeted(served) as client:
            client.call(
                1, "transaction", step(MessageType.COMMIT_TXN, CommitTxnHeader(), txn._txn_id, 3)
            )
            frame = await client.frame()
            assert frame is not None
            assert frame.kind == FrameKind.ERROR
    finally:
        await txn.rollback()


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
async def test_a_sequence_or_epoch_over_the_bound_is_refused(served: Served, number: int) -> None:
    for group in (WireGroup(number, False, ((0, 1),)), WireGroup(1, False, ((0, 1),), 0, number)):
        async with greeted(served) as client:
            writes, data = writes_of(served.owner, [1], group)
            client.say(FrameKind.WRITES, 1, writes, data)
            while (frame := await client.frame()) is not None:
                assert frame.kind != FrameKind.RESULTS


@pytest.mark.parametrize("number", [-1, 0, *IDS])
async def test_ids_at_their_bounds_are_refused_or_served_and_hurt_nobody(
    served: Served, number: int
) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    requests = [
        ("transaction", step(MessageType.COMMIT_TXN, CommitTxnHeader(), number, 1)),
        ("transaction", step(MessageType.ROLLBACK_TXN, RollbackTxnHeader(), number)),
        ("transaction", step(MessageType.BEGIN_TXN, BeginTxnHeader(number))),
        ("read", ReadCall(number, "all", None, None, None, INSERTS, None, 1)),
        ("read", ReadCall(info.id, "from", ("memory", number), None, None, INSERTS, None, 1)),
        ("read", ReadCall(info.id, "all", None, number, None, INSERTS, None, 1)),
        (
            "read",
            ReadCall(
                info.id, "all", None, None, None, (cast("MessageType", number % 2**31),), None, 1
            ),
        ),
        (
            "read",
            ReadCall(info.id, "all", None, None, None, INSERTS, StartingPoint(number, number), 1),
        ),
        (
            "read",
            ReadCall(info.id, "all", None, None, "r", INSERTS, StartingPoint(min(number, 0), 0), 1),
        ),
        ("read", ReadCall(info.id, "all", None, None, None, INSERTS, None, number)),
        ("ack", AckCall(number if number >= 0 else 1, 1, 1)),
        ("snapshot", ["c", number]),
    ]
    async with greeted(served) as client:
        for call_number, (name, request) in enumerate(requests, 1):
            client.call(call_number, name, request)
        for key, change in enumerate(
            ("collection_id", "partition_id", "schema_version", "type"), 50
        ):
            writes, data = changed(writes_of(served.owner, [key]), change, number)
            async with greeted(served) as other:
                other.say(FrameKind.WRITES, 1, writes, data)
                await other.frame()
        await client.still_served()
        await serves(served)


def step(kind: MessageType, header: Header, *stamp: int) -> TransactionCall:
    """Return the call that has a message of this kind."""
    return TransactionCall(((kind, "", msgspec.msgpack.encode(header), b""),), *stamp)


def array(item: bytes, count: int = 500_000) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize("part", ["groups", "targets", "pieces"])
async def test_writes_of_far_more_parts_than_any_client_sends_are_refused_undecoded(
    served: Served, part: str
) -> None:
    writes, data = writes_of(served.owner, [1])
    encode = msgspec.msgpack.encode
    group = WireGroup(1, False, ((0, 1),))
    targets = encode(writes.targets)
    groups = encode(writes.groups)
    if part == "groups":
        groups = array(encode(group))
    elif part == "targets":
        targets = array(encode(writes.targets[0]))
    else:
        groups = b"\x91\x95\x01\xc3" + array(b"\x92\x00\x01") + b"\x00\x01"
    async with greeted(served) as client:
        session = session_of(served)
        frame = Frame(FrameKind.WRITES, 1, b"\x93\x01" + targets + groups, b"")
        tracemalloc.start()
        with pytest.raises(sn.errors.ProtocolError, match="length <="):
            session._writes.take(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 1 << 20
        client.say(FrameKind.WRITES, 1, msgspec.Raw(frame.meta), data)
        await client.ended()


async def test_a_read_of_millions_of_types_is_refused(served: Served) -> None:
    async with greeted(served) as client:
        client.say(
            FrameKind.CALL, 1, "read", b"\x98\x01\xa3all\xc0\xc0\xc0" + array(b"\x02") + b"\xc0\x01"
        )
        assert (await client.error()).code == "PROTOCOL_ERROR"


BAD_NAMES = ["../../evil", "/etc/passwd", "..", "_node", "a\nb", "", "x" * 1_000_000, "A", "a\0b"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name[:12]))
async def test_names_that_would_be_paths_or_are_reserved_are_refused_whoever_sends_them(
    served: Served, name: str
) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    requests = [
        ("create_collection", [Definition(name, SCHEMA, "id", 1, ()), False, None]),
        ("create_collection", [Definition("new", SCHEMA, "id", 1, (name,)), False, None]),
        ("create_partition", ["c", name, False, None]),
        ("open_producer", [name]),
        ("read", ReadCall(info.id, "all", None, None, name, INSERTS, None, 1 << 20)),
    ]
    async with greeted(served) as client:
        for number, (call, request) in enumerate(requests, 1):
            client.call(number, call, request)
            assert (await client.error()).code == "INVALID_ARGUMENT", (number, call)
    assert parts_of(served.owner).catalog.collections() == (info,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"primary_key": "nothing"},
        {"shards": -1},
        {"shards": 100_000},
        {"partitions": ("a", "a")},
        {"partitions": tuple(map(str, range(5_000)))},
        {"schema": pa.schema([("id", pa.uint8())])},
        {"schema": pa.schema([("id", pa.int64()), ("_tick", pa.int64())])},
    ],
    ids=lambda wrong: repr(wrong)[:40],
)
async def test_a_definition_that_no_client_of_ours_makes_is_refused(
    served: Served, wrong: dict[str, Any]
) -> None:
    before = parts_of(served.owner).catalog.collections()
    definition = replace(Definition("new", SCHEMA, "id", 1, ()), **wrong)
    async with greeted(served) as client:
        client.call(1, "create_collection", [definition, False, None])
        assert (await client.error()).code in {"INVALID_ARGUMENT", "SCHEMA_MISMATCH"}
    assert parts_of(served.owner).catalog.collections() == before


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 40, squeezed(64)], ids=["nothing", "no message", "compressed"]
)
async def test_keys_of_a_snapshot_that_are_no_rows_are_refused_unread(
    served: Served, data: bytes
) -> None:
    async with greeted(served) as client:
        client.call(1, "snapshot", ["c", None, None, data])
        assert (await client.error()).code == "PROTOCOL_ERROR"
        client.call(2, "snapshot", ["c", None, ["id", "id"], None])
        assert (await client.error()).code == "SCHEMA_MISMATCH"
        client.call(3, "snapshot", ["c", None])  # as clients from before keys and columns send it
        await client.expect(FrameKind.REPLY)
    await serves(served)


@pytest.mark.parametrize(
    "ids",
    [(), tuple(range(READ_COLLECTIONS_MAX + 1)), "c", (1, 2**63)],
    ids=["none", "many", "name", "unknown"],
)
async def test_a_reader_of_no_collections_or_too_many_is_refused(served: Served, ids: Any) -> None:
    async with greeted(served) as client:
        client.call(1, "read", ReadCall(ids, "all", None, None, None, INSERTS, None, 1))
        assert (await client.error()).code in {"PROTOCOL_ERROR", "COLLECTION_NOT_FOUND"}
        await client.still_served()


async def test_a_note_over_its_bound_is_refused(served: Served) -> None:
    feed = await served.owner.producer("feed")
    async with greeted(served) as client:
        client.call(1, "put_note", ["feed", feed.epoch, bytes(NOTE_BYTES_MAX + 1)])
        assert (await client.error()).code == "INVALID_ARGUMENT"


async def test_a_batch_of_no_bytes_is_refused(served: Served) -> None:
    failures = list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    try:
        async with greeted(served) as client:
            writes, data = writes_of(served.owner, [1], payload=b"")
            client.say(FrameKind.WRITES, 1, writes, data)
            await client.ended()
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert failures == []


@pytest.mark.parametrize("number", [2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1])
async def test_a_place_that_no_reader_can_have_reached_is_refused(
    served: Served, number: int
) -> None:
    (info,) = parts_of(served.owner).catalog.collections()
    async with greeted(served) as client:
        client.call(
            1, "read", ReadCall(info.id, "all", None, None, "billing", INSERTS, None, 1 << 20)
        )
        await client.expect(FrameKind.OPENED)
        client.call(2, "ack", AckCall(1, number, number))
        while (frame := await client.frame()) is not None and frame.kind not in {
            FrameKind.REPLY,
            FrameKind.ERROR,
        }:
            pass
        assert frame is None or frame.kind == FrameKind.ERROR


async def test_rows_of_another_schema_version_are_refused_and_those_beside_them_written(
    served: Served,
) -> None:
    writes, data = writes_of(served.owner, [1])
    wrong = msgspec.structs.replace(writes.targets[0], schema_version=9)
    both = WireWrites(
        1,
        (wrong, writes.targets[0]),
        (WireGroup(1, False, ((0, 1),)), WireGroup(2, False, ((1, 1),))),
    )
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, both, data + data)
        assert await told_of(client, 2) == ({1}, {"SCHEMA_MISMATCH"})
    assert (await contents(served.owner)).keys() == {1}


MISFITS = {
    "a null key": [[None, "tea"]],
    "a key over 64 bits": [[1 << 63, "tea"]],
    "a key that is text": [["1", "tea"]],
    "a key that is a truth": [[True, "tea"]],
    "a text that is bytes": [[1, b"tea"]],
    "a text that is no UTF-8": msgspec.Raw(b"\x91\x92\x01\xa1\xff"),
    "a cell too few": [[1]],
    "a cell too many": [[1, "tea", 2]],
    "no rows": [],
    "no array": {"id": 1},
    "something behind": msgspec.Raw(b"\x91\x92\x01\xa1a\x00"),
    "an array that is shorter than it says": msgspec.Raw(b"\xdd\xff\xff\xff\xff\x92\x01\xa1a"),
    "more rows than are taken": [[key, "tea"] for key in range(PLAIN_DECODED_ROWS_MAX + 1)],
}


@pytest.mark.parametrize("misfit", MISFITS)
async def test_plain_rows_that_do_not_fit_are_refused_and_those_beside_them_written(
    served: Served, misfit: str
) -> None:
    encoded = msgspec.msgpack.encode
    writes, wrong = writes_of(served.owner, [], payload=encoded(MISFITS[misfit]), is_plain=True)
    right = encoded([[7, "tea 7"]])
    targets = (
        *writes.targets,
        msgspec.structs.replace(writes.targets[0], payload_bytes=len(right)),
    )
    both = WireWrites(1, targets, (WireGroup(1, False, ((0, 1),)), WireGroup(2, False, ((1, 1),))))
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, both, wrong + right)
        assert await told_of(client, 2) == ({1}, {"SCHEMA_MISMATCH"})
    assert await contents(served.owner) == {7: "tea 7"}


async def test_a_write_of_more_plain_rows_than_there_are_ends_the_connection(
    served: Served,
) -> None:
    writes, data = writes_of(
        served.owner,
        [],
        WireGroup(1, False, ((0, 2),)),
        payload=msgspec.msgpack.encode([[7, "tea"]]),
        is_plain=True,
    )
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, writes, data)
        await client.ended()
    assert await contents(served.owner) == {}


async def test_plain_rows_of_columns_that_have_none_are_refused(served: Served) -> None:
    schema = SCHEMA.append(pa.field("when", pa.timestamp("us")))
    await served.owner.create_collection("d", schema, primary_key="id")
    batch = pa.RecordBatch.from_pylist([{"id": 1, "item": "tea", "when": None}], schema=schema)
    payload = msgspec.msgpack.encode([[1, "tea", None]])
    writes, data = writes_of(
        served.owner, [], collection="d", batch=batch, payload=payload, is_plain=True
    )
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, writes, data)
        outcome = await client.result()
        assert isinstance(outcome, WireError)
        assert outcome.code == "SCHEMA_MISMATCH"


async def test_a_frame_of_no_writes_ends_the_connection(served: Served) -> None:
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, WireWrites(1, (), ()))
        await client.ended()


async def test_what_a_client_says_on_the_way_out_is_the_last_of_it(served: Served) -> None:
    async with served.client() as client:
        await client.insert("c", rows(1))
        assert served.proxy.passed[Way.TO_NODE]
