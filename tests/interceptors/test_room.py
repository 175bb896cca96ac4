"""Room is waited for behind the window of retries and before redo, and never by what others wait
for.
"""

import asyncio

import anyio
import pytest

from interceptors.chain import Chain, Redo, RedoInterceptor, RoomInterceptor
from interceptors.idempotency import IdempotencyInterceptor, Sequences
from interceptors.window import Window
from tests.interceptors.idempotency.test_window import result_at
from tests.wal.packed import FakeTarget, piece, rows_group, transaction_group
from wal.append import AppendGroup, AppendResult, Pack
from wal.errors import OnShutdown, StorageFull, TooLarge
from wal.headers import (
    DML,
    BeginTxnHeader,
    CommitTxnHeader,
    CreateSegmentHeader,
    Header,
    InsertHeader,
    MessageType,
)
from wal.message import MutableMessage
from wal.position import ProducerStamp
from wal.queue import Budget

pytestmark = pytest.mark.anyio

FULL = StorageFull("/", 0, 1)


def rows(size_bytes: int, stamp: ProducerStamp | None = None) -> AppendGroup:
    group = rows_group(piece(FakeTarget(), (0, b"x" * size_bytes)))
    group.producer = stamp
    return group


def bodies(size_bytes: int) -> AppendGroup:
    return AppendGroup(
        [
            MutableMessage(
                MessageType.INSERT, InsertHeader(1, 2, 3, 1), "p0_1v0", b"x" * size_bytes, 5
            )
        ]
    )


def control(kind: MessageType, header: Header) -> AppendGroup:
    return AppendGroup([MutableMessage(kind, header)])


class Path:
    """Idempotency, room and redo in front of a log that is full when told, and of appends that are
    sent back once.
    """

    def __init__(self, memory: Budget) -> None:
        self.memory = memory
        self.full = False
        self.appended = list[Pack]()
        self.until: asyncio.Future[None] | None = None
        window = Window()
        window.fence(7, 1)
        idempotency = IdempotencyInterceptor(window, Sequences())
        self.room = RoomInterceptor(self.admit, memory)
        self.chain = Chain([idempotency, self.room, RedoInterceptor()], self.end)

    async def admit(self, size_bytes: int, *, makes_room: bool = False) -> None:
        if self.full and not makes_room:
            raise FULL

    async def end(self, pack: Pack) -> None:
        if pack.first_type in DML and self.until is not None and not self.until.done():
            raise Redo(self.until, waiting_for="a segment")
        self.appended.append(pack)
        for group in pack.groups:
            group.settle(result_at(len(self.appended)))

    async def append(self, group: AppendGroup) -> AppendResult:
        await self.chain.append(Pack([group]))
        return group.result()


def size_of(group: AppendGroup) -> int:
    return group.size_bytes


async def test_full_disk_is_no_answer_to_a_retry_of_what_is_in_the_log() -> None:
    path = Path(Budget(10_000))
    stamp = ProducerStamp(7, 1, 1)
    first = await path.append(rows(10, stamp))
    path.full = True
    assert await path.append(rows(10, stamp)) == first
    with pytest.raises(StorageFull):
        await path.append(rows(10, ProducerStamp(7, 1, 2)))
    assert path.memory.held_bytes == 0


async def test_append_that_waits_in_redo_counts_and_the_next_one_waits_for_its_room() -> None:
    path = Path(Budget(2 * size_of(bodies(1000)) - 1))
    path.until = asyncio.get_running_loop().create_future()
    first, second = [asyncio.ensure_future(path.append(bodies(1000))) for _ in range(2)]
    await anyio.wait_all_tasks_blocked()
    assert path.memory.held_bytes == size_of(bodies(1000))
    created = await path.append(
        control(MessageType.CREATE_SEGMENT, CreateSegmentHeader(1, 2, 3, 4, 5, 6))
    )
    assert created, "what the first one waits for finds its way past both"
    path.until.set_result(None)
    await asyncio.gather(first, second)
    assert path.memory.held_bytes == 0


async def test_bodies_count_and_neither_an_end_nor_rows_that_hold_their_own_do() -> None:
    path = Path(Budget(300))
    with pytest.raises(TooLarge, match="pending_bytes_max"):
        await path.append(bodies(1000))
    assert path.memory.try_take(300)
    await path.append(rows(1000))
    await path.append(transaction_group(*rows(1000).pieces))
    await path.append(control(MessageType.BEGIN_TXN, BeginTxnHeader(0)))
    await path.append(control(MessageType.COMMIT_TXN, CommitTxnHeader()))


async def test_bodies_count_until_their_append_has_ended() -> None:
    path = Path(Budget(10_000))
    path.until = asyncio.get_running_loop().create_future()
    group = bodies(100)
    appending = asyncio.ensure_future(path.append(group))
    await anyio.wait_all_tasks_blocked()
    assert path.memory.held_bytes == size_of(group)
    path.until.set_result(None)
    await appending
    assert path.memory.held_bytes == 0


async def test_closing_sends_away_who_waits_for_room() -> None:
    path = Path(Budget(size_of(bodies(10))))
    assert path.memory.try_take(1)
    waiting = asyncio.ensure_future(path.append(bodies(10)))
    await anyio.wait_all_tasks_blocked()
    await path.chain.close()
    path.memory.give_back(1)
    with pytest.raises(OnShutdown):
        await waiting
    assert (path.memory.held_bytes, path.appended) == (0, [])
