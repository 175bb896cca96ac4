"""A verification walks the entries of topics, too: of a closed node and of a running one."""

import itertools
from pathlib import Path

import pytest
from rocksdict import WriteBatch

import streamingnode as sn
from streamingnode.care.verify import verify_directory
from wal.rocks.database import open_rocksdb
from wal.rocks.layout import DATABASE_NAME, ENTRY_FAMILY, RocksOptions, entry_key
from wal.rocksmq.topic import LOG_ID_FIRST
from wal.runtime import in_thread

pytestmark = pytest.mark.anyio


async def fill(directory: Path) -> list[range]:
    """Return the ids of three entries of a topic."""
    async with sn.open_node(directory) as node:
        await node.mq.create_topic("events")
        await node.mq.create_consumer_group("events", "g")
        return [await node.mq.produce("events", [b"a", b"b"]) for _ in range(3)]


def change(directory: Path, key: bytes, value: bytes | None) -> None:
    """Put another value in an entry's place, or none, as damage that RocksDB does not notice."""
    database = open_rocksdb(directory / DATABASE_NAME, RocksOptions(), writable=True)
    batch = WriteBatch(raw_mode=True)
    family = database.get_column_family_handle(ENTRY_FAMILY)
    batch.put(key, value, family) if value is not None else batch.delete(key, family)
    database.write(batch)
    database.flush_wal(sync=True)
    del family
    database.close()


@pytest.mark.may_block
async def test_messages_of_sound_topics_are_counted_by_a_closed_and_by_a_running_node(
    tmp_path: Path,
) -> None:
    await fill(tmp_path / "node")
    report = await in_thread(verify_directory, tmp_path / "node")
    assert (report.findings, report.counts["topics"], report.counts["topic messages"]) == ([], 1, 6)
    async with sn.open_node(tmp_path / "node") as node:
        report = await node.verify()
    assert (report.findings, report.counts["topic messages"]) == ([], 6)


@pytest.mark.may_block
@pytest.mark.parametrize("value", [None, b"x" * 80], ids=["missing", "damaged"])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_an_entry_that_is_not_what_was_written_is_named_with_its_topic(
    tmp_path: Path, at: int, value: bytes | None
) -> None:
    ids = await fill(tmp_path / "node")
    change(tmp_path / "node", entry_key(LOG_ID_FIRST, ids[at][-1]), value)
    [damage] = (await in_thread(verify_directory, tmp_path / "node")).damages
    assert damage.place.startswith("topic 'events', from id")
    async with sn.open_node(tmp_path / "node") as node:
        assert [found.place[:14] for found in (await node.verify()).damages] == ["topic 'events'"]
        # a topic that ends too early is not read at all
        sound = [] if at == 2 else [*itertools.chain(*ids[:at])]
        assert (
            not sound
            or [each.message_id for each in await node.mq.consume("events", "g", 9)] == sound
        )
        with pytest.raises(sn.errors.Corrupt, match="events"):
            await node.mq.consume("events", "g", 9)
        await node.mq.create_topic("other")  # the rest goes on
