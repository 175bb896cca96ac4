"""What a spool does not take, what a node does not take from it, and directories that are damaged,
copied or in use.
"""

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

import streamingnode as sn
from streamingnode.errors import (
    AlreadyOwned,
    Corrupt,
    Indeterminate,
    InvalidArgument,
    Overloaded,
    StorageFull,
    Unreachable,
)
from streamingnode.remote.answers import ClientWrites
from streamingnode.remote.spool import CONFIG, SALT_BITS, WRITES, Known, dead_letters
from streamingnode.remote.writes import WireGroup, WireTarget, WireWrites
from tests.failing_disk import FailingDisk, Fault
from tests.streamingnode.remote.nodes import (
    SCHEMA,
    contents,
    keys_in_log,
    node_behind_proxy,
    rows,
)
from tests.streamingnode.remote.proxy import Way, kinds, until
from tests.streamingnode.remote.spool_cases import (
    come_back,
    emptied,
    letters_in,
    lose,
    some_rows,
    spool_of,
)
from wal.frames import FrameKind, encode_frame
from wal.headers import MessageType
from wal.rocksmq.messages import ProducerMessage
from wal.rocksmq.queue import RocksMQ
from wal.wire_types import Welcome

pytestmark = pytest.mark.anyio


# --- what is not kept -----------------------------------------------------------------------------


async def test_calls_and_writes_of_named_producers_are_refused_without_node_and_wait_behind_spool(
    tmp_path: Path,
) -> None:
    async with (
        node_behind_proxy() as served,
        served.client(spool=tmp_path / "spool", give_up_s=0.05) as client,
    ):
        producer = await client.producer("p")
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        for call in (
            client.snapshot("c"),
            client.create_collection("d", SCHEMA, primary_key="id"),
            client.begin_transaction(),
            client.statistics(),
            producer.insert("c", rows(2)),
        ):
            with pytest.raises(Unreachable):
                await call
        served.proxy.stop(Way.TO_NODE)
        served.proxy.is_refusing = False
        late = asyncio.ensure_future(producer.insert("c", rows(3), sequence=7))
        served.proxy.go_on()
        while not late.done():
            try:
                await late
            except Unreachable:
                late = asyncio.ensure_future(producer.insert("c", rows(3), sequence=7))
        assert not late.result().spooled
        assert await keys_in_log(served.owner) == [1, 3]
        assert producer.last_sequence == 7


async def test_a_spool_that_is_full_refuses_by_name_and_loses_nothing_of_what_it_has(
    tmp_path: Path,
) -> None:
    spool = tmp_path / "spool"
    async with (
        node_behind_proxy() as served,
        served.client(spool=spool, spool_bytes_max=64 << 10) as client,
    ):
        await lose(client, served.proxy)
        kept = []
        for key in range(40):
            try:
                await client.insert("c", rows(key, item="x" * 3_000))
                kept.append(key)
            except Overloaded as error:
                assert "spool_bytes_max" in str(error)  # noqa: PT017 - some of the calls
        assert 15 < len(kept) < 25
        assert spool_of(client).bytes <= 64 << 10
        await client.insert("c", rows(1000))  # a small one fits
        with pytest.raises(Overloaded):
            await asyncio.gather(
                *[client.insert("c", rows(key, item="x" * 3_000)) for key in range(50, 60)]
            )
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [*kept, 1000]
        await lose(client, served.proxy)
        assert (await client.insert("c", rows(60, item="x" * 3_000))).spooled
        await come_back(client, served.proxy)


async def test_a_spool_is_as_full_when_it_is_opened_again(tmp_path: Path) -> None:
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            for key in range(10):
                await client.insert("c", rows(key, item="x" * 3_000))
            before = spool_of(client)
        async with served.client(spool=tmp_path / "spool") as client:
            after = spool_of(client)
            assert (after.frames, before.frames) == (10, 10)
            assert after.bytes == before.bytes
            await come_back(client, served.proxy)
            assert (spool_of(client).frames, spool_of(client).writes, spool_of(client).bytes) == (
                0,
                0,
                0,
            )
        assert await keys_in_log(served.owner) == list(range(10))


