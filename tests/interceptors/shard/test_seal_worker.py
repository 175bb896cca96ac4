import pytest

from tests.interceptors.live_channel import LiveChannel, insert
from wal.errors import OnShutdown, StorageFull
from wal.log import AppendGroup, AppendResult

pytestmark = pytest.mark.anyio


class Refuse:
    def __init__(self, error: Exception) -> None:
        self.error = error
        self.groups: list[AppendGroup] = []

    async def __call__(self, group: AppendGroup) -> AppendResult:
        self.groups.append(group)
        raise self.error


async def test_refused_seal_is_left_to_the_next_look() -> None:
    async with LiveChannel.open() as channel:
        await channel.append(insert(await channel.create_collection("a"), 1))
        channel.now_ms += 86_400_000 + 1
        assert await channel.sealer.seal_due(Refuse(StorageFull("disk", 1, 2))) == 0
        assert await channel.sealer.seal_due(channel.append_group) == 1


async def test_sealer_ends_when_the_log_takes_no_more() -> None:
    async with LiveChannel.open() as channel:
        await channel.append(insert(await channel.create_collection("a"), 1))
        channel.now_ms += 86_400_000 + 1
        closed = Refuse(OnShutdown("closed"))
        channel.shard.segment_full.set()
        await channel.sealer.run(closed)
        assert len(closed.groups) == 1
