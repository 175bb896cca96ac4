"""A packer whose packs end when and how a test says."""

import asyncio

from tests.wal.manual_log import settle
from tests.wal.packed import FakeTarget, insert_group
from wal.append import AppendGroup, AppendResult, AppendTicket, Pack
from wal.message import MESSAGE_OVERHEAD_BYTES
from wal.packer import Packer
from wal.position import MemoryMessageId
from wal.queue import Budget

TARGET = FakeTarget()


def write(size_bytes: int = 100) -> AppendGroup:
    """Return a group of a row that counts for so many bytes."""
    return insert_group(TARGET, data=bytes(size_bytes - MESSAGE_OVERHEAD_BYTES))


def result(number: int) -> AppendResult:
    return AppendResult(
        kind=MemoryMessageId,
        first_position=number,
        count=1,
        time_tick=number,
        last_confirmed_position=number,
    )


def queued() -> AppendTicket:
    """Return the ticket of a pack in the log's queue."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return AppendTicket(1, done, done)


class Log:
    """Where packs go: each ends when the test says so, unless it is not `held`; groups are numbered
    as they end.
    """

    def __init__(self, *, held: bool = True, memory: int = 1 << 30, company: int = 1) -> None:
        self.memory = Budget(memory)
        self.packer = Packer(self._send, self.memory, company=company)
        self.held = held
        self.packs: list[list[AppendGroup]] = []
        """What each pack was when it came."""
        self.tasks: list[object] = []
        self.under_way: list[tuple[Pack, asyncio.Future[None]]] = []
        self.ended = 0

    async def _send(self, pack: Pack) -> None:
        self.packs.append(list(pack.groups))
        self.tasks.append(asyncio.current_task())
        if self.held:
            under_way = pack, asyncio.get_running_loop().create_future()
            self.under_way.append(under_way)
            try:
                await under_way[1]
            finally:
                if under_way in self.under_way:
                    self.under_way.remove(under_way)
        for group in pack.groups:
            self.ended += 1
            group.settle(result(self.ended))

    async def end(self, at: int = 0, error: Exception | None = None) -> None:
        """End a pack under way."""
        _, ended = self.under_way.pop(at)
        if ended.done():  # its task is being cancelled
            pass
        elif error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
        await settle()

    async def end_all(self) -> None:
        while self.under_way:
            await self.end()

    async def start(self, *groups: AppendGroup) -> list[asyncio.Future[AppendResult]]:
        """Append groups, one call after the other, and let all run as far as they get."""
        appends: list[asyncio.Future[AppendResult]] = [
            asyncio.ensure_future(self.packer.append(group)) for group in groups
        ]
        await settle()
        return appends

    @property
    def sent(self) -> list[AppendGroup]:
        return [group for groups in self.packs for group in groups]
