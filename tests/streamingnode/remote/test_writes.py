"""Writes cross a connection as they were made, each with its own rows, and each caller hears of its
own offsets.
"""

import asyncio
from collections import Counter
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamingnode as sn
from interceptors.shard.catalog import Catalog
from streamingnode.node import Node
from streamingnode.remote.writes import (
    FrameOfWrites,
    Targets,
    WireGroup,
    WireWrites,
    frame_of,
    groups_of,
)
from streamingnode.writing.target import BatchTarget, WriteTarget
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, contents, node_behind_proxy, rows
from wal.adaptor import WalLimits
from wal.append import AppendGroup
from wal.errors import ProtocolError, StreamingNodeError, TooLarge
from wal.frames import FRAME_BYTES_MAX, PREFACE, FrameReader
from wal.headers import MessageType
from wal.position import CLIENT_PRODUCER_IDS, ProducerStamp
from wal.rows import Piece

CLIENT = CLIENT_PRODUCER_IDS + 5
UNIT_BYTES_MAX = 1 << 20
Made = tuple[str, int, tuple[int, ...]]
"""A write as it is drawn: its kind, a named producer or 0, and its keys."""

writes_drawn = st.lists(
    st.tuples(
        st.sampled_from(["insert", "upsert", "delete", "transaction"]),
        st.sampled_from([0, 0, 0, 9]),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


@cache
def catalog() -> Catalog:
    """Return a catalog with a collection of one shard, and one of three."""
    return asyncio.run(_catalog())


async def _catalog() -> Catalog:
    async with sn.open_node(None, **SETTINGS) as node:
        for shards in (1, 3):
            await node.create_collection(f"c{shards}", SCHEMA, primary_key="id", shards=shards)
        return parts_of(node).catalog


def target_of(shards: int) -> WriteTarget:
    return WriteTarget(catalog().collection_by_name(f"c{shards}"))


def groups(made: list[Made], target: WriteTarget, *, is_plain: bool = False) -> list[AppendGroup]:
    """Return the groups of writes, some plain and some Arrow, or all plain."""
    inserts = target.into("insert")[0]
    found = []
    for number, (kind, producer, keys) in enumerate(made):
        cells = tuple((key, f"item {number}") for key in keys)
        batch = pa.RecordBatch.from_pylist(
            [{"id": key, "item": item} for key, item in cells], schema=SCHEMA
        )
        added = Piece(inserts, cells if is_plain or number % 2 else batch, 1_000)
        removed = Piece(target.deletes, tuple((key,) for key in keys), 500)
        pieces = {
            "insert": [added],
            "delete": [removed],
            "upsert": [removed, added],
            "transaction": [added, removed, added],
        }[kind]
        stamp = ProducerStamp(producer, 3, 100 + number) if producer else None
        many = len(pieces) > 1
        found.append(
            AppendGroup(
                pieces=pieces, is_transaction=many, rows_bytes=1_500 * len(pieces), producer=stamp
            )
        )
    return found


def framed(made: list[Made], target: WriteTarget, *, is_plain: bool = False) -> FrameOfWrites:
    """Return the frame of writes."""
    sequences = count(1)

    def stamp(group: AppendGroup | None) -> ProducerStamp:
        if group is None:
            return ProducerStamp(CLIENT, 1, next(sequences))
        assert group.producer is not None
        return group.producer

    return frame_of(
        4, groups(made, target, is_plain=is_plain), stamp, settled=1, unit_bytes_max=UNIT_BYTES_MAX
    )


def taken(frame: FrameOfWrites) -> tuple[WireWrites, memoryview]:
    """Return what the other side has of a frame."""
    data = PREFACE + b"".join(bytes(part) for part in frame.parts)
    (whole,) = FrameReader(FRAME_BYTES_MAX).feed(data)
    assert whole.number == 4
    return whole.value(WireWrites), memoryview(whole.payload)


def made_again(wire: WireWrites, payload: memoryview) -> list[AppendGroup | StreamingNodeError]:
    """Return the groups that the node makes of a frame."""

    def stamp(group: WireGroup) -> ProducerStamp:
        return ProducerStamp(group.producer_id or CLIENT, group.epoch, group.sequence)

    return groups_of(wire, payload, Targets(catalog).find, stamp, WalLimits())


def told(group: AppendGroup) -> list[tuple[MessageType, list[dict[str, Any]]]]:
    """Return what a group does: the rows of each of its pieces."""
    found = []
    for piece in group.pieces:
        assert isinstance(piece.target, BatchTarget)
        found.append((piece.target.type, piece.target.joined([piece.rows]).to_pylist()))
    return found


@given(made=writes_drawn, shards=st.sampled_from([1, 3]), is_plain=st.booleans())
def test_a_frame_has_the_rows_of_each_write_and_its_stamp(
    made: list[Made], shards: int, is_plain: bool
) -> None:
    frame = framed(made, target_of(shards), is_plain=is_plain)
    found = made_again(*taken(frame))
    own = count(1)
    assert len(found) == len(frame.units)
    for unit, group in zip(frame.units, found, strict=True):
        assert isinstance(group, AppendGroup)
        given_stamp = unit.groups[0].producer
        assert group.producer == (given_stamp or ProducerStamp(CLIENT, 1, next(own)))
        assert group.is_transaction == unit.groups[0].is_transaction
        parts = [told(each) for each in unit.groups]
        if len(unit.groups) == 1:
            assert told(group) == parts[0]
        else:  # inserts that go as one, in the order of their callers
            assert {kind for ((kind, _),) in parts} == {MessageType.INSERT}
            assert told(group) == [
                (MessageType.INSERT, [row for ((_, rows_of),) in parts for row in rows_of])
            ]
            assert all(each.producer is None for each in unit.groups)
    assert sum(len(unit.groups) for unit in frame.units) == len(made)


def test_inserts_are_joined_up_to_the_bound_and_those_of_named_producers_never() -> None:
    plain: list[Made] = [("insert", 0, (key,)) for key in range(6)]
    named: list[Made] = [("insert", 9, (key,)) for key in range(6)]
    assert [len(unit.groups) for unit in framed(plain, target_of(3)).units] == [6]
    assert [len(unit.groups) for unit in framed(named, target_of(3)).units] == [1] * 6
    mixed = [*plain[:2], named[0], *plain[2:4], ("delete", 0, (1,)), *plain[4:]]
    assert [len(unit.groups) for unit in framed(mixed, target_of(3)).units] == [2, 1, 2, 1, 2]
    frame = frame_of(
        1,
        groups(plain, target_of(1)),
        lambda _: ProducerStamp(CLIENT, 1, 1),
        settled=1,
        unit_bytes_max=3_000,
    )
    assert [len(unit.groups) for unit in frame.units] == [2, 2, 2]


numbers = st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**32, 2**53, 2**63 - 1]) | st.integers(-10, 10)


