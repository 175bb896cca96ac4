import pytest

from tests.interceptors.live_channel import LiveChannel
from wal.errors import OnShutdown
from wal.log import AppendGroup, AppendResult

pytestmark = pytest.mark.anyio


async def test_rollback_worker_ends_when_the_log_takes_no_more() -> None:
    async with LiveChannel.open() as channel:
        await channel.begin(10)
        channel.pass_ms(11)
        channel.txn.expire()
        groups: list[AppendGroup] = []

        async def closed(group: AppendGroup) -> AppendResult:
            groups.append(group)
            raise OnShutdown("closed")

        await channel.rollbacks.run(closed)
        assert len(groups) == 1
        assert channel.txn.live == 1