async def test_a_spool_whose_numbers_are_used_up_refuses_and_what_it_has_takes_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.spool.MESSAGES_MAX", 2)
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        await lose(client, served.proxy)
        for key in range(2):
            assert (await client.insert("c", rows(key))).spooled
        with pytest.raises(Overloaded, match="another directory"):
            await client.insert("c", rows(2))
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [0, 1]


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name.lower())
async def test_a_write_that_fails_at_the_disk_is_in_doubt_and_the_next_ones_are_kept_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        disk = FailingDisk(monkeypatch, fault)
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        disk.fail_at(1)
        with pytest.raises(Indeterminate):
            await client.insert("c", rows(2))
        disk.heal()
        assert (await client.insert("c", rows(3))).spooled
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) in ([1, 3], [1, 2, 3])
        assert spool_of(client).frames == 0


async def test_a_write_that_the_node_refuses_for_good_is_a_dead_letter_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "spool"
    async with node_behind_proxy() as served, served.client(spool=directory) as client:
        await client.create_collection(
            "gone", SCHEMA, primary_key="id", shards=2, partitions=["eu"]
        )
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        both = client.insert("gone", rows(2), partition="eu"), client.insert("c", rows(3))
        assert all(result.spooled for result in await asyncio.gather(*both))
        async with client.transaction() as txn:
            await txn.upsert("gone", rows(4))
            await txn.insert("c", rows(5))
        await client.insert("c", rows(6))
        await served.owner.drop_collection("gone")
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1, 3, 6]
        assert spool_of(client).dead_letters == 4
        assert caplog.text.count("spooled_write_refused") == 2
    letters = {}
    for letter in await letters_in(directory):
        said = letter.properties
        assert (said["code"], said["topic"]) == ("COLLECTION_NOT_FOUND", WRITES)
        assert said["bridge"].startswith("spool-")
        assert said["error"].startswith("no live collection has the id")
        found = pa.ipc.open_stream(letter.payload).read_all()
        letters[said["collection"], said["kind"], said["partition"]] = found.to_pylist()
    assert letters == {
        ("gone", "insert", "eu"): rows(2),
        ("gone", "delete", ""): [{"id": 4}],
        ("gone", "insert", "_default"): rows(4),
        ("c", "insert", "_default"): rows(5),
    }


async def test_dead_letters_are_not_doubled_when_their_message_comes_again_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RocksMQ.seek

    async def forget(mq: RocksMQ, topic: str, group: str, message_id: int) -> None:
        if topic != WRITES:
            await real(mq, topic, group, message_id)

    directory = tmp_path / "spool"
    async with node_behind_proxy() as served:
        async with served.client(spool=directory) as client:
            await client.create_collection("gone", SCHEMA, primary_key="id")
            await lose(client, served.proxy)
            await client.insert("c", rows(1))
            await asyncio.gather(*[client.upsert("gone", rows(key)) for key in range(3)])
            await served.owner.drop_collection("gone")
            with monkeypatch.context() as patched:
                patched.setattr("streamingnode.remote.spool.PRODUCE_BYTES_MAX", 2)  # one by one
                patched.setattr(RocksMQ, "seek", forget)
                await come_back(client, served.proxy)
        before = await letters_in(directory)
        assert len(before) == 6
        async with served.client(spool=directory) as client:
            assert spool_of(client).frames
            assert spool_of(client).dead_letters == 6
            await emptied(client)
        assert await letters_in(directory) == before
        assert await keys_in_log(served.owner) == [1]


async def test_what_an_earlier_release_kept_takes_place_and_its_dead_letters_stay(
    tmp_path: Path,
) -> None:
    """Its topics are the same; its dead letters are files."""
    directory = tmp_path / "spool"
    letter = directory / "dead-letters" / "5-0.arrow"
    async with node_behind_proxy() as served:
        async with served.client(spool=directory) as client:
            await lose(client, served.proxy)
        letter.parent.mkdir()
        letter.write_bytes(b"letter")
        collection = served.owner.collection("c")
        info = served.owner._backend.catalog.live(collection.id)
        target = WireTarget(int(MessageType.INSERT), info.id, info.partitions[0].id, 1, 0, True)
        async with sn.open_node(directory, config=CONFIG) as kept:
            for key in range(3):
                payload = msgspec.msgpack.encode([(key, f"tea {key}")])
                into = replace(target, payload_bytes=len(payload))
                writes = WireWrites(0, (into,), (WireGroup(1, False, ((0, 1),)),))
                frame = b"".join(encode_frame(FrameKind.WRITES, 0, writes, payload))
                properties = {"writes": "1", "at_ms": "1700000000000", "salt": "77"}
                await kept.mq.produce(WRITES, [ProducerMessage(frame, properties)])
        async with served.client(spool=directory) as client:
            assert spool_of(client).frames == 3
            await come_back(client, served.proxy)
            assert spool_of(client).dead_letters == 0
        assert await keys_in_log(served.owner) == [0, 1, 2]
        assert letter.read_bytes() == b"letter"