@given(made=writes_drawn, data=st.data())
def test_writes_that_say_something_else_are_refused_or_take_no_more_rows_than_there_are(
    made: list[Made], data: st.DataObject
) -> None:
    wire, payload = taken(framed(made, target_of(3), is_plain=data.draw(st.booleans())))
    targets = list(wire.targets)
    wired = list(wire.groups)
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(targets) - 1))
            field = data.draw(st.sampled_from(targets[at].__struct_fields__))
            number = data.draw(numbers)
            if field == "payload_bytes" and number == 0:
                number = 1  # no bytes at all have a test of their own
            targets[at] = msgspec.structs.replace(targets[at], **{field: number})
        else:
            at = data.draw(st.integers(0, len(wired) - 1))
            pieces = tuple(data.draw(st.lists(st.tuples(numbers, numbers), max_size=3)))
            wired[at] = msgspec.structs.replace(
                wired[at], pieces=pieces, is_transaction=data.draw(st.booleans())
            )
    changed = WireWrites(1, tuple(targets), tuple(wired))
    try:
        found = made_again(changed, payload)
    except ProtocolError:
        return
    except EOFError:  # Arrow's, see `test_a_batch_of_no_bytes_is_refused`
        return
    seen = Counter[tuple[int, int]]()
    for group in found:
        for piece in group.pieces if isinstance(group, AppendGroup) else ():
            if isinstance(piece.rows, tuple):  # each row is an object of its own
                assert piece.rows
                seen.update((id(row), 0) for row in piece.rows)
                continue
            batch = getattr(piece.rows, "batch", piece.rows)
            start = getattr(piece.rows, "start", 0)
            assert 1 <= len(piece.rows) <= batch.num_rows - start
            seen.update((id(batch), row) for row in range(start, start + len(piece.rows)))
    assert not seen or max(seen.values()) == 1, "a row of two writes"


