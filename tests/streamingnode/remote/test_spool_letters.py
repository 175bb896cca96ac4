"""Dead letters of a spool whose disk fails while it writes them: each is there once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamingnode.remote import spool
from tests.failing_disk import FailingDisk, Fault
from tests.streamingnode.remote.nodes import node_behind_proxy, rows
from tests.streamingnode.remote.spool_cases import emptied, letters_in, lose
from wal.rocksmq.messages import ProducerMessage
from wal.rocksmq.queue import RocksMQ

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]


@pytest.mark.parametrize("fault", [Fault.SYNC_LOST, Fault.SYNC_DONE, Fault.WRITE_DONE])
@pytest.mark.parametrize("fails_at", [1, 2])
async def test_each_dead_letter_is_there_once_after_a_write_of_letters_that_failed(
    tmp_path: Path, fault: Fault, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch, fault)
    produce = RocksMQ.produce
    parts = 0

    async def failing(mq: RocksMQ, topic: str, messages: Sequence[ProducerMessage]) -> range:
        nonlocal parts
        if topic == spool.DEAD:
            parts += 1
            if parts == fails_at:
                disk.fail_at(1)
        return await produce(mq, topic, messages)

    monkeypatch.setattr(RocksMQ, "produce", failing)
    monkeypatch.setattr(spool, "PRODUCE_BYTES_MAX", 2)  # each letter goes by itself
    async with node_behind_proxy() as served:
        async with served.client(spool=tmp_path / "spool") as client:
            await lose(client, served.proxy)
            await asyncio.gather(client.insert("c", rows(1)), client.delete("c", [2]))
            await served.owner.drop_collection("c")
            served.proxy.is_refusing = False
            await emptied(client)
    assert disk.reached
    letters = await letters_in(tmp_path / "spool")
    assert sorted(letter.properties["kind"] for letter in letters) == ["delete", "insert"]
