"""What a client may hold, or hold up: no more than is accounted for, whatever it sends and then
leaves behind.
"""

import asyncio
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from interceptors.shard.catalog import Catalog, CollectionInfo
from scanner.scanner import ScanBatch
from streamingnode.embedded import EmbeddedReading
from streamingnode.remote import server
from streamingnode.remote.calls import ReadCall
from streamingnode.remote.writes import WireGroup, WireWrites
from tests.failing_disk import FailingDisk
from tests.parts_of import parts_of
from tests.streamingnode.remote.client_cases import SMALL, filled
from tests.streamingnode.remote.nodes import Served, keys_in_log, node_behind_proxy, rows
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.remote.raw import raw_client, writes_of
from tests.streamingnode.remote.session_cases import INSERTS, greeted, session_of
from wal import wire_types
from wal.frames import FrameKind
from wal.position import ProducerStamp

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


async def test_rows_of_a_negative_length_do_not_have_the_same_bytes_decoded_again_and_again(
    served: Served,
) -> None:
    made, data = writes_of(served.owner, range(100))
    (target,) = made.targets
    back = msgspec.structs.replace(target, collection_id=9, payload_bytes=-len(data))
    group = WireGroup(1, False, ((0, 1),))
    async with greeted(served) as client:
        client.say(FrameKind.WRITES, 1, WireWrites(1, (target, back, target), (group,)), data)
        while (frame := await client.frame()) is not None:
            assert frame.kind != FrameKind.RESULTS


async def test_a_name_that_comes_a_million_times_is_looked_up_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()
    find = Catalog.collection_by_name

    def counted(catalog: Catalog, name: str) -> CollectionInfo:
        looked_up.append(name)
        return find(catalog, name)

    async with greeted(served) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "collection_by_name", counted)
            client.call(1, "consistent_tick", [["c"] * 1_000_000])
            await client.expect(FrameKind.REPLY)
    assert looked_up == ["c"]


@pytest.mark.parametrize(
    "stamp",
    [
        (0, 1 << 32, 1),
        (0, 2, 1),
        (0, -1, 1),
        (0, 1, 0),
        (0, 1, 1 << 63),
        ((1 << 62) + 77, 1, 1),
    ],
)
async def test_a_change_under_a_stamp_that_no_client_gives_is_refused(
    served: Served, stamp: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_client(served.port) as client:
        await client.greet()
        client.call(1, "create_partition", ["c", "p", False, ProducerStamp(*stamp)])
        assert (await client.error()).code == "PROTOCOL_ERROR"
    assert served.owner.collection("c").partitions == ("_default",)
    assert "call_failed" not in caplog.text


async def test_a_table_is_encoded_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = list[bool]()
    encode = wire_types.encode

    def noted(value: object) -> bytes:
        if isinstance(value, pa.Table):
            here.append(threading.current_thread() is threading.main_thread())
        return encode(value)

    monkeypatch.setattr(server, "encode", noted)
    await served.owner.insert("c", rows(1))
    async with served.client() as client:
        assert (await client.snapshot("c")).num_rows == 1
    assert here == [False]


async def test_a_stream_without_credit_holds_nothing_of_the_log(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[ScanBatch]()
    next_batch = EmbeddedReading.next_batch

    async def noted(reading: EmbeddedReading) -> ScanBatch:
        taken.append(await next_batch(reading))
        return taken[-1]

    monkeypatch.setattr(EmbeddedReading, "next_batch", noted)
    (info,) = parts_of(served.owner).catalog.collections()
    async with greeted(served) as client:
        client.call(1, "read", ReadCall(info.id, "all", None, None, None, INSERTS, None, 0))
        await client.expect(FrameKind.OPENED)
        await served.owner.insert("c", rows(1))
        await client.still_served()
        assert not taken
        client.say(FrameKind.CREDIT, 1, 1)
        await client.expect(FrameKind.MESSAGES)
        assert taken


# --- writes without room --------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True])
async def test_writes_without_room_that_nobody_waits_for_any_more_are_not_kept(
    is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    async with node_behind_proxy(tmp_path, **SMALL) as served:
        disk.gate.clear()
        tasks = await filled(served.owner, served, 0, 40)
        try:
            async with greeted(served) as client:
                writes = session_of(served)._writes
                for key in range(100, 150):
                    group = WireGroup(key, False, ((0, 1),))
                    client.say(FrameKind.WRITES, key, *writes_of(served.owner, [key], group))
                    if not (is_lost or key == 100):
                        client.say(FrameKind.CANCEL, key)
                await client.still_served()
                assert is_lost or not writes._without_room
            await until(lambda: not served.server.sessions and not writes._joining)
        finally:
            disk.gate.set()
        await asyncio.gather(*tasks)
        await served.owner.insert("c", rows(1000))
        assert not {*range(100, 150)} & {*await keys_in_log(served.owner)}