async def test_a_node_that_refuses_for_now_is_asked_again_and_makes_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.spool.PAUSE_S", 0.01)
    refused = 0

    def overloaded(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise Overloaded("the node has no room for now")

    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        producer = await client.producer("p")
        await lose(client, served.proxy)
        await client.insert("c", rows(1))
        with monkeypatch.context() as patched:
            patched.setattr(ClientWrites, "target", overloaded)
            served.proxy.is_refusing = False
            await until(lambda: refused > 3)
            assert spool_of(client).state == "refused"
            assert (await client.insert("c", rows(2))).spooled
            for call in (client.snapshot("c"), producer.insert("c", rows(3))):
                with pytest.raises(Overloaded, match="no room for now"):
                    await call
        await come_back(client, served.proxy)
        assert await keys_in_log(served.owner) == [1, 2]
        assert spool_of(client).dead_letters == 0


# --- directories ----------------------------------------------------------------------------------


async def test_a_directory_is_of_one_connection_and_of_one_node(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool"):
        with pytest.raises(AlreadyOwned):
            await sn.connect(served.proxy.url, spool=tmp_path / "spool")
    async with node_behind_proxy() as other:
        with pytest.raises(InvalidArgument, match="is node"):
            await sn.connect(other.proxy.url, spool=tmp_path / "spool")
    with pytest.raises(InvalidArgument, match="spool_bytes_max"):
        sn.connect(f"unix:{tmp_path}/x", spool=tmp_path / "spool", spool_bytes_max=10)


async def test_a_node_that_takes_no_more_connections_is_away_for_a_spool_that_knows_it(
    tmp_path: Path,
) -> None:
    async with node_behind_proxy(connections_max=7) as served:  # of which one address may have one
        async with served.client(spool=tmp_path / "spool"):
            pass
        await until(lambda: not served.server.sessions)
        async with served.client(), served.client(spool=tmp_path / "spool") as client:
            assert (await client.insert("c", rows(1))).spooled
        await until(lambda: not served.server.sessions)
        async with served.client(spool=tmp_path / "spool") as client:
            await emptied(client)
            assert await contents(served.owner) == {1: "tea 1"}


async def test_a_damaged_spool_is_refused(tmp_path: Path) -> None:
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            await client.insert("c", rows(1, item="x" * 9_000))
        for path in (tmp_path / "spool" / "log").iterdir():
            path.write_bytes(path.read_bytes().replace(b"x" * 100, b"y" * 100))
        with pytest.raises(Corrupt):
            await sn.connect(served.proxy.url, spool=tmp_path / "spool")


async def test_a_spool_that_was_replayed_on_a_full_disk_is_not_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the node remembers only the newest of its writes."""

    real = RocksMQ.seek

    async def refuse(mq: RocksMQ, topic: str, group: str, message_id: int) -> None:
        if topic == WRITES:
            raise StorageFull("spool", 0, 1)
        await real(mq, topic, group, message_id)

    settings: dict[str, Any] = {"producers.results_per_producer_max": 8}
    async with node_behind_proxy(**settings) as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            for key in range(40):
                await client.insert("c", rows(key))
        served.proxy.is_refusing = False
        monkeypatch.setattr(RocksMQ, "seek", refuse)
        for _ in range(3):
            async with served.client(spool=tmp_path / "spool") as client:
                assert spool_of(client).frames == 40
                await emptied(client)
                assert spool_of(client).dead_letters == 0
        assert await keys_in_log(served.owner) == list(range(40))


@pytest.mark.parametrize("salts", [(5, 9), (9, 5)], ids=["more", "less"])
async def test_copies_of_one_directory_never_take_one_write_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salts: tuple[int, int]
) -> None:
    randbits = secrets.randbits
    numbers = iter((1, *salts, 1, 1))
    monkeypatch.setattr(
        secrets, "randbits", lambda bits: next(numbers) if bits == SALT_BITS else randbits(bits)
    )
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool"):
            pass
        served.proxy.is_refusing = True
        shutil.copytree(tmp_path / "spool", tmp_path / "copy")
        for key, directory in enumerate(("spool", "copy")):
            async with served.client(spool=tmp_path / directory) as client:
                assert (await client.insert("c", rows(key))).spooled
        served.proxy.is_refusing = False
        for directory in ("spool", "copy"):
            async with served.client(spool=tmp_path / directory) as client:
                await emptied(client)
        assert sorted(await keys_in_log(served.owner)) == [0, 1]


async def test_a_spool_goes_on_when_its_producer_was_deleted(tmp_path: Path) -> None:
    async with node_behind_proxy() as served, served.client(spool=tmp_path / "spool") as client:
        for key in range(2):
            await lose(client, served.proxy)
            await client.insert("c", rows(key))
            await come_back(client, served.proxy)
            channel = served.owner._backend.channel  # type: ignore[attr-defined]
            (name,) = [each for each in channel.producers._records if each.startswith("spool-")]
            assert await served.owner.delete_producer(name)
        assert await keys_in_log(served.owner) == [0, 1]


@pytest.mark.parametrize("kept, by_another, letters", [(1, False, 0), (3, False, 0), (1, True, 1)])
async def test_what_the_log_has_and_the_node_has_forgotten_is_no_dead_letter(
    tmp_path: Path, kept: int, by_another: bool, letters: int
) -> None:
    """Unless somebody else had the spool's producer: then the last in the log may be another's
    write.
    """
    settings: dict[str, Any] = {"producers.results_age_s": 0.001}
    async with node_behind_proxy(tmp_path / "node", **settings) as served:
        async with served.client(spool=tmp_path / "spool", give_up_s=0.05) as client:
            await lose(client, served.proxy)
            for key in range(kept):
                assert (await client.insert("c", rows(key))).spooled
            served.proxy.on_frame = kinds(FrameKind.RESULTS)
            served.proxy.is_refusing = False
            await some_rows(served.owner)
        served.proxy.on_frame = lambda _: True
        await served.owner.insert("c", rows(100))
        await served.owner.flush()
        if by_another:
            producers = served.owner._backend.channel.producers  # type: ignore[attr-defined]
            (name,) = [each for each in producers._records if each.startswith("spool-")]
            await served.owner.producer(name)
        async with served.client(spool=tmp_path / "spool") as client:
            assert spool_of(client).frames == kept
            await emptied(client)
            assert spool_of(client).dead_letters == letters
            assert spool_of(client).frames == 0
        assert sorted(await keys_in_log(served.owner)) == [*range(kept), 100]


@pytest.mark.may_block
def test_a_blocking_client_has_a_spool_too(tmp_path: Path) -> None:
    with sn.sync.open_node(tmp_path / "node") as owner:
        owner.create_collection("c", SCHEMA, primary_key="id")
        with sn.sync.connect(f"unix:{tmp_path}/node/node.sock", spool=tmp_path / "spool") as client:
            assert client.insert("c", rows(1)).spooled
            assert client.snapshot("c").num_rows == 1
            told = client.statistics().spool
            assert told is not None
            assert told.state == "connected"
    with sn.sync.connect(f"unix:{tmp_path}/node/node.sock", spool=tmp_path / "spool") as client:
        assert client.insert("c", rows(2)).spooled
        assert client.spool is not None
        assert client.spool.writes == 1


def test_a_refused_write_to_a_collection_that_nobody_told_of_is_kept_as_it_was_sent() -> None:
    writes = WireWrites(
        0, (WireTarget(int(MessageType.INSERT), 7, 1, 1, 3),), (WireGroup(5, False, ((0, 1),)),)
    )
    known = Known("spool-x", 0, Welcome(1, "node", None, "rocks", 1, {}), ())
    error = Overloaded("no")
    assert [*dead_letters(writes, memoryview(b"abc"), {0: error}, known)] == [
        (b"abc", {"kind": "insert", "code": "OVERLOADED", "sequence": "5"}, error)
    ]