@given(made=writes_drawn, data=st.data())
def test_rows_with_flipped_bits_are_refused_or_rows(made: list[Made], data: st.DataObject) -> None:
    wire, payload = taken(framed(made, target_of(3), is_plain=data.draw(st.booleans())))
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = made_again(wire, memoryview(bytes(damaged)))
    except ProtocolError:
        return
    except EOFError:  # as above
        return
    for group in found:
        assert isinstance(group, AppendGroup | StreamingNodeError)
        if isinstance(group, AppendGroup):
            told(group)


@pytest.mark.anyio
@pytest.mark.may_block
@pytest.mark.parametrize("shards", [1, 2, 5])
async def test_each_of_the_callers_that_go_together_is_told_where_its_own_rows_are(
    shards: int, tmp_path: Path
) -> None:
    async with node_behind_proxy(tmp_path) as served, served.client() as client:
        await client.create_collection("o", SCHEMA, primary_key="id", shards=shards)
        sizes = [1, 3, 1, 2, 16, 40, 1, 1, 5, 17] * 6
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        calls = [
            client.insert("o", rows(*range(first, first + size)))
            for first, size in zip(starts, sizes, strict=True)
        ]
        results = await asyncio.gather(*calls)
        assert len({result.time_tick for result in results}) < len(results), "some went together"
        by_place: dict[tuple[str, int], int] = {}
        async with served.owner.read("o", until=await served.owner.consistent_tick()) as messages:
            async for message in messages:
                table = message.to_arrow()
                if message.type is not sn.MessageType.INSERT or table is None:
                    continue
                place_by_shard(served.owner, message, [*map(int, table["id"].to_numpy())], by_place)
        for first, size, result in zip(starts, sizes, results, strict=True):
            mine = {
                by_place[vchannel, at + n]
                for vchannel, (at, rows_of) in result.row_offsets.items()
                for n in range(rows_of)
            }
            assert mine == set(range(first, first + size))
        assert (await contents(served.owner, "o")).keys() == set(range(sum(sizes)))


def place_by_shard(
    node: Node, message: sn.ReadMessage, keys: list[int], by_place: dict[tuple[str, int], int]
) -> None:
    """Note where the rows of a message are: those of a shard follow each other from its first
    offset on.
    """
    target = WriteTarget(parts_of(node).catalog.collection_by_name("o")).inserts(1)
    batch = pa.RecordBatch.from_pylist([{"id": key, "item": None} for key in keys], schema=SCHEMA)
    shards = target.shards(batch).tolist()
    next_offset = {vchannel: first for vchannel, (first, _) in message.row_offsets.items()}
    for key, shard in zip(keys, shards, strict=True):
        vchannel = target.vchannels[shard]
        by_place[vchannel, next_offset[vchannel]] = key
        next_offset[vchannel] += 1


@pytest.mark.anyio
@pytest.mark.parametrize("over_connection", [False, True], ids=["own", "client"])
async def test_a_write_by_transaction_id_over_a_group_is_refused_and_the_transaction_goes_on(
    *, over_connection: bool
) -> None:
    settings: dict[str, Any] = {"wal.group_bytes_max": 64 << 10}
    async with node_behind_proxy(**settings) as served, served.client() as client:
        node = client if over_connection else served.owner
        txn_id = await node.begin_transaction()
        await node.insert("c", rows(1), txn_id=txn_id)
        with pytest.raises(TooLarge, match="one append group"):
            await node.insert("c", rows(*range(2, 1_000), item="tea" * 50), txn_id=txn_id)
        await node.insert("c", rows(2), txn_id=txn_id)
        assert await contents(served.owner) == {}
        await node.commit_transaction(txn_id)
        await node.consistent_tick()
        assert (await contents(served.owner)).keys() == {1, 2}
